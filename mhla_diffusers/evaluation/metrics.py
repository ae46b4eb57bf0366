"""Distances between sets of any features, and the Inception score."""

import torch

Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean (D,) and covariance (D, D) of features, float64."""

_CHUNK = 1000
"""Features per computation, so that memory does not grow with their number."""
_ROUNDING = 1e-3
"""Share of the largest value that counts as rounding in statistics."""


def moments(features: torch.Tensor) -> Moments:
    """Return mean and unbiased covariance of features (n, D), which may be memory-mapped.

    Raises:
        ValueError: another shape, or fewer than two features.
    """
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(
            f"Features must have the shape (n, D), got {tuple(features.shape)}; a covariance needs at least 2."
        )
    chunks = features.detach().split(_CHUNK)
    mean = torch.stack([chunk.double().sum(dim=0) for chunk in chunks]).sum(dim=0).cpu() / len(features)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for chunk in chunks:
        centred = chunk.double().cpu() - mean
        scatter += centred.T @ centred
    return mean, scatter / (len(features) - 1)


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


def is_covariance(matrix: torch.Tensor) -> bool:
    """Return whether a matrix (D, D) is symmetric and has no negative eigenvalues, up to rounding of float32."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return False
    smallest = -_ROUNDING * matrix.abs().max()
    return bool((matrix - matrix.T).abs().max() <= -smallest and torch.linalg.eigvalsh(matrix)[0] >= smallest)


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


def kernel_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the unbiased squared maximum mean discrepancy with the kernel (x·y / D + 1)³, over all pairs of features.

    KID on Inception features, which packages estimate from random subsets of 1000. Suitable for small sets; can be
    slightly negative.

    Args:
        first: features (n, D), at least two.
        second: features (m, D), at least two.
    """

    def kernels(some: torch.Tensor, others: torch.Tensor) -> float:
        """Sum the kernel over all pairs."""
        parts = (chunk.double() @ other.double().T for chunk in some.split(_CHUNK) for other in others.split(_CHUNK))
        return sum(float((part / some.shape[1] + 1).pow(3).sum()) for part in parts)

    def within(features: torch.Tensor) -> float:
        """Average the kernel over the pairs of different features."""
        own = sum(float((x.double().square().mean(dim=1) + 1).pow(3).sum()) for x in features.split(_CHUNK))
        return (kernels(features, features) - own) / (len(features) * (len(features) - 1))

    across = kernels(first, second) / (len(first) * len(second))
    return within(first) + within(second) - 2 * across


def precision_recall(reference: torch.Tensor, samples: torch.Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Return the fraction of samples in the manifold of the reference, and vice versa (Kynkäänniemi et al., 2019).

    A manifold is the union of balls around its points, each reaching to the k-th nearest neighbour; k is 3 in ADM's
    suite. The package prdc holds all distances at once, 20 GB of 50 000 samples.

    Args:
        reference: features (n, D), more than ``neighbours``.
        samples: features (m, D), more than ``neighbours``.
        neighbours: k.
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
