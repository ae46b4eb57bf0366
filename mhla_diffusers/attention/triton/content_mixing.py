"""The content-dependent mixing matrix of the states, and its output for sampled queries.

States of stretches are made by :mod:`.prepare`, mixed by one product of PyTorch, and read by :mod:`.merge`.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from ..order import stretch_of
from .operators import allocate, operator, refuse_second_derivative
from .softmax import EMPTY, load_rows
from .tiles import constants_of, tile_of


@triton.jit
def block_logits(
    q,
    key,
    weight,
    gain,
    listed,
    row,
    start,
    columns,
    blocks,
    words,
    scale,
    HEAD_DIM,
    BLOCK_D: tl.constexpr,
    PRECISION,
):
    """Logits of mean queries with blocks start + columns, with the logs of their weights; EMPTY if listed."""
    column = start + columns
    there = column < blocks
    k = load_rows(key, column, there, HEAD_DIM, BLOCK_D)
    w = tl.load(weight + column, mask=there, other=0.0)
    listed += row * words + start // 32
    bits = tl.load(listed)[:, None]  # one word of every row
    if columns.shape[0] > 32:
        tl.static_assert(columns.shape[0] == 64)
        further = tl.load(listed + 1, mask=row < tl.where(start + 32 < blocks, row + 1, 0), other=0)
        bits = tl.where((columns < 32)[None, :], bits, further[:, None])
    takes_part = ((bits & (1 << (columns & 31))[None, :]) == 0) & (w > 0)[None, :]
    more = tl.load(gain + row[:, None] * blocks + column[None, :], mask=there[None, :], other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + tl.log(tl.where(w > 0, w, 1.0))[None, :]
    logits += more.to(tl.float32)
    return tl.where(takes_part, logits, EMPTY), takes_part


@triton.jit(do_not_specialize=["rows", "blocks", "words", "per_sample", "stretches"])
def content_mixing_kernel(
    query,
    key,
    weight,
    gain,
    listed,
    mixing,
    rows,
    blocks,
    words,
    per_sample,
    stretches,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_STRETCH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M rows of the mixing matrix of one group: softmax over blocks that are not listed, summed by stretch."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, columns = row < rows, tl.arange(0, BLOCK_N)
    row = tl.minimum(row, rows - 1)
    key += group * blocks * HEAD_DIM
    weight += group // per_sample * blocks
    gain += group * rows * blocks
    listed += group * rows * words
    q = load_rows(query + group * rows * HEAD_DIM, row, None, HEAD_DIM, BLOCK_D)
    top = tl.full((BLOCK_M,), EMPTY, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, blocks, BLOCK_N):
        logits, takes_part = block_logits(
            q,
            key,
            weight,
            gain,
            listed,
            row,
            start,
            columns,
            blocks,
            words,
            scale,
            HEAD_DIM,
            BLOCK_D,
            PRECISION,
        )
        largest = tl.maximum(top, tl.max(logits, 1))
        weights = tl.where(takes_part, tl.exp(logits - largest[:, None]), 0.0)
        total = total * tl.exp(top - largest) + tl.sum(weights, 1)
        top = largest
    share = 1.0 / tl.where(total == 0, 1.0, total)  # NaN stays
    stretch = tl.arange(0, BLOCK_N // PER_STRETCH)
    for start in range(0, blocks, BLOCK_N):
        logits, takes_part = block_logits(
            q,
            key,
            weight,
            gain,
            listed,
            row,
            start,
            columns,
            blocks,
            words,
            scale,
            HEAD_DIM,
            BLOCK_D,
            PRECISION,
        )
        weights = tl.where(takes_part, tl.exp(logits - top[:, None]) * share[:, None], 0.0)
        sums = tl.sum(tl.reshape(weights, (BLOCK_M, BLOCK_N // PER_STRETCH, PER_STRETCH)), 2)
        to = start // PER_STRETCH + stretch
        at = (group * rows + row)[:, None] * stretches + to[None, :]
        tl.store(mixing + at, sums, mask=inside[:, None] & (to < stretches)[None, :])


def _is_listed(bits: torch.Tensor, groups: int, blocks: int) -> torch.Tensor:
    """Bool (G, Tq, T) of the bits of lists."""
    column = torch.arange(blocks, device=bits.device)
    words = bits.view(groups, -1, bits.shape[1]).index_select(2, column // 32)
    return (words >> (column % 32)) & 1 == 1


_INPUTS = "Tensor query, Tensor key, Tensor gain, Tensor weight, Tensor bits, float scale, SymInt block_size"


@operator(f"({_INPUTS}) -> Tensor")
def content_mixing(query, key, gain, weight, bits, scale, block_size):
    """Mixing matrix of the states of stretches, by mean queries and keys.

    Row a holds, for every stretch of key blocks, the sum of softmax(scale q·k + gain + log weight) over those of its
    blocks that query block a does not list; 0 where there is none.

    Args:
        query: means of query blocks, (G, Tq, D), contiguous.
        key: means of key blocks, (G, T, D), likewise.
        gain: :func:`mhla_diffusers.attention.sparse.log_gain` of every block, (G, Tq, T), contiguous.
        weight: float32 (S, T), S a divisor of G: weights of the key blocks; those of 0 take no part.
        bits: int32 (G Tq, ceil(T / 32)), the listed blocks.
        scale: of the logits.
        block_size: rows of a key block, which :func:`mhla_diffusers.attention.order.stretch_of` cuts into stretches.

    Returns:
        float32 (G, Tq, stretches).
    """
    (groups, rows, _), blocks = query.shape, key.shape[1]
    per_stretch = stretch_of(block_size) // block_size
    mixing = allocate((groups, rows, triton.cdiv(blocks, per_stretch)), torch.float32, query.device)
    tile = tile_of("content_mixing", query)
    content_mixing_kernel[triton.cdiv(rows, tile.m), groups](
        query=query,
        key=key,
        weight=weight,
        gain=gain,
        listed=bits,
        mixing=mixing,
        rows=rows,
        blocks=blocks,
        words=bits.shape[1],
        per_sample=groups // len(weight),
        stretches=mixing.shape[2],
        scale=scale,
        PER_STRETCH=per_stretch,
        **constants_of(query),
        **tile.arguments,
    )
    return mixing


@operator(f"(Tensor gradient, {_INPUTS}) -> (Tensor, Tensor, Tensor)")
def content_mixing_backward(gradient, query, key, gain, weight, bits, scale, block_size):
    """Gradients of means and gains; products of PyTorch, since gradients are taken in training alone."""
    groups, blocks, per_stretch = len(query), key.shape[1], stretch_of(block_size) // block_size
    weight = weight.repeat_interleave(groups // len(weight), dim=0)[:, None]
    left_out = _is_listed(bits, groups, blocks) | (weight == 0)
    q, k = query.float(), key.float()
    logits = scale * q @ k.mT + gain.float() + weight.clamp_min(torch.finfo(weight.dtype).tiny).log()
    logits = logits.masked_fill(left_out, EMPTY.value)
    weights = logits.softmax(dim=-1).masked_fill(left_out, 0)
    of_weights = gradient.repeat_interleave(per_stretch, dim=2)[..., :blocks]
    of_logits = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True))
    of_query, of_key = (scale * of_logits @ k).to(query.dtype), (scale * of_logits.mT @ q).to(key.dtype)
    return of_query, of_key, of_logits.to(gain.dtype)


@content_mixing.register_fake
def _(query, key, gain, weight, bits, scale, block_size):
    per_stretch = stretch_of(block_size) // block_size
    stretches = (key.shape[1] + per_stretch - 1) // per_stretch
    return query.new_empty(*query.shape[:2], stretches, dtype=torch.float32)


@content_mixing_backward.register_fake
def _(gradient, *inputs: Any):
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return *content_mixing_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.settings), *(None,) * 4


content_mixing.register_autograd(_differentiate, setup_context=_save)
content_mixing_backward.register_autograd(refuse_second_derivative)


@triton.jit(do_not_specialize=["rows", "query_blocks", "count"])
def sampled_correction_kernel(
    query,
    mixed,
    sampled,
    correction,
    rows,
    query_blocks,
    count,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What one sampled query of one group reads from the mixed states of its block."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.load(sampled + tl.program_id(0)).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    mixed += (group * query_blocks + row // QUERY_ROWS) * HEAD_DIM * HEAD_DIM
    query += (group * rows + row) * HEAD_DIM
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, HEAD_DIM, ROWS):
        own = first + tl.arange(0, ROWS)
        q = tl.load(query + own, mask=own < HEAD_DIM, other=0.0).to(tl.float32)
        state = load_rows(mixed, own, own < HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
        total += tl.sum(q[:, None] * state, 0)
    at = (group * count + tl.program_id(0)) * HEAD_DIM + channel
    tl.store(correction + at, total * scale, mask=channel < HEAD_DIM)


def sampled_correction(query: torch.Tensor, mixed: torch.Tensor, some: torch.Tensor, scale: float) -> torch.Tensor:
    """What some queries read from the mixed states: float32 (G, samples, D).

    Args:
        query: (G, R, D), rows of query blocks.
        mixed: (G, Tq, D, D), mixed states of these blocks.
        some: int64 (samples,), rows.
        scale: of the queries.
    """
    groups, rows, head_dim = query.shape
    correction = allocate((groups, len(some), head_dim), torch.float32, query.device)
    constants = constants_of(query)
    sampled_correction_kernel[len(some), groups](
        query=query,
        mixed=mixed,
        sampled=some,
        correction=correction,
        rows=rows,
        query_blocks=mixed.shape[1],
        count=len(some),
        scale=scale,
        HEAD_DIM=head_dim,
        BLOCK_D=constants["BLOCK_D"],
        QUERY_ROWS=rows // mixed.shape[1],
        ROWS=min(32, constants["BLOCK_D"]),
        num_warps=4,
        num_stages=1,
    )
    return correction
