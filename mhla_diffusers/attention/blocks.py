"""Reorder tokens by the blocks of :mod:`.layout`, and back; lists of blocks."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .layout import (
    NAMESPACE,
    Shape,
    block_count,
    block_sizes,
    blocks_of_range,
    kept_tensors,
    layout_of,
    tokens_by_block,
)


@lru_cache(maxsize=128)
def block_table(
    grid: Shape, blocks: Shape, block_size: int, device: torch.device, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tables that order a run of tokens by block; cached: a copy per call would sync the device.

    Args:
        grid: token grid.
        blocks: MHLA blocks per axis; () for uniform ones. The table has those of :func:`blocks_of_range`.
        block_size: rows of a uniform block; 0 for MHLA blocks, which have as many as the longest of the grid.
        device: that holds the tables.
        first: place of the first token; 0 for uniform blocks.
        count: how many they are; in uniform blocks those beyond the grid are extra tokens.

    Returns:
        The token in every row, counted from the first, int64 (blocks, rows), any where there is none; the row of every
        token, int64 (count,); and the rows without a token, int64.
    """
    with kept_tensors():
        if block_size:
            order = layout_of(grid, block_size, count - math.prod(grid)).order.long().view(-1, block_size)
            exists, tokens = order >= 0, order.clamp_min(0)
        else:
            run = blocks_of_range(grid, blocks, first, count)
            members, starts = tokens_by_block(grid, blocks, first, count)
            starts = starts[run.start : run.stop + 1]
            sizes, starts = starts.diff()[:, None], starts[:-1, None]
            within = torch.arange(max(block_sizes(grid, blocks))).expand(len(sizes), -1)
            exists = within < sizes
            tokens = members[(starts + within.minimum(sizes - 1).clamp_min(0)).clamp_max(count - 1)]
        rows = torch.empty(count, dtype=torch.int64)
        rows[tokens[exists]] = exists.flatten().nonzero().flatten()
        return tokens.to(device), rows.to(device), (~exists).flatten().nonzero().flatten().to(device)


def to_blocks(x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int) -> torch.Tensor:
    """Tokens in the order of their blocks.

    Takes (B, N, ...), a run of the grid's tokens in raster order from ``first`` on; of uniform blocks all of them, with
    extra tokens behind. Grid, blocks and block size are those of :func:`block_table`.

    Returns:
        (B, b, L, ...): the b blocks of the table, L rows long, 0 in rows without a token.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        found: torch.Tensor = to_blocks_operator(x, grid, blocks, block_size, first)
        return found
    tokens, _, padding = block_table(tuple(grid), tuple(blocks), block_size, x.device, first, x.shape[1])
    rows = x.index_select(1, tokens.flatten())
    if len(padding):
        rows.index_fill_(1, padding, 0)
    return rows.unflatten(1, tokens.shape)


def from_blocks(
    rows: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int, count: int
) -> torch.Tensor:
    """The inverse of :func:`to_blocks`: (B, b, L, ...) to (B, N, ...) for N = ``count``."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        found: torch.Tensor = from_blocks_operator(rows, grid, blocks, block_size, first, count)
        return found
    _, places, _ = block_table(tuple(grid), tuple(blocks), block_size, rows.device, first, count)
    return rows.flatten(1, 2).index_select(1, places)


# The same as operators: torch.compile does not trace what reads the tables, and a gradient is the other one's output
_PLACE = "SymInt[] grid, SymInt[] blocks, SymInt block_size, SymInt first"
to_blocks_operator = torch.library.custom_op(
    f"{NAMESPACE}::to_blocks",
    torch.no_grad()(to_blocks),
    mutates_args=(),
    schema=f"(Tensor x, {_PLACE}) -> Tensor",
)
from_blocks_operator = torch.library.custom_op(
    f"{NAMESPACE}::from_blocks",
    torch.no_grad()(from_blocks),
    mutates_args=(),
    schema=f"(Tensor rows, {_PLACE}, SymInt count) -> Tensor",
)


@to_blocks_operator.register_fake
def _to_blocks_shape(
    x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int
) -> torch.Tensor:
    if block_size:
        shape = block_count(grid, block_size, x.shape[1] - math.prod(list(grid))), block_size
    else:
        grid, blocks = tuple(map(int, grid)), tuple(map(int, blocks))
        own = blocks_of_range(grid, blocks, int(first), int(x.shape[1]))
        shape = own.stop - own.start, max(block_sizes(grid, blocks))
    return x.new_empty(x.shape[0], *shape, *x.shape[2:])


@from_blocks_operator.register_fake
def _from_blocks_shape(rows: torch.Tensor, *place: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], place[-1], *rows.shape[3:])


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.place, ctx.tokens = inputs[1:5], inputs[0].shape[1]


def _to_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return from_blocks_operator(gradient.contiguous(), *ctx.place, ctx.tokens), *(None,) * 4


def _from_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return to_blocks_operator(gradient.contiguous(), *ctx.place), *(None,) * 5


to_blocks_operator.register_autograd(_to_blocks_gradient, setup_context=_save_place)
from_blocks_operator.register_autograd(_from_blocks_gradient, setup_context=_save_place)


def in_blocks(x: torch.Tensor, grid: Sequence[int], block_size: int) -> torch.Tensor:
    """(B, N + n, H, C), n extra tokens last, in uniform blocks: (B, H, T + E, L, C), 0 in rows without a token."""
    return to_blocks(x, grid, [], block_size, 0).permute(0, 3, 1, 2, 4).contiguous()


def in_order(x: torch.Tensor, grid: Sequence[int], block_size: int) -> torch.Tensor:
    """The inverse of :func:`in_blocks` for blocks of the grid's tokens alone: (B, H, T, L, C) to (B, N, H, C)."""
    return from_blocks(x.permute(0, 2, 3, 1, 4), grid, [], block_size, 0, math.prod(list(grid)))


def list_length(density: float, blocks: int) -> int:
    """Listed key blocks per query block at a density: at least one."""
    return max(1, round(density * blocks))


def mask_of_lists(lists: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return which blocks are listed, bool (..., T), for lists (..., n) padded with -1."""
    mask = lists.new_zeros(*lists.shape[:-1], blocks + 1, dtype=torch.bool)
    # -1 is put behind the last block
    return mask.scatter_(-1, lists.where(lists >= 0, blocks), value=True)[..., :blocks]
