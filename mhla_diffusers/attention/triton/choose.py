"""Which key blocks a query block attends to token by token: scores of pooled blocks, and the best of every row.

Scores are float32 and leave the kernel that computes them for another that takes a whole row; where there are many
blocks that goes part after part. Nothing here waits for the device.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..call import list_length
from .launch import Launch, allocate, architecture_of, precision_of
from .prepare import GRID, block_counts

SCORE_BYTES = 32 * 2**20
"""Of the scores that exist at once: what one kernel writes, the next still finds in the cache of a large card."""
MOST_KEY_BLOCKS = 32_768
"""One program holds the scores of a query block in its registers."""
SCORES_OF_A_THREAD = 16
"""With more, too few programs share a processor to hide the waiting of each."""
ALIGNMENT = tl.constexpr(16)
"""Rows of scores begin at multiples of so many, so that they are read 16 bytes at a time."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Least variance of logits in a block, so that its logarithm is finite."""


class Tiles(NamedTuple):
    """How the score kernel is cut."""

    queries: int
    keys: int
    channels: int
    """Of one step along the sum, for operands of 16 bits; half as many of float32."""
    warps: int
    stages: int


TILES = {"default": Tiles(queries=64, keys=64, channels=64, warps=4, stages=2)}
"""By architecture."""


class Part(NamedTuple):
    """Query blocks whose scores exist at once: some rows of one group, or all rows of some."""

    first_group: int
    groups: int
    first_row: int
    rows: int


@triton.jit(do_not_specialize=["columns", "first_group", "first_row", "rows", "query_blocks", "key_blocks", "heads"])
def score_kernel(
    query,
    key,
    spread,
    weight,
    scores,
    scale,
    columns,
    first_group,
    first_row,
    rows,
    query_blocks,
    key_blocks,
    heads,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of BLOCK_M query blocks with BLOCK_N key blocks of one group; a row has ``columns`` times ALIGNMENT."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = (first_group + tl.program_id(2)).to(tl.int64)
    query_at = (group * query_blocks + first_row + row)[:, None] * D
    key_at = (group * key_blocks + column)[None, :] * D
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    variance = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        query_mask = (row < rows)[:, None] & (channel < D)[None, :]
        key_mask = (column < key_blocks)[None, :] & (channel < D)[:, None]
        q = tl.load(query + query_at + channel[None, :], mask=query_mask, other=0.0)
        k = tl.load(key + key_at + channel[:, None], mask=key_mask, other=0.0)
        s = tl.load(spread + key_at + channel[:, None], mask=key_mask, other=0.0)
        logits = tl.dot(q, k, logits, input_precision=PRECISION)
        scaled = q.to(tl.float32) * scale
        variance = tl.dot((scaled * scaled).to(q.dtype), s, variance, input_precision=PRECISION)
    score = logits * scale + 0.5 * tl.log(tl.maximum(variance, TINY))
    weights = tl.load(weight + group // heads * key_blocks + column, mask=column < key_blocks, other=0.0)
    score = tl.where((weights > 0)[None, :], score, float("-inf"))
    scores_at = (tl.program_id(2) * rows + row)[:, None] * columns * ALIGNMENT + column[None, :]
    tl.store(scores + scores_at, score, mask=(row < rows)[:, None] & (column < columns * ALIGNMENT)[None, :])


@triton.jit(
    do_not_specialize=[
        *("columns", "first_group", "first_row", "query_blocks", "key_blocks", "best", "extra", "total", "words")
    ]
)
def select_kernel(
    scores,
    indices,
    counts,
    listed,
    columns,
    first_group,
    first_row,
    query_blocks,
    key_blocks,
    best,
    extra,
    total,
    words,
    COLUMNS: tl.constexpr,
):
    """The list of one query block. Scores that are -inf or NaN are never chosen."""
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    group = first_group + tl.program_id(1)
    query_block = group.to(tl.int64) * query_blocks + first_row + tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < columns * ALIGNMENT
    score = tl.load(scores + row * columns * ALIGNMENT + column, mask=inside, other=float("-inf"))

    # numbers whose order as unsigned integers is that of the scores; 0 is less than any of them
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)
    can = score > float("-inf")
    ordered = tl.where(can, ordered, 0)
    chosen_count = tl.minimum(tl.sum(can.to(tl.int32)), best)

    # bit by bit the largest threshold that leaves enough, unless one leaves just enough before
    threshold = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    left = tl.full((), COLUMNS, tl.int32)
    while (bit != 0) & (left != chosen_count):
        tried = threshold | bit
        would_leave = tl.sum((ordered >= tried).to(tl.int32))
        threshold = tl.where(would_leave >= chosen_count, tried, threshold)
        left = tl.where(would_leave >= chosen_count, would_leave, left)
        bit = bit >> 1

    # of those as good as the last one the first
    above = ordered > threshold
    tie = ordered == threshold
    missing = chosen_count - tl.sum(above.to(tl.int32))
    chosen = (above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= missing))).to(tl.int32)

    width = best + extra
    place = tl.cumsum(chosen, 0) - 1
    first_key = group * total
    tl.store(indices + query_block * width + place, first_key + column, mask=chosen != 0)
    for first in range(chosen_count, width, 32):  # the extra blocks, then the group's first one as padding
        entry = first + tl.arange(0, 32)
        behind = entry - chosen_count
        block = tl.where(behind < extra, key_blocks + behind, 0)
        tl.store(indices + query_block * width + entry, first_key + block, mask=entry < width)
    tl.store(counts + query_block, chosen_count + extra)
    word = tl.sum(tl.reshape(chosen << (column & 31), (COLUMNS // 32, 32)), 1)
    number = tl.arange(0, COLUMNS // 32)
    tl.store(listed + query_block * words + number, word, mask=number < words)


def choose_launches(
    pooled_query: torch.Tensor,
    pooled_key: torch.Tensor,
    spread: torch.Tensor,
    weight: torch.Tensor,
    n: int,
    extra: int,
    scale: float,
    total: int,
    architecture: str | None = None,
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The kernels that find the n best key blocks of every query block, and the extra blocks, which all lists hold.

    The score is the logit of the mean key plus the logarithm of how far the block's logits stand apart: with the mean
    query q, the mean key k and the variance s of the keys by channel, ``scale q·k + ½ log(scale² Σ q² s)``.

    Args:
        pooled_query: (G, Tq, D), float32, bfloat16 or float16, contiguous, as the next two.
        pooled_key: (G, T, D).
        spread: (G, T, D).
        weight: float32 (S, T), contiguous, S a divisor of G: how much of a block counts. Blocks of 0 are never chosen.
        n: most blocks of a list, extra ones not counted.
        extra: how many blocks behind the T of a group every list ends with.
        scale: of the logits.
        total: key blocks of a group, T + extra at least.
        architecture: of a card that is not there.

    Returns:
        The launches, scores and selection of one part after the other, and what they fill: indices int32
        (G * Tq, n + extra), ascending, those of group g from g * total on; how many of a list are real, int32
        (G * Tq,), which come first; and bits int32 (G * Tq, ceil(T / 32)), of which bit c of word w tells whether the
        list holds block 32 w + c of its group.

    Raises:
        ValueError: there are more key blocks than MOST_KEY_BLOCKS.
    """
    groups, query_blocks, head_dim = pooled_query.shape
    key_blocks, device = pooled_key.shape[1], pooled_query.device
    if key_blocks > MOST_KEY_BLOCKS:
        raise ValueError(f"{key_blocks} key blocks, {MOST_KEY_BLOCKS} at most can be chosen from: take larger blocks")
    card = architecture or architecture_of(device)
    rows, tiles = groups * query_blocks, TILES.get(card, TILES["default"])
    indices = allocate((rows, n + extra), torch.int32, device)
    counts = allocate((rows,), torch.int32, device)
    listed = allocate((rows, -(-key_blocks // 32)), torch.int32, device)
    aligned = -(-key_blocks // ALIGNMENT.value) * ALIGNMENT.value
    parts = list(_parts(groups, query_blocks, SCORE_BYTES // (4 * aligned)))
    scores = allocate((max(part.groups * part.rows for part in parts), aligned), torch.float32, device)
    pooled = {"query": pooled_query, "key": pooled_key, "spread": spread, "weight": weight, "scores": scores}
    sizes = {"scale": scale, "columns": aligned // ALIGNMENT.value, "heads": groups // weight.shape[0], "D": head_dim}
    constants = {
        **{"BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys},
        "BLOCK_K": tiles.channels * 2 // max(2, pooled_query.element_size()),
        "PRECISION": precision_of(pooled_query.dtype, card),
    }
    launches = []
    for part in parts:
        of_part = {"first_group": part.first_group, "first_row": part.first_row, "rows": part.rows}
        counted = {"query_blocks": query_blocks, "key_blocks": key_blocks}
        grid = -(-aligned // tiles.keys), -(-part.rows // tiles.queries), part.groups
        arguments = pooled | sizes | of_part | counted | constants
        launches += [
            Launch(score_kernel, grid, arguments, tiles.warps, tiles.stages),
            select_launch(scores, part, (indices, counts, listed), (query_blocks, key_blocks), (n, extra, total), card),
        ]
    return launches, (indices, counts, listed)


def _parts(groups: int, query_blocks: int, most_rows: int) -> Iterator[Part]:
    """Of equal size but for the last."""
    at_once = min(groups, max(1, most_rows // query_blocks))
    at_once = -(-groups // -(-groups // at_once))
    rows = min(query_blocks, max(1, most_rows // at_once))
    for group in range(0, groups, at_once):
        for row in range(0, query_blocks, rows):
            yield Part(group, min(at_once, groups - group), row, min(rows, query_blocks - row))


def select_launch(
    scores: torch.Tensor,
    part: Part,
    chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: tuple[int, int],
    wanted: tuple[int, int, int],
    card: str,
) -> Launch:
    """The kernel that fills indices, counts and bits, ``chosen``, of a part's rows.

    Scores are float32 (rows of the part at least, T rounded up to ALIGNMENT), -inf behind the T of a row; ``blocks``
    are query blocks and key blocks of a group, and ``wanted`` n, extra and total.
    """
    indices, counts, listed = chosen
    (query_blocks, key_blocks), (best, extra, total) = blocks, wanted
    columns = max(32, triton.next_power_of_2(scores.shape[1]))
    arguments = {
        **{"scores": scores, "indices": indices, "counts": counts, "listed": listed},
        **{"columns": scores.shape[1] // ALIGNMENT.value, "COLUMNS": columns, "words": listed.shape[1]},
        **{"first_group": part.first_group, "first_row": part.first_row},
        **{"query_blocks": query_blocks, "key_blocks": key_blocks, "best": best, "extra": extra, "total": total},
    }
    threads_of_a_warp = 64 if card.startswith("gfx") else 32
    warps = max(1, min(1024, columns // SCORES_OF_A_THREAD) // threads_of_a_warp)
    return Launch(select_kernel, (part.rows, part.groups), arguments, warps, stages=1)


@torch.library.custom_op(
    "mhla_diffusers::choose_blocks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor spread, Tensor weight, float density, float scale, {GRID}) -> "
    "(Tensor, Tensor, Tensor)",
)
def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    spread: torch.Tensor,
    weight: torch.Tensor,
    density: float,
    scale: float,
    *place: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`choose_launches` fills; ``place`` is token grid, rows of a block and number of extra tokens."""
    blocks, of_grid = block_counts(*place)
    sizes = list_length(density, of_grid), blocks - of_grid, scale, blocks
    launches, chosen = choose_launches(query, key, spread, weight, *sizes)
    for launch in launches:
        launch.run()
    return chosen


@choose.register_fake
def _list_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, density, _, grid, block_size, extra = arguments
    blocks, of_grid = block_counts(grid, block_size, extra)
    lists = query.shape[0] * query.shape[1]
    shapes = (lists, list_length(density, of_grid) + blocks - of_grid), (lists,), (lists, (of_grid + 31) // 32)
    return tuple(query.new_empty(shape, dtype=torch.int32) for shape in shapes)
