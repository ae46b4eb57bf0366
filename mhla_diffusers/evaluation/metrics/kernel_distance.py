"""The kernel distance: KID on Inception features. Unbiased, so it suits small sets."""

import torch


def kernel_distance(
    first: torch.Tensor, second: torch.Tensor, subsets: int = 100, largest: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Squared maximum mean discrepancy with the kernel (x·y / D + 1)³, averaged over random subsets.

    Args:
        first: features (n, D).
        second: features (m, D).
        subsets: how many are drawn; one where the whole sets are no larger than ``largest``.
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
    n, m = len(first), len(second)
    within = [(k.sum() - k.trace()) / (len(k) * (len(k) - 1)) for k in (_kernel(first, first), _kernel(second, second))]
    return float(within[0] + within[1] - 2 * _kernel(first, second).sum() / (n * m))


def _kernel(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first @ second.T / first.shape[1] + 1) ** 3
