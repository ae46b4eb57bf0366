"""The order in which sparse attention reads the tokens: uniform blocks along a curve that keeps neighbours together.

The tokens of the grid stand along a Hilbert curve generalised to any box and are cut evenly into blocks of
``block_size`` rows, so that a block is compact whatever the grid is; the rows that the last one lacks are padding.
Extra tokens (text) follow in blocks of their own. A *row* is a place in this order, a *position* one in the sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .blocks import Shape

Extra = tuple[int, int]
"""Tokens of the sequence before and after those of the grid."""
_Edge = tuple[int, int]
"""Stride in raster order, and signed length."""
_Box = tuple[int, _Edge, _Edge, _Edge]
"""Place of its first token, and its edges; the curve leaves it at the far end of the first."""


@dataclass(frozen=True)
class Layout:
    """Tables of one order, on one device. R = T * block_size rows, N positions."""

    block_size: int
    grid_blocks: int
    """Blocks of the grid's tokens, the first of all T."""
    order: torch.Tensor
    """int32 (R,): the position of every row, -1 of padding."""
    valid: torch.Tensor
    """int32 (T,): how many rows of a block hold a token; they come first."""
    rows: torch.Tensor
    """int32 (N,): the row of every position."""

    @property
    def blocks(self) -> int:
        """T, blocks of the grid and of the extra tokens."""
        return len(self.valid)


@lru_cache(maxsize=64)
def layout_of(
    grid: Shape, block_size: int, extra: Extra = (0, 0), frame_blocks: tuple[int, ...] = (), device: str = "cpu"
) -> Layout:
    """The tables for a token grid.

    Args:
        grid: tokens on each of 1 to 3 axes.
        block_size: rows of a block.
        extra: tokens of the sequence before and after those of the grid.
        frame_blocks: lengths along the first axis; each such part of the grid has a curve of its own that begins a
            new block. Empty for one curve through the whole grid.
        device: that holds the tables.
    """
    before, after = extra
    count, row = math.prod(grid), math.prod(grid[1:])
    # kept for calls that take gradients, and made on the CPU whatever the default device is
    with torch.inference_mode(False), torch.device("cpu"):
        parts, start = [], 0
        for length in frame_blocks or grid[:1]:
            parts.append(hilbert_curve((length, *grid[1:])) + before + start * row)
            start += length
        grid_blocks = sum(-(-len(part) // block_size) for part in parts)
        if before + after:
            parts.append(torch.cat([torch.arange(before), before + count + torch.arange(after)]))
        order = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % block_size), value=-1) for part in parts])
        rows = torch.empty(before + count + after, dtype=torch.int64)
        rows[order[order >= 0]] = (order >= 0).nonzero().flatten()
        valid = (order >= 0).view(-1, block_size).sum(dim=1)
        order, valid, rows = (x.to(torch.int32).to(device) for x in (order, valid, rows))
        return Layout(block_size, grid_blocks, order, valid, rows)


def block_count(grid: Sequence[int], block_size: int) -> int:
    """T, blocks of the grid."""
    return -(-math.prod(list(grid)) // block_size)


@dataclass(frozen=True)
class BlockTable:
    """The tokens of a sequence block by block, or of a share of it as a process holds: Q of T blocks, L rows each."""

    count: int
    """T."""
    blocks: torch.Tensor
    """int64 (Q,): which blocks these are, ascending."""
    tokens: torch.Tensor
    """int64 (Q, L): the token in every row, counted from the first of the share; 0 where there is none."""
    exists: torch.Tensor
    """Bool (Q, L): whether a row holds a token."""
    rows: torch.Tensor
    """int64 (tokens,): the row of every token, of Q L."""

    def in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, H, C) block by block: (B, H, Q, L, C); rows without a token hold any."""
        return x.index_select(1, self.tokens.flatten()).unflatten(1, self.tokens.shape).permute(0, 3, 1, 2, 4)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse, (B, H, Q, L, C) in the order of the sequence: (B, N, H, C)."""
        return x.flatten(2, 3).index_select(2, self.rows).transpose(1, 2)

    def weights(self, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """(1 or B, Q, L): of every row, given those of the tokens (B, N); 0 where there is none."""
        weights = self.exists.to(dtype)[None]
        return weights if mask is None else weights * mask.to(dtype)[:, self.tokens]


@lru_cache(maxsize=64)
def block_table(
    grid: Shape, block_size: int, device: torch.device, extra: int = 0, share: tuple[int, int] | None = None
) -> BlockTable:
    """The table of a grid and of extra tokens after it.

    Args:
        grid: token grid.
        block_size: rows of a block.
        device: that holds the table. It is kept, since copying it at every call would wait for the device.
        extra: extra tokens.
        share: first token in raster order, and how many; None for all. A share goes without extra tokens.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        order = layout_of(grid, block_size, (0, extra)).order.long().view(-1, block_size)
        first, count = share or (0, math.prod(grid) + extra)
        exists = (order >= first) & (order < first + count)
        blocks = exists.any(dim=1).nonzero().flatten()
        exists, tokens = exists[blocks], (order[blocks] - first).where(exists[blocks], 0)
        rows = torch.empty(count, dtype=torch.int64)
        rows[tokens[exists]] = exists.flatten().nonzero().flatten()
        return BlockTable(len(order), *(x.to(device) for x in (blocks, tokens, exists, rows)))


@lru_cache(maxsize=16)
def hilbert_curve(grid: Shape) -> torch.Tensor:
    """The tokens of a grid along a generalised Hilbert curve: int64 (N,) places in raster order.

    A box is cut into two to five boxes, each entered beside the place at which the one before is left, until one is a
    line; the construction is J. Červený's generalised Hilbert curve for boxes of any size.

    Args:
        grid: tokens on each of 1 to 3 axes.
    """
    sizes = (1,) * (3 - len(grid)) + tuple(grid)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    first, second, third = sorted(zip(strides, sizes, strict=True), key=lambda edge: -edge[1])
    places: list[int] = []
    boxes: list[_Box] = [(0, first, second, third)]
    while boxes:
        start, a, b, c = boxes.pop()
        lengths = [abs(edge[1]) for edge in (a, b, c)]
        if sorted(lengths)[1] == 1:
            stride, length = (a, b, c)[lengths.index(max(lengths))]
            step = stride if length > 0 else -stride
            places.extend(range(start, start + step * abs(length), step))
        else:
            boxes.extend(reversed(_cut(start, a, b, c)))
    with torch.inference_mode(False):
        return torch.tensor(places, device="cpu")


def _cut(start: int, a: _Edge, b: _Edge, c: _Edge) -> list[_Box]:
    """The boxes that a box is cut into, in the order of the curve."""
    (near_a, far_a), (near_b, far_b), (near_c, far_c) = (_halves(edge) for edge in (a, b, c))
    w, h, d = (abs(edge[1]) for edge in (a, b, c))
    end_a, end_c = _last(a), _last(c)
    if 2 * w > 3 * h and 2 * w > 3 * d:
        return [(start, near_a, b, c), (start + _reach(near_a), far_a, b, c)]
    if 3 * h > 4 * d:  # c is too short to be cut
        return [
            (start, near_b, c, near_a),
            (start + _reach(near_b), a, far_b, c),
            (start + end_a + _last(near_b), _back(near_b), c, _back(far_a)),
        ]
    if 3 * d > 4 * h:
        return [
            (start, near_c, near_a, b),
            (start + _reach(near_c), a, b, far_c),
            (start + end_a + _last(near_c), _back(near_c), _back(far_a), b),
        ]
    return [
        (start, near_b, near_c, near_a),
        (start + _reach(near_b), c, near_a, far_b),
        (start + _last(near_b) + end_c, a, _back(near_b), _back(far_c)),
        (start + end_a + _reach(near_b) + end_c, _back(c), _back(far_a), far_b),
        (start + end_a + _last(near_b), _back(near_b), near_c, _back(far_a)),
    ]


def _halves(edge: _Edge) -> tuple[_Edge, _Edge]:
    """Cut in the middle, the first part even if it can be: the curve needs it to arrive at the right corner."""
    stride, length = edge
    sign, half = (1 if length > 0 else -1), abs(length) // 2
    half += half % 2 if abs(length) > 2 else 0
    return (stride, sign * half), (stride, length - sign * half)


def _reach(edge: _Edge) -> int:
    """From the first place of an edge to behind its last."""
    return edge[0] * edge[1]


def _last(edge: _Edge) -> int:
    """From the first place of an edge to its last."""
    stride, length = edge
    return stride * (length - (1 if length > 0 else -1))


def _back(edge: _Edge) -> _Edge:
    return edge[0], -edge[1]
