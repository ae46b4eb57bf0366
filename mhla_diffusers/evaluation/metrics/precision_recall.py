"""Improved precision and recall (Kynkäänniemi et al., 2019)."""

import torch

_CHUNK = 1000


def precision_recall(reference: torch.Tensor, samples: torch.Tensor, neighbours: int = 3) -> tuple[float, float]:
    """How many samples lie in the manifold of the reference, and the other way round.

    A manifold is the union of the balls around its points that reach to their k-th nearest neighbour.

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
    precision = _part_inside(samples, reference, neighbours)
    return precision, _part_inside(reference, samples, neighbours)


def _part_inside(points: torch.Tensor, manifold: torch.Tensor, neighbours: int) -> float:
    """Part of the points that lie in the manifold."""
    radii = torch.cat([_distances(chunk, manifold).kthvalue(neighbours + 1).values for chunk in manifold.split(_CHUNK)])
    inside = sum(int((_distances(chunk, manifold) <= radii).any(dim=1).sum()) for chunk in points.split(_CHUNK))
    return inside / len(points)


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Euclidean, (n, m), without the cancellation of the expanded square, by which a point would not be its own
    nearest neighbour.
    """
    return torch.cdist(first.float(), second.float(), compute_mode="donot_use_mm_for_euclid_dist")
