"""Kernels of Multi-Head Mixing and of the mixing matrix's gradient, with their launches.

``torch.matmul`` would follow the user's choice of float32 precision, under which TF32 rounds to 11 bits. Here products
are as precise as those of the other kernels.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .arguments import allocate, disguised
from .launches import Launch
from .tile import accurate_dot, plain, to_bfloat16
from .tilings import AnyTiling, MixTiling, Place, wished
from .tuning import architecture_of, mix_tiling, parts_per_block, precision_of, processors_of


@triton.jit
def mix_kernel(
    coefficients,
    summaries,
    mixed,
    heads,
    blocks,
    wanted,
    head_stride,
    row_stride,
    column_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some elements (COLUMNS) of what some query blocks (ROWS) see: Σ_j m_ij S_j, for one batch row and head.

    ``coefficients`` and ``mixed`` begin with the first row that is wanted.
    """
    heads, blocks, wanted = plain(heads), plain(blocks), plain(wanted)
    row_tiles = tl.cdiv(wanted, ROWS)
    rest = tl.program_id(0)
    rows = rest % row_tiles * ROWS + tl.arange(0, ROWS)
    rest = rest // row_tiles
    columns = rest % tl.cdiv(SIZE, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    whole = (rest // tl.cdiv(SIZE, COLUMNS)).to(tl.int64)
    coefficients += whole % heads * plain(head_stride) + rows[:, None] * plain(row_stride)
    start = whole * blocks * SIZE
    has_row, has_column = rows < wanted, columns < SIZE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, blocks, DEPTH):
        others = first + tl.arange(0, DEPTH)
        has_other = others < blocks
        weights = tl.load(
            coefficients + others[None, :] * plain(column_stride), mask=has_row[:, None] & has_other[None, :], other=0.0
        )
        addresses = summaries + start + others[:, None].to(tl.int64) * SIZE + columns[None, :]
        values = tl.load(addresses, mask=has_other[:, None] & has_column[None, :], other=0.0)
        total = accurate_dot(weights, values, total, PRECISION, False, False)
    addresses = mixed + start + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
    if mixed.dtype.element_ty == tl.bfloat16:
        total = to_bfloat16(total)
    tl.store(addresses, total, mask=has_row[:, None] & has_column[None, :])


@triton.jit
def mixing_gradient_kernel(
    of_mixed,
    summaries,
    shares,
    blocks,
    parts,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of some m_ij from one part of the elements of one batch row and head."""
    blocks, parts = plain(blocks), plain(parts)
    rest = tl.program_id(0)
    rows = rest % tl.cdiv(blocks, ROWS) * ROWS + tl.arange(0, ROWS)
    rest = rest // tl.cdiv(blocks, ROWS)
    columns = rest % tl.cdiv(blocks, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    rest = rest // tl.cdiv(blocks, COLUMNS)
    part = rest % parts
    whole = (rest // parts).to(tl.int64)
    has_row, has_column = rows < blocks, columns < blocks
    gradients = of_mixed + (whole * blocks + rows[:, None]) * SIZE
    values = summaries + (whole * blocks + columns[None, :]) * SIZE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    length = tl.cdiv(tl.cdiv(SIZE, parts), DEPTH) * DEPTH
    for first in range(part * length, tl.minimum((part + 1) * length, SIZE), DEPTH):
        elements = first + tl.arange(0, DEPTH)
        exists = elements < SIZE
        left = tl.load(gradients + elements[None, :], mask=has_row[:, None] & exists[None, :], other=0.0)
        right = tl.load(values + elements[:, None], mask=exists[:, None] & has_column[None, :], other=0.0)
        total = accurate_dot(left, right, total, PRECISION, False, False)
    addresses = shares + ((whole * parts + part) * blocks + rows[:, None]) * blocks + columns[None, :]
    tl.store(addresses, total, mask=has_row[:, None] & has_column[None, :])


@lru_cache(maxsize=1024)
def _cut(
    place: Place,
    size: int,
    _wish: AnyTiling | None,  # read by the tables themselves; here it tells calls apart
) -> tuple[MixTiling, dict[str, Any]]:
    """Tiles and constants, the same for all calls of one size."""
    tiles = mix_tiling(place)
    precision = precision_of(place.dtype, place.architecture)
    return tiles, {"SIZE": size, "PRECISION": precision, **tiles.constants()}


def mix_launch(
    mixing: torch.Tensor,
    summary: torch.Tensor,
    dtype: torch.dtype,
    mixed_dtype: torch.dtype,
    rows: slice | None = None,
    architecture: str | None = None,
) -> tuple[Launch, torch.Tensor]:
    """What each query block sees.

    Args:
        mixing: (M, M) or (H, M, M).
        summary: float32 (B, H, M, ...), contiguous.
        dtype: of the call's query, which says how precise products must be.
        mixed_dtype: float32 or bfloat16, of what is written.
        rows: of the blocks whose mixture is written, by number; None for all.
        architecture: of a card that is not there.

    Returns:
        The launch and what it writes, in the shape of ``summary``.
    """
    batch, heads, blocks = summary.shape[:3]
    size = summary[0, 0, 0].numel()
    place = Place(architecture or architecture_of(summary.device), "mix", 0, dtype, blocks)
    tiles, constants = _cut(place, size, wished(place.kernel))
    mixed = allocate(tuple(summary.shape), mixed_dtype, summary.device)
    rows = slice(0, blocks) if rows is None else rows
    # the kernel counts rows from the first that is wanted: another number to keep would spill registers
    coefficients = mixing.float().expand(heads, -1, -1)[:, rows]
    head_stride, row_stride, column_stride = coefficients.stride()
    wanted = rows.stop - rows.start
    arguments = {
        "coefficients": coefficients,
        "summaries": summary,
        "mixed": mixed[:, :, rows],
        "heads": disguised(heads),
        "blocks": disguised(blocks),
        "wanted": disguised(wanted),
        "head_stride": disguised(head_stride),
        "row_stride": disguised(row_stride),
        "column_stride": disguised(column_stride),
    }
    programs = batch * heads * -(-wanted // tiles.rows) * -(-size // tiles.columns)
    return Launch(mix_kernel, programs, arguments, constants, place, tiles), mixed


def mixing_gradient_launch(
    summary: torch.Tensor, mixed_gradient: torch.Tensor, dtype: torch.dtype, architecture: str | None = None
) -> tuple[Launch, torch.Tensor]:
    """Gradient of the mixing matrix of every batch row and head, in shares: float32 (B, H, parts, M, M).

    Args:
        summary: float32 (B, H, M, ...), contiguous.
        mixed_gradient: like ``summary``.
        dtype: as in :func:`mix_launch`.
        architecture: as in :func:`mix_launch`.
    """
    batch, heads, blocks = summary.shape[:3]
    size = summary[0, 0, 0].numel()
    place = Place(architecture or architecture_of(summary.device), "mixing_gradient", 0, dtype, blocks)
    tiles, constants = _cut(place, size, wished(place.kernel))
    whole = batch * heads * -(-blocks // tiles.rows) * -(-blocks // tiles.columns)
    parts = parts_per_block(whole, size, tiles.depth, processors_of(summary.device, place.architecture))
    shares = allocate((batch, heads, parts, blocks, blocks), torch.float32, summary.device)
    arguments = {
        "of_mixed": mixed_gradient,
        "summaries": summary,
        "shares": shares,
        "blocks": disguised(blocks),
        "parts": disguised(parts),
    }
    return Launch(mixing_gradient_kernel, whole * parts, arguments, constants, place, tiles), shares
