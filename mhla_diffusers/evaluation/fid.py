"""FID, sFID, Inception score, precision, recall and KID of a set of images against a reference."""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from ..reporting import progress
from .extractors import CleanInception, Extractor, ImageFeatures
from .images import Images, read_npz
from .metrics import Moments, frechet_distance, inception_score, moments, precision_recall

_KEPT_FEATURES = 10_000
"""Reference images for precision, recall and KID, as in the ADM suite."""
_NEIGHBOURS = 3


class Reference(NamedTuple):
    """What sets are measured against."""

    pooled: Moments
    spatial: Moments | None = None
    features: torch.Tensor | None = None
    """Pooled features (n, D) of at most 10 000 images."""


def measure_images(samples: Path, reference: Path, extractor: Extractor, *, batch_size: int = 50) -> dict[str, float]:
    """Compare generated images, a folder or npz, with a reference of :func:`read_reference`.

    Returns:
        The number of ``samples``, and the scores that extractor and reference have features for: fid, sfid,
        inception_score, precision, recall; kid, by clean-fid.

    Raises:
        FileNotFoundError: no such images.
        ValueError: damaged images, a score that is not finite, or a reference of another extractor.
    """
    images, expected = Images(samples), read_reference(reference, extractor, batch_size)
    found = extract_features(images, extractor, batch_size)
    scores: dict[str, float] = {"samples": len(images), "fid": frechet_distance(found.pooled, expected.pooled)}
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
            raise ValueError(f"{name} is {value}; check what the extractor returns, and the statistics in {reference}.")
    return scores


def read_reference(path: Path, extractor: Extractor, batch_size: int = 50) -> Reference:
    """Describe a reference by an extractor.

    A reference is images (folder or npz), or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``, ``sigma_s`` and some
    images too.
    """
    arrays = read_npz(path) if path.suffix == ".npz" and path.is_file() else {}
    pooled, spatial = (
        (torch.from_numpy(arrays[mean]), torch.from_numpy(arrays[covariance])) if mean in arrays else None
        for mean, covariance in (("mu", "sigma"), ("mu_s", "sigma_s"))
    )
    if pooled is not None and "arr_0" not in arrays:
        return Reference(pooled, spatial)
    features = extract_features(Images(path), extractor, batch_size)
    if pooled is None:
        pooled = moments(features.pooled)
        spatial = None if features.spatial is None else moments(features.spatial)
    count = len(features.pooled)
    chosen = torch.linspace(0, count - 1, min(count, _KEPT_FEATURES), dtype=torch.float64).long()
    return Reference(pooled, spatial, features.pooled[chosen])


def extract_features(images: Images, extractor: Extractor, batch_size: int = 50) -> ImageFeatures:
    """Run the extractor over a set: float32 on the CPU; ValueError unless features are a finite row per image."""
    kept: dict[str, list[torch.Tensor]] = {}
    batches = math.ceil(len(images) / batch_size)  # and a few more where sizes differ
    for batch in progress(images.batches(batch_size), total=batches, desc="features", leave=False):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
        for name, values in features._asdict().items():
            if values is None:
                continue
            if values.ndim != 2 or len(values) != len(batch) or not values.isfinite().all():
                raise ValueError(
                    f"The extractor's {name} of {len(batch)} samples must be finite and ({len(batch)}, D), got "
                    f"{tuple(values.shape)}."
                )
            kept.setdefault(name, []).append(values.detach().float().cpu())
    return ImageFeatures(**{name: torch.cat(values) for name, values in kept.items()})
