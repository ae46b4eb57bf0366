"""Which key blocks a query block attends to token by token, and how the states of all others are mixed.

Logits of pooled queries and keys are float32 and leave the kernel that computes them for another that takes a whole
row; where there are many blocks that goes part after part. Nothing here waits for the device.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..order import stretch_of
from .operators import allocate, differentiable, operator
from .prepare import GRID, block_counts
from .softmax import EMPTY
from .tiles import architecture_of, precision_of, tile_of

SCORE_BYTES = 32 * 2**20
"""Bytes of the logits that exist at once: what one kernel writes, the next still finds in the cache of a large card."""
MOST_KEY_BLOCKS = 32_768
"""One program holds the scores of a query block in its registers."""
SCORES_OF_A_THREAD = 16
"""With more, too few programs share a processor to hide the latency of each."""
ALIGNMENT = tl.constexpr(16)
"""Rows of logits begin at multiples of this, so that 16 bytes are read at a time."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Least variance of scores in a block, so that its logarithm is finite."""


@triton.jit(do_not_specialize=["columns", "first_group", "first_row", "rows", "query_blocks", "key_blocks"])
def score_kernel(
    query,
    key,
    gain,
    weight,
    logits,
    scale,
    columns,
    first_group,
    first_row,
    rows,
    query_blocks,
    key_blocks,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of BLOCK_M query blocks with BLOCK_N key blocks of one group, -inf of those without weight; a row has
    ``columns`` times ALIGNMENT.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = (first_group + tl.program_id(2)).to(tl.int64)
    query_at = (group * query_blocks + first_row + row)[:, None] * D
    key_at = (group * key_blocks + column)[None, :] * D
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        query_mask = (row < rows)[:, None] & (channel < D)[None, :]
        key_mask = (column < key_blocks)[None, :] & (channel < D)[:, None]
        q = tl.load(query + query_at + channel[None, :], mask=query_mask, other=0.0)
        k = tl.load(key + key_at + channel[:, None], mask=key_mask, other=0.0)
        found = tl.dot(q, k, found, input_precision=PRECISION)
    found *= scale
    if gain is not None:
        pair = (group * query_blocks + first_row + row)[:, None] * key_blocks + column[None, :]
        inside = (row < rows)[:, None] & (column < key_blocks)[None, :]
        found += tl.load(gain + pair, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + group * key_blocks + column, mask=column < key_blocks, other=0.0)
    found = tl.where((weights > 0)[None, :], found, float("-inf"))
    at = (tl.program_id(2) * rows + row)[:, None] * columns * ALIGNMENT + column[None, :]
    tl.store(logits + at, found, mask=(row < rows)[:, None] & (column < columns * ALIGNMENT)[None, :])


@triton.jit
def best_of(score, best, COLUMNS: tl.constexpr):
    """Which are the ``best`` largest scores, of equal ones the first; how many, fewer where others are -inf or NaN."""
    # numbers whose order as unsigned integers is that of the scores; 0 is less than any of them
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)
    can = score > float("-inf")
    ordered = tl.where(can, ordered, 0)
    count = tl.minimum(tl.sum(can.to(tl.int32)), best)

    # bit by bit the largest threshold that leaves enough, unless one leaves just enough before
    threshold = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    left = tl.full((), COLUMNS, tl.int32)
    while (bit != 0) & (left != count):
        tried = threshold | bit
        would_leave = tl.sum((ordered >= tried).to(tl.int32))
        threshold = tl.where(would_leave >= count, tried, threshold)
        left = tl.where(would_leave >= count, would_leave, left)
        bit = bit >> 1

    # of those as good as the last one the first
    above = ordered > threshold
    tie = ordered == threshold
    missing = count - tl.sum(above.to(tl.int32))
    return (above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= missing))).to(tl.int32), count


@triton.jit(
    do_not_specialize=[
        *("columns", "first_group", "first_row", "query_blocks", "key_blocks", "best", "width", "extra", "total"),
        *("words", "stretches"),
    ]
)
def select_kernel(
    logits,
    variance,
    weight,
    given,
    indices,
    counts,
    listed,
    mixing,
    columns,
    first_group,
    first_row,
    query_blocks,
    key_blocks,
    best,
    width,
    extra,
    total,
    words,
    stretches,
    COLUMNS: tl.constexpr,
    PER_STRETCH: tl.constexpr,
):
    """The list of one query block, by scores or given as bits, and the row of the mixing matrix of all other blocks."""
    group = first_group + tl.program_id(1)
    query_block = group.to(tl.int64) * query_blocks + first_row + tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < key_blocks
    logits += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * columns * ALIGNMENT
    if given is None:
        score = tl.load(logits + column, mask=column < columns * ALIGNMENT, other=float("-inf"))
        of_keys = tl.load(variance + query_block * key_blocks + column, mask=inside, other=0.0).to(tl.float32)
        score += (0.5 if mixing is None else 1.5) * tl.log(tl.maximum(of_keys, TINY))
        chosen, count = best_of(score, best, COLUMNS)
    else:
        word = tl.load(given + query_block * words + column // 32, mask=inside, other=0)
        chosen = (word >> (column & 31)) & 1
        count = tl.sum(chosen)

    place = tl.cumsum(chosen, 0) - 1
    first_key = group * total
    tl.store(indices + query_block * width + place, first_key + column, mask=chosen != 0)
    for first in range(count, width, 32):  # the extra blocks, then the group's first one as padding
        entry = first + tl.arange(0, 32)
        behind = entry - count
        block = tl.where(behind < extra, key_blocks + behind, 0)
        tl.store(indices + query_block * width + entry, first_key + block, mask=entry < width)
    tl.store(counts + query_block, count + extra)
    word = tl.sum(tl.reshape(chosen << (column & 31), (COLUMNS // 32, 32)), 1)
    number = tl.arange(0, COLUMNS // 32)
    tl.store(listed + query_block * words + number, word, mask=number < words)

    if mixing is not None:  # reads the logits again, which else would stay in registers
        others = tl.load(logits + column, mask=column < columns * ALIGNMENT, other=float("-inf"))
        takes_part = (chosen == 0) & (others != float("-inf"))  # NaN does
        of_blocks = tl.load(weight + group.to(tl.int64) * key_blocks + column, mask=inside, other=1.0)
        others = tl.where(takes_part, others + tl.log(tl.where(takes_part, of_blocks, 1.0)), EMPTY)
        weights = tl.where(takes_part, tl.exp(others - tl.max(others, 0)), 0.0)
        whole = tl.sum(weights)
        weights = tl.reshape(weights / tl.where(whole == 0, 1.0, whole), (COLUMNS // PER_STRETCH, PER_STRETCH))
        stretch = tl.arange(0, COLUMNS // PER_STRETCH)
        tl.store(mixing + query_block * stretches + stretch, tl.sum(weights, 1), mask=stretch < stretches)


_INPUTS = (
    "Tensor query, Tensor key, Tensor? gain, Tensor variance, Tensor weight, Tensor? given, SymInt best, float scale, "
    f"{GRID}"
)


def _outputs(query, gain, best, grid, block_size, extra) -> tuple[torch.Tensor, ...]:
    """Allocate what :func:`choose` returns."""
    blocks, key_blocks = block_counts(grid, block_size, extra)
    rows, per_stretch = query.shape[0] * query.shape[1], stretch_of(block_size) // block_size
    shapes = (rows, max(1, best + blocks - key_blocks)), (rows,), (rows, (key_blocks + 31) // 32)
    mixing = (0,) if gain is None else (*query.shape[:2], (key_blocks + per_stretch - 1) // per_stretch)
    lists = (allocate(shape, torch.int32, query.device) for shape in shapes)
    return *lists, allocate(mixing, torch.float32, query.device)


@operator(f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def choose(query, key, gain, variance, weight, given, best, scale, grid, block_size, extra):
    """Find the best key blocks of every query block by :func:`mhla_diffusers.attention.sparse.choose_by_content`.

    Scores that are -inf or NaN are never chosen. All lists hold the E blocks of extra tokens too.

    Args:
        query: pooled, (G, Tq, D), contiguous; ``key`` is (G, T, D).
        gain: :func:`mhla_diffusers.attention.sparse.log_gain`, (G, Tq, T), contiguous; None with means alone.
        variance: of the scores of a block's keys with the mean query, like ``gain``.
        weight: float32 (G, T), contiguous. Blocks of 0 take no part.
        given: lists, as the bits that are returned; None to choose them, ``best`` each at most.

    Returns:
        Indices int32 (G Tq, best + E), ascending, those of group g from g (T + E) on; how many of a list are real,
        int32 (G Tq,), which come first; int32 (G Tq, ceil(T / 32)), bit c of word w says whether the list holds block
        32 w + c of its group; and with gains the mixing matrix of the states of stretches, float32 (G, Tq, stretches),
        sums of softmax(scale q·k + gain + log weight) over blocks that are not listed.

    Raises:
        ValueError: there are more key blocks than MOST_KEY_BLOCKS.
    """
    blocks, key_blocks = block_counts(grid, block_size, extra)
    if key_blocks > MOST_KEY_BLOCKS:
        raise ValueError(f"{key_blocks} key blocks are more than {MOST_KEY_BLOCKS}: take larger blocks")
    indices, counts, listed, mixing = _outputs(query, gain, best, grid, block_size, extra)
    (groups, query_blocks, head_dim), width = query.shape, triton.cdiv(key_blocks, ALIGNMENT.value) * ALIGNMENT.value
    columns = max(32, triton.next_power_of_2(width))
    threads = 64 if architecture_of(query.device).startswith("gfx") else 32  # of a warp
    parts = list(_parts(groups, query_blocks, SCORE_BYTES // (4 * width)))
    logits = allocate((max(part[1] * part[3] for part in parts), width), torch.float32, query.device)
    tile = tile_of("score", query)
    for first_group, part_groups, first_row, part_rows in parts:
        shared = {"logits": logits, "weight": weight, "columns": width // ALIGNMENT.value, "key_blocks": key_blocks}
        shared |= {"first_group": first_group, "first_row": first_row, "query_blocks": query_blocks}
        score_kernel[triton.cdiv(width, tile.n), triton.cdiv(part_rows, tile.m), part_groups](
            query=query,
            key=key,
            gain=gain,
            scale=scale,
            rows=part_rows,
            D=head_dim,
            BLOCK_K=128 // query.element_size(),
            PRECISION=precision_of(query),
            **shared,
            **tile.arguments,
        )
        select_kernel[part_rows, part_groups](
            variance=variance,
            given=given,
            indices=indices,
            counts=counts,
            listed=listed,
            mixing=None if gain is None else mixing,
            best=best,
            width=indices.shape[1],
            extra=blocks - key_blocks,
            total=blocks,
            words=listed.shape[1],
            stretches=mixing.shape[-1],
            COLUMNS=columns,
            PER_STRETCH=stretch_of(block_size) // block_size,
            num_warps=max(1, min(1024, columns // SCORES_OF_A_THREAD) // threads),
            num_stages=1,
            **shared,
        )
    return indices, counts, listed, mixing


def _parts(groups: int, query_blocks: int, most_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield first group, groups, first row and rows of the query blocks whose logits exist at once."""
    at_once = min(groups, max(1, most_rows // query_blocks))
    at_once = -(-groups // -(-groups // at_once))
    rows = min(query_blocks, max(1, most_rows // at_once))
    for group in range(0, groups, at_once):
        for row in range(0, query_blocks, rows):
            yield group, min(at_once, groups - group), row, min(rows, query_blocks - row)


@operator(f"(Tensor gradient, Tensor bits, {_INPUTS}) -> Tensor[]")
def choose_backward(gradient, bits, query, key, gain, variance, weight, given, best, scale, grid, block_size, extra):
    """Gradients of means and gains; products of PyTorch, since gradients are taken in training alone."""
    column = torch.arange(key.shape[1], device=key.device)
    words = bits.view(len(query), -1, bits.shape[1]).index_select(2, column // 32)
    weight = weight[:, None]
    left_out = ((words >> (column % 32)) & 1 == 1) | (weight == 0)
    q, k = query.float(), key.float()
    logits = scale * q @ k.mT + gain.float() + weight.clamp_min(TINY.value).log()
    weights = logits.masked_fill(left_out, EMPTY.value).softmax(dim=-1).masked_fill(left_out, 0)
    of_weights = gradient.repeat_interleave(stretch_of(block_size) // block_size, dim=2)[..., : key.shape[1]]
    of_logits = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True))
    of_query, of_key = (scale * of_logits @ k).to(query.dtype), (scale * of_logits.mT @ q).to(key.dtype)
    return [of_query, of_key, of_logits.to(gain.dtype)]


@choose.register_fake
def _(query, key, gain, variance, weight, given, best, scale, grid, block_size, extra):
    return _outputs(query, gain, best, grid, block_size, extra)


differentiable(choose, choose_backward, 3, outputs=(2,))
