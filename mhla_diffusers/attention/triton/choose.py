"""Choose the listed key blocks of every query block, and mix the states of all others.

One program takes a whole row of logits, those of one query block. Nothing here waits for the device.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import torch
import triton
import triton.language as tl

from ..layout import block_count
from ..order import blocks_per_state, stretch_of
from .operators import allocate, differentiable, operator
from .prepare import GRID
from .softmax import EMPTY
from .tiles import architecture_of

MOST_KEY_BLOCKS = 32_768
"""One program holds the scores of a query block in its registers."""
SCORES_OF_A_THREAD = 16
"""With more, too few programs share a processor to hide the latency of each."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Least variance of scores in a block, so that its logarithm is finite."""


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


@triton.jit(do_not_specialize=["key_blocks", "best", "width", "extra", "total", "words", "stretches"])
def select_kernel(
    logits,
    variance,
    weight,
    given,
    indices,
    counts,
    listed,
    mixing,
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
    group = tl.program_id(1)
    query_block = group.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < key_blocks
    logits += query_block * key_blocks
    weight += group.to(tl.int64) * key_blocks
    if given is None:
        has_weight = tl.load(weight + column, mask=inside, other=0.0) > 0
        score = tl.where(has_weight, tl.load(logits + column, mask=inside, other=0.0), float("-inf"))
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
        others = tl.load(logits + column, mask=inside, other=0.0)
        of_blocks = tl.load(weight + column, mask=inside, other=0.0)
        takes_part = (chosen == 0) & (of_blocks > 0)
        others = tl.where(takes_part, others + tl.log(tl.where(takes_part, of_blocks, 1.0)), EMPTY)
        weights = tl.where(takes_part, tl.exp(others - tl.max(others, 0)), 0.0)
        whole = tl.sum(weights)
        weights = tl.reshape(weights / tl.where(whole == 0, 1.0, whole), (COLUMNS // PER_STRETCH, PER_STRETCH))
        stretch = tl.arange(0, COLUMNS // PER_STRETCH)
        tl.store(mixing + query_block * stretches + stretch, tl.sum(weights, 1), mask=stretch < stretches)


_INPUTS = f"Tensor logits, Tensor variance, Tensor weight, Tensor? given, SymInt best, bool by_states, {GRID}"


def _outputs(logits, best, by_states, grid, block_size, extra) -> tuple[torch.Tensor, ...]:
    """Allocate what :func:`choose` returns."""
    blocks, key_blocks = block_count(grid, block_size, extra), block_count(grid, block_size)
    rows = logits.shape[0] * logits.shape[1]
    shapes = (rows, max(1, best + blocks - key_blocks)), (rows,), (rows, (key_blocks + 31) // 32)
    mixing = (*logits.shape[:2], block_count(grid, stretch_of(block_size))) if by_states else (0,)
    lists = (allocate(shape, torch.int32, logits.device) for shape in shapes)
    return *lists, allocate(mixing, torch.float32, logits.device)


@operator(f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def choose(logits, variance, weight, given, best, by_states, grid, block_size, extra):
    """Find the best key blocks of every query block by :func:`mhla_diffusers.attention.sparse.choose_by_content`.

    Scores that are -inf or NaN are never chosen. All lists hold the E blocks of extra tokens too.

    Args:
        logits: of mean queries and keys, with the gains of blocks by their spread, float32 (G, Tq, T), contiguous.
        variance: of the scores of a block's keys with the mean query, like the logits, of any float type.
        weight: float32 (G, T), contiguous. Blocks of 0 take no part.
        given: lists, as the bits that are returned; None to choose them, ``best`` each at most.
        by_states: whether blocks that are not listed take part by their states; else by their means alone.

    Returns:
        Indices int32 (G Tq, best + E), ascending, those of group g from g (T + E) on; how many of a list are real,
        int32 (G Tq,), which come first; int32 (G Tq, ceil(T / 32)), bit c of word w says whether the list holds block
        32 w + c of its group; and by states the matrix that mixes those of stretches, float32 (G, Tq, stretches),
        sums of softmax(logits + log weight) over blocks that are not listed.

    Raises:
        ValueError: there are more key blocks than MOST_KEY_BLOCKS.
    """
    blocks, key_blocks = block_count(grid, block_size, extra), block_count(grid, block_size)
    if key_blocks > MOST_KEY_BLOCKS:
        raise ValueError(f"{key_blocks} key blocks are more than {MOST_KEY_BLOCKS}: take larger blocks")
    indices, counts, listed, mixing = _outputs(logits, best, by_states, grid, block_size, extra)
    columns = max(32, triton.next_power_of_2(key_blocks))
    threads = 64 if architecture_of(logits.device).startswith("gfx") else 32  # of a warp
    select_kernel[logits.shape[1], logits.shape[0]](
        logits=logits,
        variance=variance,
        weight=weight,
        given=given,
        indices=indices,
        counts=counts,
        listed=listed,
        mixing=mixing if by_states else None,
        key_blocks=key_blocks,
        best=best,
        width=indices.shape[1],
        extra=blocks - key_blocks,
        total=blocks,
        words=listed.shape[1],
        stretches=mixing.shape[-1],
        COLUMNS=columns,
        PER_STRETCH=blocks_per_state(block_size),
        num_warps=max(1, min(1024, columns // SCORES_OF_A_THREAD) // threads),
        num_stages=1,
    )
    return indices, counts, listed, mixing


@operator(f"(Tensor gradient, Tensor bits, {_INPUTS}) -> Tensor[]")
def choose_backward(gradient, bits, logits, variance, weight, given, best, by_states, grid, block_size, extra):
    """Gradient of the logits, in operations of PyTorch, since gradients are taken in training alone."""
    column = torch.arange(logits.shape[2], device=logits.device)
    words = bits.view(len(logits), -1, bits.shape[1]).index_select(2, column // 32)
    left_out = ((words >> (column % 32)) & 1 == 1) | (weight[:, None] == 0)
    weights = (logits + weight[:, None].log()).masked_fill(left_out, EMPTY.value)
    weights = weights.softmax(dim=-1).masked_fill(left_out, 0)
    of_weights = gradient.repeat_interleave(blocks_per_state(block_size), dim=2)[..., : logits.shape[2]]
    return [weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True))]


@choose.register_fake
def _(logits, variance, weight, given, best, by_states, grid, block_size, extra):
    return _outputs(logits, best, by_states, grid, block_size, extra)


differentiable(choose, choose_backward, 1, outputs=(2,))
