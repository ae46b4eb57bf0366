"""Differences between two sets of paired samples, with the interval that chance leaves open."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is settled."""
        return self.low > 0 or self.high < 0


def bootstrap(statistic: Callable[[torch.Tensor], float], count: int, resamples: int, seed: int = 0) -> Interval:
    """A statistic of paired samples, and its percentile interval over sets drawn anew from them.

    Args:
        statistic: of the samples at some indices (count,), int64, which may occur several times.
        count: of the samples.
        resamples: how many sets are drawn.
        seed: of the drawing.

    Raises:
        ValueError: fewer than two samples or resamples.
    """
    if count < 2 or resamples < 2:
        raise ValueError(f"A bootstrap needs at least 2 samples and resamples, got {count} and {resamples}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = [statistic(torch.randint(count, (count,), generator=generator)) for _ in range(resamples)]
    ends = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(ends).tolist()
    return Interval(statistic(torch.arange(count)), low, high)
