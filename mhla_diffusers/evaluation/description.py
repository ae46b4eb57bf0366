"""What an extractor makes of a set of images, in memory that does not grow with their number.

Statistics of reference images are kept beside them; those that others publish are read.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..files import write_tensors
from .extractors import FeatureExtractor, ImageFeatures
from .images import Images, open_images
from .metrics import FeatureStatistics, InceptionScore, Normal

_KEPT_FEATURES = 10_000
"""Features of the reference that precision, recall and KID are measured with, as many as the ADM suite takes."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass
class Description:
    """A set of images in the eyes of an extractor."""

    count: int | None
    """How many images; None where statistics of others do not tell."""
    pooled: Normal
    spatial: Normal | None = None
    inception_score: float | None = None
    features: torch.Tensor | None = None
    """(n, D) pooled features of all images, or of some evenly chosen ones."""


def describe_images(
    images: Images,
    extractor: FeatureExtractor,
    batch_size: int = 50,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Description:
    """Run the extractor over a set of images.

    Args:
        images: the set.
        extractor: what makes features of images.
        batch_size: images per call of the extractor.
        store: a new file for the pooled features, which are then mapped into memory; None for memory itself.
        progress: see :data:`Progress`.

    Raises:
        ValueError: damaged images, or fewer than two; or an extractor that gives something else than features.
    """
    pooled, spatial, score = FeatureStatistics(), FeatureStatistics(), InceptionScore()
    kept: torch.Tensor | None = None
    for batch in images.batches(batch_size):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
        check_one_each("The extractor", features.pooled, len(batch))
        start = pooled.count
        pooled.update(features.pooled)
        if kept is None:
            kept = _room(len(images), features.pooled.shape[1], store)
        kept[start : pooled.count] = features.pooled.float().cpu()
        if features.spatial is not None:
            spatial.update(features.spatial)
        if features.probabilities is not None:
            score.update(features.probabilities)
        if progress is not None:
            progress(pooled.count, len(images))
    return Description(
        count=pooled.count,
        pooled=pooled.normal(),
        spatial=spatial.normal() if spatial.count else None,
        inception_score=score.compute() if score.count else None,
        features=kept,
    )


def check_one_each(name: str, values: object, count: int) -> None:
    """Raise unless a callable gave one value, or one row of them, for each of the samples that it was given.

    Raises:
        ValueError: naming what it gave.
    """
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != count:
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{name} must give a tensor of {count} rows for {count} samples, got {shape}.")


def _room(count: int, channels: int, store: Path | None) -> torch.Tensor:
    """float32 (count, channels), in memory or in a file that the system may page out."""
    if store is None:
        return torch.empty(count, channels)
    return torch.from_file(str(store), shared=True, size=count * channels, dtype=torch.float32).view(count, channels)


def statistics_file(images: str | Path, name: str) -> Path:
    """Where the statistics of a reference are kept: beside its folder or npz, never in site-packages.

    Args:
        images: folder or npz.
        name: of the extractor.
    """
    # a link to data that cannot be written may lie where it can
    path = Path(images).absolute()
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return path.with_name(f"{path.name}.statistics-{plain}.safetensors")


def describe_reference(
    reference: Path,
    extractor: FeatureExtractor,
    name: str,
    *,
    batch_size: int = 50,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Description:
    """Describe a reference, or read what was written the last time.

    Args:
        reference: images (folder or npz), a statistics file, or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``,
            ``sigma_s`` and some images as well.
        extractor: what makes features of images.
        name: of the extractor.
        batch_size: images per call of the extractor.
        store: see :func:`describe_images`.
        progress: see :data:`Progress`.

    Raises:
        FileNotFoundError: no such reference.
        ValueError: damaged images, or statistics of another extractor.
        OSError: the statistics cannot be written beside the images.
    """
    if reference.suffix == ".safetensors":
        return load_statistics(reference, name)[0]
    published, holds_images = _read_published(reference)
    if published is not None and not holds_images:
        return published
    images, file = open_images(reference), statistics_file(reference, name)
    kept, fingerprint = load_statistics(file, name) if file.is_file() else (None, "")
    if kept is None or fingerprint != images.fingerprint():
        described = describe_images(images, extractor, batch_size, store, progress)
        save_statistics(described, file, name, images.fingerprint())
        kept, _ = load_statistics(file, name)
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


def save_statistics(description: Description, file: Path, name: str, fingerprint: str) -> None:
    """Write the statistics of a reference; at most 10 000 of its features, evenly chosen, go with them.

    Args:
        description: of the images.
        file: where to.
        name: of the extractor.
        fingerprint: of the images.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {"mean": description.pooled.mean, "covariance": description.pooled.covariance}
    if description.spatial is not None:
        tensors |= {"spatial_mean": description.spatial.mean, "spatial_covariance": description.spatial.covariance}
    if description.features is not None:
        tensors["features"] = _evenly_chosen(description.features, _KEPT_FEATURES).clone()
    metadata = {"extractor": name, "count": str(description.count), "fingerprint": fingerprint}
    try:
        write_tensors(tensors, file, metadata)
    except OSError as error:
        raise OSError(
            f"The statistics of the reference cannot be kept at {file}: {error}. Link the reference into a folder that "
            "can be written, and name the link."
        ) from error


def load_statistics(file: Path, name: str) -> tuple[Description, str]:
    """Statistics that were written before, and the fingerprint of the images that they are of.

    Raises:
        FileNotFoundError: no such file.
        ValueError: they were made with another extractor, or are no statistics.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"There are no reference statistics at {file}.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}); remove it to have the statistics made again.") from error
    if not {"extractor", "count", "fingerprint"} <= metadata.keys():
        raise ValueError(f"{file} holds no statistics of images.")
    if metadata["extractor"] != name:
        raise ValueError(f"{file} was made with the extractor {metadata['extractor']!r}, not with {name!r}.")
    spatial = Normal(tensors["spatial_mean"], tensors["spatial_covariance"]) if "spatial_mean" in tensors else None
    pooled = Normal(tensors["mean"], tensors["covariance"])
    description = Description(int(metadata["count"]), pooled, spatial, features=tensors.get("features"))
    return description, metadata["fingerprint"]


def _evenly_chosen(features: torch.Tensor, largest: int) -> torch.Tensor:
    if len(features) <= largest:
        return features
    return features[torch.linspace(0, len(features) - 1, largest, dtype=torch.float64).long()]
