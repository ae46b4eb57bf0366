"""FID, sFID, Inception score, precision, recall and KID of a set of images against a reference."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from ..reporting import show_progress
from .extractors import CleanInception, Extractor, ImageFeatures
from .images import Images, read_npz
from .metrics import Moments, frechet_distance, inception_score, moments, precision_recall

_KEPT_FEATURES = 10_000
"""Reference images for precision, recall and KID, as in the ADM suite."""
_STABLE = 5
"""Samples per channel for a stable Fréchet distance: 10 240 for the 2048 channels of Inception."""
_NEIGHBOURS = 3


class Reference(NamedTuple):
    """What sets are measured against."""

    pooled: Moments
    spatial: Moments | None = None
    features: torch.Tensor | None = None
    """Pooled features (n, D) of at most 10 000 images."""


def measure_images(
    samples: Path, reference: Path, extractor: Extractor, *, batch_size: int = 50
) -> tuple[dict[str, float], list[str]]:
    """Compare generated images with a reference.

    Args:
        samples: folder of images, or npz with ``arr_0``.
        reference: see :func:`read_reference`.
        extractor: image to features.
        batch_size: images per call of the extractor.

    Returns:
        The number of ``samples``, the scores that extractor and reference have features for (fid, sfid,
        inception_score, precision, recall, kid), and a remark if there are too few images.

    Raises:
        FileNotFoundError: no such images.
        ValueError: damaged images, features or statistics that are not finite, or a reference of another extractor.
    """
    images, expected = Images(samples), read_reference(reference, extractor, batch_size)
    found = extract_features(images, extractor, batch_size)
    counts = {samples: len(images)} | ({} if expected.features is None else {reference: len(expected.features)})
    return {"samples": len(images), **score(found, expected, extractor)}, too_few(counts, expected)


def read_reference(path: Path, extractor: Extractor, batch_size: int = 50) -> Reference:
    """Describe a reference by an extractor.

    A reference is images (folder or npz), or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``, ``sigma_s`` and some
    images too.

    Raises:
        FileNotFoundError: no such reference.
        ValueError: damaged images or statistics.
    """
    pooled = spatial = None
    if path.suffix == ".npz" and path.is_file():
        arrays = read_npz(path)
        for name in arrays.keys() & {"mu", "sigma", "mu_s", "sigma_s"}:
            if not numpy.isfinite(arrays[name]).all():
                raise ValueError(f"{name} of {path} has values that are not finite; get the statistics again.")
        if "mu" in arrays:
            pooled = torch.from_numpy(arrays["mu"]), torch.from_numpy(arrays["sigma"])
        if "mu_s" in arrays:
            spatial = torch.from_numpy(arrays["mu_s"]), torch.from_numpy(arrays["sigma_s"])
        if pooled is not None and "arr_0" not in arrays:
            return Reference(pooled, spatial)
    features = extract_features(Images(path), extractor, batch_size)
    if pooled is None:
        pooled = moments(features.pooled)
        spatial = None if features.spatial is None else moments(features.spatial)
    count = len(features.pooled)
    chosen = torch.linspace(0, count - 1, min(count, _KEPT_FEATURES), dtype=torch.float64).long()
    return Reference(pooled, spatial, features.pooled[chosen])


def score(found: ImageFeatures, expected: Reference, extractor: Extractor) -> dict[str, float]:
    """Return the scores of a set against a reference, for features that both have; KID is clean-fid's.

    Raises:
        ValueError: a score that is not finite.
    """
    scores = {"fid": frechet_distance(found.pooled, expected.pooled)}
    if found.spatial is not None and expected.spatial is not None:
        scores["sfid"] = frechet_distance(found.spatial, expected.spatial)
    if found.probabilities is not None:
        scores["inception_score"] = inception_score(found.probabilities)
    real = expected.features
    if real is not None and isinstance(extractor, CleanInception):
        scores["kid"] = extractor.kernel_distance(real, found.pooled)
    elif real is not None and min(len(real), len(found.pooled)) > _NEIGHBOURS:
        scores["precision"], scores["recall"] = precision_recall(real, found.pooled, _NEIGHBOURS)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: the features are too large, or the probabilities no probabilities.")
    return scores


def too_few(counts: dict[Path, int], expected: Reference) -> list[str]:
    """Return a remark on sets that are too small for a stable Fréchet distance."""
    stable = _STABLE * len(expected.pooled[0])
    few = " and ".join(f"{path} holds {count} images" for path, count in counts.items() if count < stable)
    if not few:
        return []
    return [
        f"{few}; a Fréchet distance of {len(expected.pooled[0])} channels is stable from about {stable} on. Compare "
        "these scores only with those of as many images."
    ]


def extract_features(images: Images, extractor: Extractor, batch_size: int = 50) -> ImageFeatures:
    """Run the extractor over a set of images: float32 features of all, on the CPU.

    Raises:
        ValueError: a single image, or features that are not finite rows, one per image.
    """
    if len(images) < 2:
        raise ValueError(f"{images.path} holds 1 image; a Fréchet distance needs at least 2, better thousands.")
    kept: dict[str, list[torch.Tensor]] = {}
    for batch in images.batches(batch_size):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
        check_one_each("The extractor", features.pooled, len(batch))
        for name, values in features._asdict().items():
            if values is None:
                continue
            if values.ndim != 2 or not values.isfinite().all():
                raise ValueError(f"The extractor's {name} must be finite and (B, D), got {tuple(values.shape)}.")
            kept.setdefault(name, []).append(values.detach().float().cpu())
        show_progress(sum(map(len, kept["pooled"])), len(images))
    return ImageFeatures(**{name: torch.cat(values) for name, values in kept.items()})


def check_one_each(name: str, values: object, count: int) -> None:
    """Raise ValueError unless ``values`` is a tensor with a row per sample."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != count:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{name} must return a tensor of {count} rows for {count} samples, got {given}.")
