"""Distances between sets of any features, and scores of predictions. Needs only torch."""

from dataclasses import dataclass

import torch

_CHUNK = 1000
"""Features per computation of distances to a whole set."""


@dataclass(frozen=True)
class Normal:
    """A normal distribution.

    Raises:
        ValueError: mismatched shapes.
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
    """Mean and covariance of features in batches; memory depends only on the number of channels.

    Batches are merged with the pairwise update of Chan, Golub and LeVeque, in float64, so that a mean far from zero
    loses no precision.
    """

    def __init__(self) -> None:
        self.count = 0
        """Features seen so far."""
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)

    @classmethod
    def of(cls, features: torch.Tensor) -> "FeatureStatistics":
        """Moments of features (n, D)."""
        statistics = cls()
        statistics.update(features)
        return statistics

    def update(self, features: torch.Tensor) -> None:
        """Add a batch (n, D).

        Raises:
            ValueError: another number of channels than before, or values that are not finite.
        """
        batch = features.detach().double().cpu()
        if batch.ndim != 2 or (self.count and batch.shape[1] != len(self._mean)):
            expected = f"(n, {len(self._mean)})" if self.count else "(n, D)"
            raise ValueError(f"Features must have the shape {expected}, got {tuple(batch.shape)}.")
        if not batch.isfinite().all():
            raise ValueError("Features are not finite; the extractor overflowed or got damaged images.")
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


def frechet_distance(first: torch.Tensor | Normal, second: torch.Tensor | Normal) -> float:
    """Squared Fréchet distance between two sets of features, each modelled as a normal distribution.

    FID on Inception features, sFID on spatial ones, FVD on features of videos.

    ‖μ₁ − μ₂‖² + tr(Σ₁) + tr(Σ₂) − 2 tr((Σ₁ Σ₂)^½). With Σ = L Lᵀ the last trace is the sum of the singular values of
    L₁ᵀ L₂, which is exact even with fewer samples than channels, where Σ₁ Σ₂ is singular.

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
    factors = []
    for values, vectors in map(torch.linalg.eigh, covariances):
        # drop zero eigenvalues, which are rounding noise
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        factors.append(vectors[:, kept] * values[kept].sqrt())
    overlap = torch.linalg.svdvals(factors[0].T @ factors[1]).sum()
    traces = sum(covariance.trace() for covariance in covariances)
    return float((one.mean.double() - two.mean.double()).square().sum() + traces - 2 * overlap)


class InceptionScore:
    """exp of the mean KL divergence of predictions from their mean, over splits of a stream, averaged over splits.

    Args:
        split: predictions per split; 5000 in the ADM suite. Splits follow the order of the stream, so shuffle samples
            that are sorted by class.
    """

    def __init__(self, split: int = 5000) -> None:
        self.split = split
        self.count = 0
        """Predictions seen so far."""
        self._sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Per split: number of predictions, their sum, and the sum of their negative entropies."""

    def update(self, probabilities: torch.Tensor) -> None:
        """Add predictions (n, classes), each row summing to 1."""
        rest = probabilities.detach().double().cpu()
        while len(rest):
            filled = self.count % self.split
            part, rest = rest[: self.split - filled], rest[self.split - filled :]
            self.count += len(part)
            sums = len(part), part.sum(dim=0), torch.xlogy(part, part).sum()
            if filled:
                before = self._sums.pop()
                sums = sums[0] + before[0], sums[1] + before[1], sums[2] + before[2]
            self._sums.append(sums)

    def compute(self) -> float:
        """The score; a partial last split counts like a full one.

        Raises:
            ValueError: there were no predictions.
        """
        if not self._sums:
            raise ValueError("There are no predictions to compute an Inception score of.")
        scores = []
        for count, probabilities, negative_entropy in self._sums:
            marginal = probabilities / count
            scores.append(float((negative_entropy / count - torch.xlogy(marginal, marginal).sum()).exp()))
        return sum(scores) / len(scores)


def kernel_distance(
    first: torch.Tensor, second: torch.Tensor, subsets: int = 100, largest: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Squared maximum mean discrepancy with the kernel (x·y / D + 1)³, averaged over random subsets.

    KID on Inception features; unbiased, so suitable for small sets.

    Args:
        first: features (n, D).
        second: features (m, D).
        subsets: number of subsets; one if the sets are no larger than ``largest``.
        largest: features per subset.
        seed: of the subsets.

    Returns:
        Mean and standard deviation over the subsets. The estimate is unbiased, so it can be slightly negative.

    Raises:
        ValueError: a set of fewer than two features.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"The sets hold {len(first)} and {len(second)} features; each needs at least 2.")
    if max(len(first), len(second)) <= largest:
        return _discrepancy(first.double(), second.double()), 0.0
    generator = torch.Generator().manual_seed(seed)
    size = min(len(first), len(second), largest)
    values = []
    for _ in range(subsets):
        parts = [x[torch.randperm(len(x), generator=generator)[:size]].double() for x in (first, second)]
        values.append(_discrepancy(*parts))
    drawn = torch.tensor(values, dtype=torch.float64)
    return float(drawn.mean()), float(drawn.std(correction=0))


def _discrepancy(first: torch.Tensor, second: torch.Tensor) -> float:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y.T / x.shape[1] + 1) ** 3

    within = [(k.sum() - k.trace()) / (len(k) * (len(k) - 1)) for k in (kernel(first, first), kernel(second, second))]
    return float(within[0] + within[1] - 2 * kernel(first, second).mean())


def precision_recall(reference: torch.Tensor, samples: torch.Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Fraction of samples in the manifold of the reference, and vice versa (Kynkäänniemi et al., 2019).

    A manifold is the union of balls around its points, each reaching to the k-th nearest neighbour.

    Args:
        reference: features (n, D).
        samples: features (m, D).
        neighbours: k; 3 in the ADM suite.

    Returns:
        Precision and recall in [0, 1].

    Raises:
        ValueError: a set with no more than ``neighbours`` features.
    """
    for name, features in (("reference", reference), ("sample", samples)):
        if len(features) <= neighbours:
            raise ValueError(
                f"The {name} set holds {len(features)} features; with {neighbours} neighbours it needs at least "
                f"{neighbours + 1}."
            )

    def distances(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        # avoids the cancellation of the expanded square, after which a point may not be its own nearest neighbour
        return torch.cdist(some.float(), others.float(), compute_mode="donot_use_mm_for_euclid_dist")

    def part_inside(points: torch.Tensor, manifold: torch.Tensor) -> float:
        nearest = [distances(chunk, manifold).kthvalue(neighbours + 1).values for chunk in manifold.split(_CHUNK)]
        radii = torch.cat(nearest)
        inside = sum(int((distances(chunk, manifold) <= radii).any(dim=1).sum()) for chunk in points.split(_CHUNK))
        return inside / len(points)

    return part_inside(samples, reference), part_inside(reference, samples)
