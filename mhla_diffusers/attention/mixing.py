"""The mixing matrix of Multi-Head Mixing (paper, Sec. 4.2): M x M, row i belongs to query block i."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from ..errors import check_choice
from .precision import sum_dtype

MixingInit = Literal["locality", "uniform", "identity"]

MIXING_RANGE = (1e-6, 1.0 - 1e-6)
"""What "clipped to (0, 1)" of the paper means here: the open interval, so that no row can become all zero."""


def initial_mixing(blocks: Sequence[int], init: MixingInit = "locality") -> torch.Tensor:
    """The mixing matrix before training: float32 (M, M), every row sums to 1.

    - ``locality``: m_ij ∝ 1 − dist(i, j) / max_k dist(i, k), Euclidean distance between block centres
      measured in blocks, the maximum taken per row (paper, Sec. 4.2).
    - ``uniform``: 1 / M everywhere, which is plain linear attention.
    - ``identity``: every block sees itself alone.

    Raises:
        ValueError: if ``init`` is none of the three.
    """
    count = math.prod(blocks)
    if init == "identity":
        return torch.eye(count, dtype=torch.float32)
    if init == "uniform":
        return torch.full((count, count), 1 / count, dtype=torch.float32)
    check_choice("mixing_init", init, get_args(MixingInit))
    axes = [torch.arange(length, dtype=torch.float64) for length in blocks]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    distance = torch.cdist(positions, positions)
    farthest = distance.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    nearness = 1 - distance / farthest
    return (nearness / nearness.sum(dim=1, keepdim=True)).float()


def clip_mixing_(mixing: torch.Tensor) -> torch.Tensor:
    """Clip a mixing matrix in place into (0, 1), as the paper does after every optimizer update."""
    return mixing.clamp_(*MIXING_RANGE)


def causal_mixing(mixing: torch.Tensor, blocks: Sequence[int], own: bool) -> torch.Tensor:
    """A mixing matrix (..., M, M) with 0 for blocks that lie later along the first axis.

    ``own``: whether a block sees those of its own place along that axis.
    """
    place = torch.arange(blocks[0], device=mixing.device).repeat_interleave(math.prod(blocks[1:]))
    seen = place[:, None] >= place if own else place[:, None] > place
    return torch.where(seen, mixing, 0.0)


def extend_mixing(mixing: torch.Tensor, blocks: Sequence[int], count: int) -> torch.Tensor:
    """A causal mixing matrix for more blocks along the first axis than it was made for.

    A later row sees what the last one does, by how far back it lies, for every pair of places on the other axes. All
    that lies at least as far back as the oldest that the last row sees counts as one block, the mean of its states,
    so that the past weighs as much as it did: with L the last place, m_ib = m_{L, L − (i − b)}, and for i − b ≥ L it is
    m_{L, 0} divided by the number i − L + 1 of such b.

    Returns:
        (..., M', M') for ``count`` blocks along the first axis, 0 for blocks that lie later.

    Raises:
        ValueError: there is one block along the first axis, or more than wanted.
    """
    rows, side = blocks[0], math.prod(blocks[1:])
    if rows < 2 or count < rows:
        raise ValueError(
            f"A mixing matrix for blocks={tuple(blocks)} cannot be extended to {count} blocks along the first axis; "
            "it needs at least 2 there, and count must be at least as many."
        )
    device = mixing.device
    by_place = mixing.unflatten(-1, (rows, side)).unflatten(-3, (rows, side)).movedim(-2, -3)
    distance = (torch.arange(count, device=device)[:, None] - torch.arange(count, device=device)).clamp(0, rows - 1)
    place = torch.arange(count, device=device)
    row = place.clamp_max(rows - 1)[:, None].expand(-1, count)
    merged = torch.where(distance == rows - 1, (place - rows + 2).clamp_min(1)[:, None], 1).to(mixing.dtype)
    extended = by_place[..., row, (row - distance).clamp_min(0), :, :] / merged[..., None, None]
    extended = extended.movedim(-2, -3).flatten(-2).flatten(-3, -2)
    return causal_mixing(extended, (count, side), own=True)


def resize_mixing(mixing: torch.Tensor, blocks: Sequence[int], new_blocks: Sequence[int]) -> torch.Tensor:
    """Carry a mixing matrix over to other block counts by linear interpolation over block positions.

    An entry weighs a pair of places on the grid, so the values are interpolated as they are: finer blocks hold
    smaller KV states and the mixed state keeps its scale. Rows therefore do not sum to 1 afterwards; Eq. 4
    does not depend on the scale of a row.

    Returns:
        (..., M', M') of the same dtype, for as many axes.
    """
    # axis by axis, and of rows and columns one after the other, so that a product of M x M matrices is not needed
    axes, found = len(blocks), mixing.to(sum_dtype(mixing.dtype)).reshape(*mixing.shape[:-2], *blocks, *blocks)
    for axis, (old, new) in enumerate(zip(blocks, new_blocks, strict=True)):
        if old != new:
            found = _interpolated(_interpolated(found, axis - 2 * axes, new), axis - axes, new)
    count = math.prod(new_blocks)
    return found.reshape(*mixing.shape[:-2], count, count).to(mixing.dtype)


def _interpolated(x: torch.Tensor, axis: int, new: int) -> torch.Tensor:
    """Interpolate linearly between the block centres of an axis, given from behind, for ``new`` blocks on it."""
    old = x.shape[axis]
    lines = x.movedim(axis, -1)
    found = torch.nn.functional.interpolate(lines.reshape(1, -1, old), size=new, mode="linear")
    return found.view(*lines.shape[:-1], new).movedim(-1, axis)
