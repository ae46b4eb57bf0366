"""What an extractor makes of a set of images, in memory that does not grow with their number."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .extractors import FeatureExtractor, ImageFeatures
from .images import Images
from .metrics import FeatureStatistics, InceptionScore, Normal

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
        ValueError: damaged images, or fewer than two.
    """
    pooled, spatial, score = FeatureStatistics(), FeatureStatistics(), InceptionScore()
    kept: torch.Tensor | None = None
    for batch in images.batches(batch_size):
        features = extractor(batch)
        features = features if isinstance(features, ImageFeatures) else ImageFeatures(features)
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


def _room(count: int, channels: int, store: Path | None) -> torch.Tensor:
    """float32 (count, channels), in memory or in a file that the system may page out."""
    if store is None:
        return torch.empty(count, channels)
    return torch.from_file(str(store), shared=True, size=count * channels, dtype=torch.float32).view(count, channels)
