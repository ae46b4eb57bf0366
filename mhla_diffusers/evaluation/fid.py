"""FID, sFID, Inception score, precision, recall and KID of a set of images against a reference.

Memory does not grow with the number of images. Statistics of reference images are stored beside them; published
statistics can be read.
"""

import hashlib
import math
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from safetensors import SafetensorError, safe_open

from ..files import content_of, write_tensors
from ..reporting import show_progress
from .extractors import Extractor, FeatureExtractor, ImageFeatures
from .images import Images, npz_errors
from .metrics import frechet_distance, inception_score, is_covariance, kernel_distance, moments, precision_recall

_KEPT_FEATURES = 10_000
"""Number of reference features for precision, recall and KID, as in the ADM suite."""
_STABLE = 5
"""Samples per channel for a stable Fréchet distance: 10 240 for the 2048 channels of Inception."""
_NEIGHBOURS = 3

Statistics = dict[str, torch.Tensor]
"""A reference: ``mu`` (D,), ``sigma`` (D, D) of pooled features; ``mu_s``, ``sigma_s`` of spatial ones, as in ADM's
files; ``features`` (n, D), an even selection of pooled ones; and ``count``, the number of images. All but the first two
may be missing.
"""


def measure_images(
    samples: str | Path,
    reference: str | Path,
    extractor: Extractor,
    *,
    batch_size: int = 50,
) -> dict[str, float]:
    """Compare generated images with a reference, and warn if either are too few.

    Args:
        samples: folder of images, or npz with ``arr_0``.
        reference: see :func:`reference_statistics`.
        extractor: image to features.
        batch_size: images per call of the extractor.

    Returns:
        Numbers of images as ``samples`` and ``reference``, and the scores that extractor and reference have features
        for: fid, sfid, inception_score, precision, recall, kid.

    Raises:
        FileNotFoundError: no such images.
        ValueError: a batch size below 1, damaged images, features or statistics that are not finite, or a reference
            that was made with another extractor.
        OSError: statistics cannot be written beside the reference.
    """
    images = Images(samples)
    expected = reference_statistics(Path(reference), extractor, batch_size)
    found = extract_features(images, extractor.features, batch_size)
    counts = {"samples": len(images)} | ({"reference": int(expected["count"])} if "count" in expected else {})
    remarks = [images.remark()]
    for path, count in zip((samples, reference), counts.values(), strict=False):
        remarks.append(too_few(path, count, len(expected["mu"])))
    for remark in filter(None, remarks):
        warnings.warn(remark, stacklevel=2)
    return {**counts, **score(found, expected)}


def score(found: ImageFeatures, expected: Statistics) -> dict[str, float]:
    """Return the scores of a set against a reference, for features that both have.

    Raises:
        ValueError: a score that is not finite.
    """
    scores = {"fid": frechet_distance(found.pooled, (expected["mu"], expected["sigma"]))}
    if found.spatial is not None and "mu_s" in expected:
        scores["sfid"] = frechet_distance(found.spatial, (expected["mu_s"], expected["sigma_s"]))
    if found.probabilities is not None:
        scores["inception_score"] = inception_score(found.probabilities)
    real = expected.get("features")
    if real is not None and min(len(real), len(found.pooled)) > _NEIGHBOURS:
        scores["precision"], scores["recall"] = precision_recall(real, found.pooled, _NEIGHBOURS)
        scores["kid"] = kernel_distance(real, found.pooled)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: the features are too large, or the probabilities no probabilities.")
    return scores


def too_few(name: object, count: int, channels: int) -> str | None:
    """Return a remark on a set that is too small for a stable Fréchet distance, or None."""
    if count >= _STABLE * channels:
        return None
    return (
        f"{name} holds {count} images. A Fréchet distance of {channels} channels is stable from about "
        f"{_STABLE * channels} on; ADM's suite takes 10000 images for precision and recall, and 5000 for the Inception "
        "score. Compare these scores only with those of as many images, or use KID, which is unbiased, "
        "but with few images it scatters, below 0 too."
    )


def extract_features(images: Images, extractor: FeatureExtractor, batch_size: int = 50) -> ImageFeatures:
    """Run the extractor over a set of images: float32 features of all, in temporary files that take no memory."""
    if len(images) < 2:
        raise ValueError(f"{images.path} holds 1 image; a Fréchet distance needs at least 2, better thousands.")
    kept: dict[str, torch.Tensor] = {}
    done = 0
    for batch in images.batches(batch_size):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
        check_one_each("The extractor", features.pooled, len(batch))
        for name, values in features._asdict().items():
            if values is None:
                continue
            if values.ndim != 2 or (name in kept and values.shape[1] != kept[name].shape[1]):
                raise ValueError(f"The extractor's {name} must be (B, D) of one D, got {tuple(values.shape)}.")
            if not values.isfinite().all():
                raise ValueError(
                    f"The extractor's {name} is not finite for {images.path}; it overflowed, or got damaged images."
                )
            if name not in kept:
                shape = len(images), values.shape[1]
                with NamedTemporaryFile(prefix="mhla-features-") as file:  # stays mapped after it is removed
                    flat = torch.from_file(file.name, shared=True, size=shape[0] * shape[1], dtype=torch.float32)
                kept[name] = flat.view(shape)
            kept[name][done : done + len(batch)] = values.detach().float().cpu()
        done += len(batch)
        show_progress(done, len(images))
    return ImageFeatures(**kept)


def check_one_each(name: str, values: object, count: int) -> None:
    """Raise ValueError unless ``values`` is a tensor with a row per sample."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != count:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{name} must return a tensor of {count} rows for {count} samples, got {given}.")


def statistics_file(reference: Path, name: str) -> Path:
    """Return the path of a reference's statistics, beside it, also if it is a link; ``name`` is the extractor's."""
    path = Path(reference).absolute()
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return path.with_name(f"{path.name}.statistics-{plain}.safetensors")


def reference_statistics(reference: Path, extractor: Extractor, batch_size: int = 50) -> Statistics:
    """Describe a reference by an extractor; the statistics of images are stored beside them and read again.

    A reference is images (folder or npz), or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``, ``sigma_s`` and some
    images too.

    Raises:
        FileNotFoundError: no such reference.
        ValueError: damaged images, or published statistics that are damaged, not finite or no covariance.
        OSError: statistics cannot be written beside the reference.
    """
    import numpy

    published: Statistics = {}
    if reference.suffix == ".npz" and zipfile.is_zipfile(reference):
        with npz_errors(reference), numpy.load(reference, allow_pickle=False) as content:
            pairs = [pair for pair in (("mu", "sigma"), ("mu_s", "sigma_s")) if {*pair} <= set(content.files)]
            arrays = {name: content[name] for pair in pairs for name in pair}
            complex_ones = [name for name, array in arrays.items() if numpy.iscomplexobj(array)]
            if complex_ones:
                raise ValueError(f"{complex_ones[0]} is complex")
            found = {name: torch.from_numpy(array.astype(numpy.float64)) for name, array in arrays.items()}
            has_images = "arr_0" in content.files
        for name, values in found.items():
            if not values.isfinite().all():
                raise ValueError(f"{name} of {reference} has values that are not finite; get the statistics again.")
            if name.startswith("sigma") and not is_covariance(values):
                raise ValueError(f"{name} of {reference} is not a covariance, symmetric without negative eigenvalues.")
        published = found if "mu" in found else {}
        if published and not has_images:
            return published
    images, file = Images(reference), statistics_file(reference, extractor.name)
    if (remark := images.remark()) is not None:
        warnings.warn(remark, stacklevel=2)
    made_of = {"extractor": f"{extractor.name} {extractor.fingerprint}", "fingerprint": str(content_of(reference))}
    found = {}
    if file.is_file():
        with suppress(SafetensorError), safe_open(file, "pt") as opened:
            kept = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is not a mapping
            if opened.metadata() == made_of | {"content": _hash(kept)}:
                found = kept
    if not found:
        features = extract_features(images, extractor.features, batch_size)
        chosen = torch.linspace(0, len(images) - 1, min(len(images), _KEPT_FEATURES), dtype=torch.float64).long()
        found = {"features": features.pooled[chosen], "count": torch.tensor(len(images))}
        found["mu"], found["sigma"] = moments(features.pooled)
        if features.spatial is not None:
            found["mu_s"], found["sigma_s"] = moments(features.spatial)
        try:
            write_tensors(found, file, made_of | {"content": _hash(found)})
        except OSError as error:
            raise OSError(
                f"The statistics of the reference cannot be written to {file}: {error}. Link the reference into a "
                "writable folder, and pass the link."
            ) from error
    return {**published, "features": found["features"]} if published else found


def _hash(statistics: Statistics) -> str:
    """Return the SHA-256 of the values, by which a damaged file is noticed."""
    digest = hashlib.sha256()
    for name, values in sorted(statistics.items()):
        digest.update(name.encode() + values.contiguous().numpy().tobytes())
    return digest.hexdigest()
