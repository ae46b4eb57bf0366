"""The Fréchet distance between two sets of features: FID, or FVD on features of videos."""

import torch

Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean (D,) and covariance (D, D) of features, float64."""


def moments(features: torch.Tensor) -> Moments:
    """Return mean and unbiased covariance of features (n, D); ValueError for another shape, or fewer than two."""
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(
            f"Features must have the shape (n, D), got {tuple(features.shape)}; a covariance needs at least 2."
        )
    values = features.detach().cpu().double()
    return values.mean(dim=0), values.T.cov()


def frechet_distance(first: torch.Tensor | Moments, second: torch.Tensor | Moments) -> float:
    """Return the squared Fréchet distance of two sets of features (n, D), or of their moments, as normal distributions.

    ‖μ₁ − μ₂‖² + tr(Σ₁) + tr(Σ₂) − 2 tr((Σ₁ Σ₂)^½). With Σ = L Lᵀ the last trace is the sum of the singular values of
    L₁ᵀ L₂, which is exact even with fewer samples than channels, where Σ₁ Σ₂ is singular. ValueError for a set of fewer
    than two features, or sets of different D.
    """
    (mean, covariance), (other_mean, other_covariance) = (
        moments(x) if isinstance(x, torch.Tensor) else (x[0].double(), x[1].double()) for x in (first, second)
    )
    if mean.shape != other_mean.shape or covariance.shape != other_covariance.shape:
        raise ValueError(
            f"The sets have {len(mean)} and {len(other_mean)} channels; they come from different extractors."
        )
    factors = []
    for values, vectors in map(torch.linalg.eigh, (covariance, other_covariance)):
        # drop zero eigenvalues, which are rounding noise
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        factors.append(vectors[:, kept] * values[kept].sqrt())
    overlap = torch.linalg.svdvals(factors[0].T @ factors[1]).sum()
    return float((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * overlap)
