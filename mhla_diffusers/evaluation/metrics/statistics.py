"""Mean and covariance of a stream of features."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Normal:
    """A normal distribution.

    Raises:
        ValueError: shapes that do not belong together.
    """

    mean: torch.Tensor
    """(D,)."""
    covariance: torch.Tensor
    """(D, D)."""

    def __post_init__(self) -> None:
        shape = tuple(self.covariance.shape)
        if self.mean.ndim != 1 or shape != (len(self.mean),) * 2:
            raise ValueError(f"A mean of shape {tuple(self.mean.shape)} and a covariance of {shape} do not fit.")


class FeatureStatistics:
    """Mean and covariance of features that come in batches; memory depends on the number of channels alone.

    Batches are merged with the pairwise update of Chan, Golub and LeVeque, in float64, so that a mean far from zero
    costs no digits.
    """

    def __init__(self) -> None:
        self.count = 0
        """Features seen so far."""
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)

    @classmethod
    def of(cls, features: torch.Tensor) -> "FeatureStatistics":
        """Of features (n, D) that are all there."""
        statistics = cls()
        statistics.update(features)
        return statistics

    def update(self, features: torch.Tensor) -> None:
        """Take in a batch (n, D).

        Raises:
            ValueError: another number of channels than before, or values that are not finite.
        """
        batch = features.detach().double().cpu()
        if batch.ndim != 2 or (self.count and batch.shape[1] != len(self._mean)):
            expected = f"(n, {len(self._mean)})" if self.count else "(n, D)"
            raise ValueError(f"Features must have the shape {expected}, got {tuple(batch.shape)}.")
        if not batch.isfinite().all():
            raise ValueError("Features are not finite; the extractor overflowed or was given damaged images.")
        if not len(batch):
            return
        mean = batch.mean(dim=0)
        centred = batch - mean
        scatter = centred.T @ centred
        if self.count:
            total = self.count + len(batch)
            shift = mean - self._mean
            scatter += self._scatter + torch.outer(shift, shift) * (self.count * len(batch) / total)
            mean = self._mean + shift * (len(batch) / total)
        self._mean, self._scatter = mean, scatter
        self.count += len(batch)

    def normal(self) -> Normal:
        """The normal distribution with this mean and this unbiased covariance, float64.

        Raises:
            ValueError: fewer than two features.
        """
        if self.count < 2:
            raise ValueError(f"The set holds {self.count} features; a covariance needs at least 2.")
        return Normal(self._mean, self._scatter / (self.count - 1))
