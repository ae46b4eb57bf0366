"""The Fréchet distance between sets of any features, and the other scores of the ADM suite."""

import torch

Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean (D,) and covariance (D, D) of features, float64."""

_CHUNK = 1000
"""Rows of a matrix of distances that are computed at a time."""


def moments(features: torch.Tensor) -> Moments:
    """Return mean and unbiased covariance of features (n, D); ValueError for another shape, or fewer than two."""
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(
            f"Features must have the shape (n, D), got {tuple(features.shape)}; a covariance needs at least 2."
        )
    values = features.detach().cpu().double()
    return values.mean(dim=0), values.T.cov()


def frechet_distance(first: torch.Tensor | Moments, second: torch.Tensor | Moments) -> float:
    """Return the squared Fréchet distance between two sets of features, each modelled as a normal distribution.

    FID on Inception features, sFID on spatial ones, FVD on features of videos.

    ‖μ₁ − μ₂‖² + tr(Σ₁) + tr(Σ₂) − 2 tr((Σ₁ Σ₂)^½). With Σ = L Lᵀ the last trace is the sum of the singular values of
    L₁ᵀ L₂, which is exact even with fewer samples than channels, where Σ₁ Σ₂ is singular.

    Args:
        first: features (n, D), or their mean (D,) and covariance (D, D).
        second: like ``first``.

    Raises:
        ValueError: a set of fewer than two features, or shapes that do not fit, as of different extractors.
    """
    one, two = (moments(x) if isinstance(x, torch.Tensor) else x for x in (first, second))
    channels = len(one[0])
    for mean, covariance in (one, two):
        if mean.shape != (channels,) or covariance.shape != (channels, channels):
            raise ValueError(
                f"A mean of shape {tuple(mean.shape)} and a covariance of {tuple(covariance.shape)} do not fit "
                f"{channels} channels; the features come from different extractors."
            )
    (mean, covariance), (other_mean, other_covariance) = ((m.double(), c.double()) for m, c in (one, two))
    factors = []
    for values, vectors in map(torch.linalg.eigh, (covariance, other_covariance)):
        # drop zero eigenvalues, which are rounding noise
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        factors.append(vectors[:, kept] * values[kept].sqrt())
    overlap = torch.linalg.svdvals(factors[0].T @ factors[1]).sum()
    return float((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * overlap)


def inception_score(probabilities: torch.Tensor, split: int = 5000) -> float:
    """Return exp of the mean KL divergence of predictions from their mean, averaged over splits, as ADM's suite does.

    torchmetrics shuffles before it splits; ADM's splits follow the order, so shuffle samples that are sorted by class.

    Args:
        probabilities: (n, classes), each row summing to 1.
        split: predictions per split; a partial last split counts like a full one.
    """
    scores = []
    for part in probabilities.double().split(split):
        marginal = part.mean(dim=0)
        scores.append(float((torch.xlogy(part, part).sum() / len(part) - torch.xlogy(marginal, marginal).sum()).exp()))
    return sum(scores) / len(scores)


def precision_recall(reference: torch.Tensor, samples: torch.Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Return the fraction of samples in the manifold of the reference, and vice versa (Kynkäänniemi et al., 2019).

    A manifold is the union of balls around its points, each reaching to the k-th nearest neighbour; k is 3 in ADM's
    suite.

    Features are (n, D) and (m, D), more than k = ``neighbours`` of each.
    """

    def distances(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        # avoids the cancellation of the expanded square, after which a point may not be its own nearest neighbour
        return torch.cdist(some.float(), others.float(), compute_mode="donot_use_mm_for_euclid_dist")

    def part_inside(points: torch.Tensor, manifold: torch.Tensor) -> float:
        nearest = [distances(chunk, manifold).kthvalue(neighbours + 1).values for chunk in manifold.split(_CHUNK)]
        radii = torch.cat(nearest)
        inside = sum(int((distances(chunk, manifold) <= radii).any(dim=1).sum()) for chunk in points.split(_CHUNK))
        return inside / len(points)

    return part_inside(samples, reference), part_inside(reference, samples)
