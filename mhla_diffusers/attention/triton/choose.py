"""Which key blocks a query block attends to token by token: scores of pooled blocks, and the best of every row.

Scores are float32 and leave the kernel that computes them for another that takes a whole row; where there are many
blocks that goes part after part. Nothing here waits for the device.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..call import list_length
from .operators import allocate, operator
from .prepare import GRID, block_counts
from .tiles import precision_of, tile_of, warp_size_of

SCORE_BYTES = 32 * 2**20
"""Bytes of the scores that exist at once: what one kernel writes, the next still finds in the cache of a large card."""
MOST_KEY_BLOCKS = 32_768
"""One program holds the scores of a query block in its registers."""
SCORES_OF_A_THREAD = 16
"""With more, too few programs share a processor to hide the latency of each."""
ALIGNMENT = tl.constexpr(16)
"""Rows of scores begin at multiples of this, so that 16 bytes are read at a time."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Least variance of scores in a block, so that its logarithm is finite."""


@triton.jit(do_not_specialize=["columns", "first_group", "first_row", "rows", "query_blocks", "key_blocks", "heads"])
def score_kernel(
    query,
    key,
    variance,
    gain,
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
    for first in range(0, D, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        query_mask = (row < rows)[:, None] & (channel < D)[None, :]
        key_mask = (column < key_blocks)[None, :] & (channel < D)[:, None]
        q = tl.load(query + query_at + channel[None, :], mask=query_mask, other=0.0)
        k = tl.load(key + key_at + channel[:, None], mask=key_mask, other=0.0)
        logits = tl.dot(q, k, logits, input_precision=PRECISION)
    pair = (group * query_blocks + first_row + row)[:, None] * key_blocks + column[None, :]
    inside = (row < rows)[:, None] & (column < key_blocks)[None, :]
    log_variance = tl.log(tl.maximum(tl.load(variance + pair, mask=inside, other=0.0).to(tl.float32), TINY))
    if gain is None:
        score = logits * scale + 0.5 * log_variance
    else:
        score = logits * scale + tl.load(gain + pair, mask=inside, other=0.0).to(tl.float32) + 1.5 * log_variance
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


@operator(
    f"(Tensor query, Tensor key, Tensor variance, Tensor? gain, Tensor weight, float density, float scale, {GRID}) -> "
    "(Tensor, Tensor, Tensor)"
)
def choose(query, key, variance, gain, weight, density, scale, grid, block_size, extra):
    """Find the best key blocks of every query block, and the blocks of extra tokens, which all lists hold.

    The score is ``scale q·k + gain + 3/2 log variance``, of means alone ``scale q·k + ½ log variance``:
    :func:`mhla_diffusers.attention.sparse.choose_by_content` says why.

    Args:
        query: pooled, (G, Tq, D), float32, bfloat16 or float16, contiguous.
        key: pooled, (G, T, D), likewise.
        variance: of the scores of a block's keys with the mean query, (G, Tq, T), contiguous.
        gain: like ``variance``, :func:`mhla_diffusers.attention.sparse.log_gain` of it; None with means alone.
        weight: float32 (S, T), contiguous, S a divisor of G: how much of a block counts. Blocks of 0 are never chosen.
        density: part of the key blocks that a list holds at most, see :func:`list_length`.
        scale: of the logits.
        grid: token grid, with ``block_size`` and ``extra`` as :func:`.prepare.prepare` takes them.
        block_size: rows of a block of keys.
        extra: extra tokens.

    Returns:
        Indices int32 (G Tq, n + E), n from the density and E the blocks of extra tokens, ascending, those of group g
        from g (T + E) on; how many of a list are real, int32 (G Tq,), which come first; and bits int32
        (G Tq, ceil(T / 32)), bit c of word w says whether the list holds block 32 w + c of its group.

    Raises:
        ValueError: there are more key blocks than MOST_KEY_BLOCKS.
    """
    blocks, key_blocks = block_counts(grid, block_size, extra)
    if key_blocks > MOST_KEY_BLOCKS:
        raise ValueError(f"{key_blocks} key blocks are more than {MOST_KEY_BLOCKS}: take larger blocks")
    n, extra_blocks = list_length(density, key_blocks), blocks - key_blocks
    (groups, query_blocks, head_dim), width = query.shape, triton.cdiv(key_blocks, ALIGNMENT.value) * ALIGNMENT.value
    rows, columns = groups * query_blocks, max(32, triton.next_power_of_2(width))
    indices = allocate((rows, n + extra_blocks), torch.int32, query.device)
    counts = allocate((rows,), torch.int32, query.device)
    listed = allocate((rows, triton.cdiv(key_blocks, 32)), torch.int32, query.device)
    parts = list(_parts(groups, query_blocks, SCORE_BYTES // (4 * width)))
    scores = allocate((max(part[1] * part[3] for part in parts), width), torch.float32, query.device)
    tile = tile_of("score", query)
    for first_group, part_groups, first_row, part_rows in parts:
        shared = {
            "scores": scores,
            "columns": width // ALIGNMENT.value,
            "first_group": first_group,
            "first_row": first_row,
            "query_blocks": query_blocks,
            "key_blocks": key_blocks,
        }
        score_kernel[triton.cdiv(width, tile.n), triton.cdiv(part_rows, tile.m), part_groups](
            query=query,
            key=key,
            variance=variance,
            gain=gain,
            weight=weight,
            scale=scale,
            rows=part_rows,
            heads=groups // len(weight),
            D=head_dim,
            BLOCK_K=128 // query.element_size(),
            PRECISION=precision_of(query),
            **shared,
            **tile.arguments,
        )
        select_kernel[part_rows, part_groups](
            indices=indices,
            counts=counts,
            listed=listed,
            best=n,
            extra=extra_blocks,
            total=blocks,
            words=listed.shape[1],
            COLUMNS=columns,
            num_warps=max(1, min(1024, columns // SCORES_OF_A_THREAD) // warp_size_of(query.device)),
            num_stages=1,
            **shared,
        )
    return indices, counts, listed


def _parts(groups: int, query_blocks: int, most_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield first group, groups, first row and rows of the query blocks whose scores exist at once.

    They are some rows of one group, or all rows of some, of equal size but for the last.
    """
    at_once = min(groups, max(1, most_rows // query_blocks))
    at_once = -(-groups // -(-groups // at_once))
    rows = min(query_blocks, max(1, most_rows // at_once))
    for group in range(0, groups, at_once):
        for row in range(0, query_blocks, rows):
            yield group, min(at_once, groups - group), row, min(rows, query_blocks - row)


@choose.register_fake
def _(query, key, variance, gain, weight, density, scale, grid, block_size, extra):
    blocks, of_grid = block_counts(grid, block_size, extra)
    lists = query.shape[0] * query.shape[1]
    shapes = (lists, list_length(density, of_grid) + blocks - of_grid), (lists,), (lists, (of_grid + 31) // 32)
    return tuple(query.new_empty(shape, dtype=torch.int32) for shape in shapes)
