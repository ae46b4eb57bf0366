"""What kernels are given: named tuples, which Triton passes field by field, and memory to write to.

Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, in the fields of tuples too. For strides of
rows that is how loads become wide. Numbers that change with the resolution go in disguise (:func:`disguised`), so that
another size of image or video compiles nothing.
"""

import math
from typing import Any, NamedTuple

import torch

from ..blocks import Shape
from ..call import Call


class Rows(NamedTuple):
    """A tensor (B, N, H, D) whose last stride is 1, as kernels address it."""

    pointer: Any
    batch_stride: int
    token_stride: int
    head_stride: int


class Numbers(NamedTuple):
    """A float32 tensor (B, N, H, 1): one number per token and head. The strides are in disguise."""

    pointer: Any
    batch_stride: int
    token_stride: int
    head_stride: int


class Layout(NamedTuple):
    """Token grid and token blocks as three axes, and how tokens are shared out; all in disguise."""

    heads: int
    grid_0: int
    grid_1: int
    grid_2: int
    blocks_0: int
    blocks_1: int
    blocks_2: int
    parts: int
    """Programs that share the tokens of one block."""
    first: int
    """Place on the grid, in raster order, of the first token that the call has: all of the grid's, or a share."""
    tokens: int
    """How many it has."""


class Program(NamedTuple):
    """What one program works on."""

    batch: Any
    head: Any
    block: Any
    part: Any
    column: Any
    """Which tile of the value channels."""


class Box(NamedTuple):
    """A token block as a box of the grid, and the call's share of it."""

    corner: Any
    """Index of its first token among those of the call, int64; below 0 for one that stands before them."""
    length_1: Any
    """Along the second axis."""
    length_2: Any
    """Along the third."""
    begin: Any
    """Place in the box, in raster order, of the first token that the call has; its others follow, up to ``end``."""
    end: Any
    """One past the last; ``begin`` where the call has none."""


class Tile(NamedTuple):
    """Tokens of one head that a program works on at once."""

    batch: Any
    head: Any
    tokens: Any
    """Index among the tokens of the call, int64 (tokens,)."""
    exists: Any
    """False beyond the end of the block, or of the call's share of it, (tokens,)."""


class Angles(NamedTuple):
    """The table of RoPE: (cos, sin) at the places of each channel pair."""

    rows: Rows
    """Of every place on the axes of the grid, one axis after the other; or of every token, as of places on a third axis
    that is as long as the sequence."""
    first_end: int
    """Where the channels end that turn with the first axis."""
    second_end: int
    """Where those of the second axis end; the others turn with the third."""
    third_start: int
    """Row of the third axis' first place. In disguise."""
    third_size: int
    """Places on the third axis. In disguise."""


class Source(NamedTuple):
    """Query or key with what its features are computed from."""

    rows: Any
    angles: Any
    """:class:`Angles`; None for no RoPE."""
    layout: Any
    eps: Any


class Lists(NamedTuple):
    """Which tiles of tokens every tile of every head meets; see :class:`mhla_diffusers.attention.tiles.BlockLists`."""

    offsets: Any
    """int64 (S H T + 1,): where each list begins in ``tiles``."""
    tiles: Any
    """int64 (pairs,)."""
    tokens: Any
    """int32 (T, longest tile): the tokens of every tile, those of shorter ones filled up with -1."""
    sample_stride: int
    """Lists per sample, H T; 0 if all samples share them. In disguise."""
    longest: int
    """Tokens of the longest tile. In disguise."""


class Means(NamedTuple):
    """Tiles as single keys, their means, for the queries that do not meet them exactly."""

    key: Any
    """(B, T, H, D)."""
    value: Any
    """Of the same strides, which stand here and in no :class:`Rows`: Triton 3.6 knows no 1 in a tuple of a tuple."""
    batch_stride: int
    token_stride: int
    head_stride: int
    counts: Any
    """float32 (B, H, T): the sum of the key mask over each tile."""
    bias: Any
    """β, float32 (H,)."""
    is_exact: Any
    """uint8 (S H T, T): 1 for a tile (column) that a tile of queries (row, as in :class:`Lists`) meets exactly."""


def disguised(number: int) -> int:
    """``number`` (0 or more) as an odd integer above 1; kernels read it with ``plain``."""
    return 2 * number + 3


def numbers(tensor: torch.Tensor) -> Numbers:
    """``tensor`` (B, N, H, 1) for a kernel."""
    return Numbers(tensor, *(disguised(tensor.stride(axis)) for axis in range(3)))


def rows(tensor: torch.Tensor) -> Rows:
    """``tensor`` (B, N, H, D) for a kernel."""
    return Rows(tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2))


def angles_of(call: Call) -> Angles | None:
    """See :func:`angles`."""
    return angles(call.rotary, call.grid, call.rotary_axes)


def angles(table: torch.Tensor | None, grid: Shape, axes: Shape | None) -> Angles | None:
    """The RoPE table of a call, the same for every head and possibly for every batch row.

    Args:
        table: see :attr:`Call.rotary`.
        grid: token grid.
        axes: see :attr:`Call.rotary_axes`.
    """
    if table is None:
        return None
    of_table = Rows(table, 0 if table.shape[0] == 1 else table.stride(0), table.stride(1), 0)
    if axes is None:
        return Angles(of_table, 0, 0, disguised(0), disguised(table.shape[1]))
    first, second, _ = axes
    third_size = grid[-1]
    return Angles(of_table, first, first + second, disguised(table.shape[1] - third_size), disguised(third_size))


def layout(heads: int, grid: Shape, blocks: Shape, parts: int, tokens: int, first: int = 0) -> Layout:
    """Grid and blocks of 1 to 3 axes; missing leading axes have one token in one block."""
    missing = (1,) * (3 - len(grid))
    return Layout._make(map(disguised, (heads, *missing, *grid, *missing, *blocks, parts, first, tokens)))


def state_shape(call: Call) -> Shape:
    """Of the summaries: (B, H, M, D, D), or (B, H, M, D + 1, D) where the key sum follows the KV summary."""
    batch, _, heads, head_dim = call.query.shape
    return batch, heads, math.prod(call.blocks), head_dim + call.normalize, head_dim


def mixed_dtype(call: Call) -> torch.dtype:
    """Of the mixed summaries of a forward pass.

    Rounded to bfloat16, they add less to the output than rounding it does. The summaries, and what the backward pass
    reads, stay float32: there most of a sum cancels, and the mixing matrix's gradient was up to 11 times as wrong.
    """
    return torch.bfloat16 if call.query.dtype == torch.bfloat16 else torch.float32


def allocate(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled contiguous tensor; the tests fill it with NaN, so that an element no kernel wrote shows."""
    return torch.empty(shape, dtype=dtype, device=device)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """An unfilled contiguous tensor of the same shape and type."""
    return allocate(tuple(tensor.shape), tensor.dtype, tensor.device)
