"""FID, sFID, Inception score, precision, recall and KID of a set of images against a reference.

Memory does not grow with the number of images. Statistics of reference images are stored beside them; published
statistics can be read.
"""

import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..files import write_tensors
from .extractors import FeatureExtractor, ImageFeatures
from .images import Images
from .metrics import (
    FeatureStatistics,
    InceptionScore,
    Normal,
    frechet_distance,
    kernel_distance,
    precision_recall,
)

_KEPT_FEATURES = 10_000
"""Number of reference features for precision, recall and KID, as in the ADM suite."""
_STABLE = 5
"""Samples per channel for a stable Fréchet distance: 10 240 for the 2048 channels of Inception."""
_NEIGHBOURS = 3

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


class FewSamplesWarning(UserWarning):
    """Too few samples for a stable Fréchet distance."""


@dataclass(frozen=True)
class Description:
    """A set of images as described by an extractor."""

    count: int | None
    """Number of images; None if published statistics do not state it."""
    pooled: Normal
    spatial: Normal | None = None
    inception_score: float | None = None
    features: torch.Tensor | None = None
    """(n, D) pooled features of all images or of an even selection."""


def measure_images(
    samples: str | Path,
    reference: str | Path,
    extractor: FeatureExtractor,
    *,
    name: str,
    batch_size: int = 50,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Compare generated images with a reference.

    Args:
        samples: folder of images, or npz with ``arr_0``.
        reference: see :func:`describe_reference`.
        extractor: image to features.
        name: of the extractor, recorded with its statistics.
        batch_size: images per call of the extractor.
        progress: see :data:`Progress`.

    Returns:
        Numbers of images as ``samples`` and ``reference``, and the scores that extractor and reference have features
        for: fid, sfid, inception_score, precision, recall, kid.

    Raises:
        FileNotFoundError: no such images.
        ValueError: damaged images, or a reference that was made with another extractor.
        OSError: statistics cannot be written beside the reference.

    Warns:
        FewSamplesWarning: with the number of samples or reference images, and how many each score needs.
    """
    images = Images(samples)
    with TemporaryDirectory(prefix="mhla-features-") as folder:
        stores = [Path(folder) / part for part in ("reference", "samples")]
        expected = describe_reference(Path(reference), extractor, name, batch_size, stores[0], progress)
        found = describe_images(images, extractor, batch_size, stores[1], progress)
        for path, description in ((images.path, found), (Path(reference), expected)):
            remark = too_few(path, description)
            if remark is not None:
                warnings.warn(remark, FewSamplesWarning, stacklevel=2)
        counts = {"samples": found.count, "reference": expected.count}
        return {part: count for part, count in counts.items() if count is not None} | score(found, expected)


def score(found: Description, expected: Description) -> dict[str, float]:
    """The scores of one description against another, for features that both have."""
    scores = {"fid": frechet_distance(found.pooled, expected.pooled)}
    if found.spatial is not None and expected.spatial is not None:
        scores["sfid"] = frechet_distance(found.spatial, expected.spatial)
    if found.inception_score is not None:
        scores["inception_score"] = found.inception_score
    real, generated = expected.features, found.features
    if real is not None and generated is not None and min(len(real), len(generated)) > _NEIGHBOURS:
        scores["precision"], scores["recall"] = precision_recall(real, generated, _NEIGHBOURS)
        scores["kid"], _ = kernel_distance(real, generated)
    return scores


def too_few(name: object, found: Description) -> str | None:
    """Warning about a set that is too small for a stable Fréchet distance, or None."""
    channels = len(found.pooled.mean)
    if found.count is None or found.count >= _STABLE * channels:
        return None
    return (
        f"{name} holds {found.count} images. A Fréchet distance of {channels} channels is stable from about "
        f"{_STABLE * channels} on; ADM's suite takes 10000 images for precision and recall, and 5000 for the Inception "
        "score. Compare these scores only with those of as many images, or use KID, which is unbiased."
    )


def describe_images(
    images: Images,
    extractor: FeatureExtractor,
    batch_size: int = 50,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Description:
    """Run the extractor over a set of images.

    Pooled features are memory-mapped from a new file at ``store``; None keeps them in memory.

    Raises:
        ValueError: damaged images, fewer than two, or an extractor that returns no features.
    """
    pooled, spatial, inception = FeatureStatistics(), FeatureStatistics(), InceptionScore()
    kept: torch.Tensor | None = None
    for batch in images.batches(batch_size):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
        check_one_each("The extractor", features.pooled, len(batch))
        start = pooled.count
        pooled.update(features.pooled)
        if kept is None:
            shape = len(images), features.pooled.shape[1]
            kept = torch.empty(shape)
            if store is not None:  # a file, which the system can page out
                kept = torch.from_file(str(store), shared=True, size=kept.numel(), dtype=torch.float32).view(shape)
        kept[start : pooled.count] = features.pooled.float().cpu()
        if features.spatial is not None:
            spatial.update(features.spatial)
        if features.probabilities is not None:
            inception.update(features.probabilities)
        if progress is not None:
            progress(pooled.count, len(images))
    return Description(
        count=pooled.count,
        pooled=pooled.normal(),
        spatial=spatial.normal() if spatial.count else None,
        inception_score=inception.compute() if inception.count else None,
        features=kept,
    )


def check_one_each(name: str, values: object, count: int) -> None:
    """Raise ValueError unless a callable returned one value or one row per sample."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != count:
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{name} must return a tensor of {count} rows for {count} samples, got {shape}.")


def statistics_file(images: str | Path, name: str) -> Path:
    """File of an extractor's statistics of a reference: beside its folder or npz, never in site-packages."""
    # a link to read-only data may itself be in a writable folder
    path = Path(images).absolute()
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return path.with_name(f"{path.name}.statistics-{plain}.safetensors")


def describe_reference(
    reference: Path,
    extractor: FeatureExtractor,
    name: str,
    batch_size: int = 50,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Description:
    """Describe a reference by an extractor, or read its stored statistics.

    A reference is images (folder or npz), a statistics file, or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``,
    ``sigma_s`` and some images too.

    Raises:
        FileNotFoundError: no such reference.
        ValueError: damaged images, or statistics of another extractor.
    """
    if reference.suffix == ".safetensors":
        return _load_statistics(reference, name)[0]
    published, holds_images = _read_published(reference)
    if published is not None and not holds_images:
        return published
    images, file = Images(reference), statistics_file(reference, name)
    kept, fingerprint = _load_statistics(file, name) if file.is_file() else (None, "")
    if kept is None or fingerprint != images.fingerprint():
        described = describe_images(images, extractor, batch_size, store, progress)
        _save_statistics(described, file, name, images.fingerprint())
        kept, _ = _load_statistics(file, name)
    return kept if published is None else replace(published, features=kept.features)


def _read_published(file: Path) -> tuple[Description | None, bool]:
    """``mu`` and ``sigma`` (pooled), ``mu_s`` and ``sigma_s`` (spatial) of an npz; and whether it holds images."""
    import numpy

    if file.suffix != ".npz" or not zipfile.is_zipfile(file):
        return None, False
    with numpy.load(file, allow_pickle=False) as content:
        names = set(content.files)
        pooled, spatial = (
            Normal(torch.from_numpy(content[mean]), torch.from_numpy(content[covariance]))
            if {mean, covariance} <= names
            else None
            for mean, covariance in (("mu", "sigma"), ("mu_s", "sigma_s"))
        )
    return (None if pooled is None else Description(None, pooled, spatial)), "arr_0" in names


def _save_statistics(description: Description, file: Path, name: str, fingerprint: str) -> None:
    """Write the statistics of a reference; with an even selection of at most 10 000 features."""
    tensors = {"mean": description.pooled.mean, "covariance": description.pooled.covariance}
    if description.spatial is not None:
        tensors |= {"spatial_mean": description.spatial.mean, "spatial_covariance": description.spatial.covariance}
    if description.features is not None:
        count = len(description.features)
        chosen = torch.linspace(0, count - 1, min(count, _KEPT_FEATURES), dtype=torch.float64).long()
        tensors["features"] = description.features[chosen]
    metadata = {"extractor": name, "count": str(description.count), "fingerprint": fingerprint}
    try:
        write_tensors(tensors, file, metadata)
    except OSError as error:
        raise OSError(
            f"The statistics of the reference cannot be written to {file}: {error}. Link the reference into a writable "
            "folder, and pass the link."
        ) from error


def _load_statistics(file: Path, name: str) -> tuple[Description, str]:
    """Stored statistics, and the fingerprint of their images."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"There are no reference statistics at {file}.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}); remove it to recompute the statistics.") from error
    if not {"extractor", "count", "fingerprint"} <= metadata.keys():
        raise ValueError(f"{file} holds no statistics of images.")
    if metadata["extractor"] != name:
        raise ValueError(f"{file} was made with the extractor {metadata['extractor']!r}, not with {name!r}.")
    spatial = Normal(tensors["spatial_mean"], tensors["spatial_covariance"]) if "spatial_mean" in tensors else None
    pooled = Normal(tensors["mean"], tensors["covariance"])
    description = Description(int(metadata["count"]), pooled, spatial, features=tensors.get("features"))
    return description, metadata["fingerprint"]
