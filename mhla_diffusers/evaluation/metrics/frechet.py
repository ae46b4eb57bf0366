"""The Fréchet distance: FID on Inception features, sFID on spatial ones, FVD on features of videos."""

import torch

from .statistics import FeatureStatistics, Normal


def frechet_distance(first: torch.Tensor | Normal, second: torch.Tensor | Normal) -> float:
    """Squared Fréchet distance between two sets of features, each taken for a normal distribution.

    ‖μ₁ − μ₂‖² + tr(Σ₁) + tr(Σ₂) − 2 tr((Σ₁ Σ₂)^½). With Σ = L Lᵀ the last trace is the sum of the singular values of
    L₁ᵀ L₂, which stays exact where there are fewer samples than channels and Σ₁ Σ₂ is singular.

    Args:
        first: features (n, D), or the normal distribution of features.
        second: like ``first``.

    Raises:
        ValueError: a set of fewer than two features, or sets with different numbers of channels.
    """
    one, two = (x if isinstance(x, Normal) else FeatureStatistics.of(x).normal() for x in (first, second))
    if len(one.mean) != len(two.mean):
        raise ValueError(
            f"The sets have {len(one.mean)} and {len(two.mean)} channels; they come from different extractors."
        )
    covariances = one.covariance.double(), two.covariance.double()
    factors = [_factor(covariance) for covariance in covariances]
    overlap = torch.linalg.svdvals(factors[0].T @ factors[1]).sum()
    traces = sum(covariance.trace() for covariance in covariances)
    return float((one.mean.double() - two.mean.double()).square().sum() + traces - 2 * overlap)


def _factor(covariance: torch.Tensor) -> torch.Tensor:
    """L (D, rank) with L Lᵀ = Σ; what rounding has made of eigenvalues that are zero is left out."""
    values, vectors = torch.linalg.eigh(covariance)
    smallest = len(values) * torch.finfo(values.dtype).eps * values[-1]
    kept = values > smallest
    return vectors[:, kept] * values[kept].sqrt()
