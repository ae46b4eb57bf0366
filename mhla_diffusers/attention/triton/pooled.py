"""Softmax attention of rows of queries to the pooled keys of all blocks that the query's list does not name.

The gradients of pooled rows sum over all queries of a group: each program takes a split of the queries, and the splits
are added in a fixed order.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from .operators import allocate, differentiable, operator, padded
from .softmax import (
    EMPTY,
    LOG2E,
    gradient_step,
    load_rows,
    load_upstream,
    outputs_of,
    softmax_step,
    store_rows,
    store_softmax,
)
from .tiles import constants_of, processors_of, tile_of


@triton.jit
def load_bits(words, start, blocks):
    """The 32 bits of the blocks around start, as one number for the whole program; set beyond the last block."""
    left = tl.maximum(blocks - start // 32 * 32, 0)
    word = tl.load(words + start // 32, mask=left > 0, other=-1)
    return tl.where(left < 32, word | (-1 << (left & 31)), word)


@triton.jit(do_not_specialize=["blocks", "query_blocks", "words_per_row"])
def pooled_kernel(
    query,
    key,
    value,
    gain,
    bias,
    listed,
    output,
    lse,
    blocks,
    query_blocks,
    words_per_row,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    output_gradient=None,
    lse_gradient=None,
    dq=None,
    gain_gradient=None,
    shift=None,
    delta=None,
):
    """Output and log-sum-exp of BLOCK_M rows of one block of queries.

    Given the output's gradient, those of these rows and of what they have of the gains, (G, R / BLOCK_M, T); and what
    the gradient of pooled rows needs of each row: shift and delta.
    """
    FORWARD: tl.constexpr = output_gradient is None
    block, group = tl.program_id(0) // (QUERY_ROWS // BLOCK_M), tl.program_id(1).to(tl.int64)
    first = (group * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    key += group * blocks * HEAD_DIM
    value += group * blocks * HEAD_DIM
    bias += group * blocks
    listed += (group * query_blocks + block) * words_per_row
    if gain is not None:
        gain += (group * query_blocks + block) * blocks
    sums = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    if FORWARD:
        top = tl.full((BLOCK_M,), EMPTY, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    else:
        do, s, d = load_upstream(output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM)
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM)
    for start in range(0, blocks, BLOCK_N):
        there = tl.minimum(start + columns, blocks - 1)
        k = load_rows(key, there, None, HEAD_DIM)
        v = load_rows(value, there, None, HEAD_DIM)
        bits = load_bits(listed, start, blocks)
        if BLOCK_N > 32:
            tl.static_assert(BLOCK_N == 64)
            bits = tl.where(columns < 32, bits, load_bits(listed, start + 32, blocks))
        added = tl.where((bits & (1 << ((start + columns) & 31))) != 0, float("-inf"), tl.load(bias + there))
        if gain is not None:
            added += tl.load(gain + there).to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = tl.fma(added[None, :], LOG2E / scale, logits)
        if FORWARD:
            top, total, sums = softmax_step(logits, v, top, total, sums, scale, PRECISION)
        else:
            sums, ds = gradient_step(logits, do, k, v, s, d, sums, scale, PRECISION)
            if gain is not None:
                at = first // BLOCK_M * blocks + start + columns
                tl.store(gain_gradient + at, tl.sum(ds, 0), mask=start + columns < blocks)
    if FORWARD:
        store_softmax(output, lse, first, rows, top, total, sums, HEAD_DIM)
    else:
        store_rows(dq + first * HEAD_DIM, rows, None, sums * (scale / LOG2E), HEAD_DIM)


@triton.jit(do_not_specialize=["blocks", "query_blocks", "words_per_row", "split"])
def pooled_dkv_kernel(
    query,
    key,
    value,
    gain,
    bias,
    listed,
    output_gradient,
    shift,
    delta,
    dk,
    dv,
    blocks,
    query_blocks,
    words_per_row,
    split,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N pooled keys and values from one split of the queries: (splits, G, T, D), float32."""
    SPLITS: tl.constexpr = QUERY_ROWS // BLOCK_M
    group = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = start + columns < blocks
    there = tl.minimum(start + columns, blocks - 1)
    k = load_rows(key + group * blocks * HEAD_DIM, start + columns, inside, HEAD_DIM)
    v = load_rows(value + group * blocks * HEAD_DIM, start + columns, inside, HEAD_DIM)
    b = tl.load(bias + group * blocks + start + columns, mask=inside, other=float("-inf")) * LOG2E
    words = listed + group * query_blocks * words_per_row
    if gain is not None:
        gain += group * query_blocks * blocks + there
    first = group * query_blocks * QUERY_ROWS
    key_gradient = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    begin = tl.program_id(1) * split
    for i in range(begin * SPLITS, tl.minimum(begin + split, query_blocks) * SPLITS):
        row = first + i * BLOCK_M
        q = load_rows(query + row * HEAD_DIM, rows, None, HEAD_DIM)
        do = load_rows(output_gradient + row * HEAD_DIM, rows, None, HEAD_DIM)
        s, d = tl.load(shift + row + rows), tl.load(delta + row + rows)
        bits = tl.load(words + i // SPLITS * words_per_row + there // 32)
        left_out = (bits & (1 << (there & 31))) != 0
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        added = b
        if gain is not None:
            added += tl.load(gain + i // SPLITS * blocks).to(tl.float32) * LOG2E
        logits = tl.fma(logits, scale, tl.where(left_out, float("-inf"), added)[:, None])
        weights = tl.math.exp2(logits + s[None, :])
        value_gradient = tl.dot(weights.to(do.dtype), do, value_gradient, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - d[None, :])
        key_gradient = tl.dot(ds.to(q.dtype), q, key_gradient, input_precision=PRECISION)
    part = (tl.program_id(1) * tl.num_programs(2) + group) * blocks * HEAD_DIM
    store_rows(dk + part, start + columns, inside, key_gradient * (scale / LOG2E), HEAD_DIM)
    store_rows(dv + part, start + columns, inside, value_gradient, HEAD_DIM)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? gain, Tensor bias, Tensor bits, float scale"


def _arguments(query, key, value, gain, bias, bits, scale) -> dict[str, Any]:
    """Arguments that all kernels take."""
    query_blocks = len(bits) // len(query)
    inputs = {"query": query, "key": key, "value": value, "gain": gain, "bias": bias, "listed": bits}
    sizes = {"blocks": key.shape[1], "query_blocks": query_blocks, "words_per_row": bits.shape[1]}
    sizes["QUERY_ROWS"] = query.shape[1] // query_blocks
    return inputs | sizes | constants_of(query) | {"scale": scale * LOG2E.value}


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def pooled(query, key, value, gain, bias, bits, scale):
    """Attention of each row to the pooled keys of all blocks that its block of queries does not list.

    Args:
        query: (G, R, D), Tq blocks of R / Tq rows; ``key`` and ``value`` (G, T, D) have one per block of keys.
        gain: :func:`mhla_diffusers.attention.sparse.log_gain`, (G, Tq, T), contiguous; None for 0.
        bias: float32 (G, T), contiguous: log of the block's weight, which is its number of tokens or the sum of its key
            mask; -inf where nothing counts.
        bits: of the lists, see :func:`.choose.choose`.

    Returns:
        As :func:`.listed.listed`.
    """
    shared = _arguments(query, key, value, gain, bias, bits, scale)
    tile = tile_of("softmax_forward", query, shared["QUERY_ROWS"])
    output, lse = outputs_of(query)
    pooled_kernel[query.shape[1] // tile.m, len(query)](output=output, lse=lse, **shared, **tile.arguments)
    return output, lse


@operator(f"(Tensor output_gradient, Tensor lse_gradient, Tensor output, Tensor lse, {_INPUTS}) -> Tensor[]")
def pooled_backward(output_gradient, lse_gradient, output, lse, query, key, value, gain, bias, bits, scale):
    """Gradients of query, key, value and any gain; the same bits for the same inputs."""
    shared = _arguments(query, key, value, gain, bias, bits, scale)
    groups, query_blocks = len(query), shared["query_blocks"]
    dq = allocate(query.shape, query.dtype, query.device)
    shift, delta = (allocate(lse.shape, torch.float32, lse.device) for _ in range(2))
    shared |= {"output_gradient": output_gradient, "shift": shift, "delta": delta}
    tile = tile_of("softmax_dq", query, shared["QUERY_ROWS"])
    of_spread: torch.Tensor | None = None
    if gain is not None:
        of_spread = allocate((groups, query.shape[1] // tile.m, key.shape[1]), torch.float32, query.device)
    pooled_kernel[query.shape[1] // tile.m, groups](
        output=output,
        lse=lse,
        lse_gradient=lse_gradient,
        dq=dq,
        gain_gradient=of_spread,
        **shared,
        **tile.arguments,
    )
    tile = tile_of("pooled_dkv", query, shared["QUERY_ROWS"])
    tiles = triton.cdiv(key.shape[1], tile.n)
    # at most four programs to a processor: two at a time, in two rounds
    splits = max(1, min(4 * processors_of(query.device) // (tiles * groups), query_blocks))
    split = triton.cdiv(query_blocks, splits)
    splits = triton.cdiv(query_blocks, split)
    dk, dv = (allocate((splits, *key.shape), torch.float32, key.device) for _ in range(2))
    pooled_dkv_kernel[tiles, splits, groups](dk=dk, dv=dv, split=split, **shared, **tile.arguments)
    found = [dq, dk.sum(0).to(key.dtype), dv.sum(0).to(key.dtype)]
    if of_spread is not None:
        found.append(of_spread.unflatten(1, (query_blocks, -1)).sum(2).to(gain.dtype))
    return found


pooled.register_fake(outputs_of)
differentiable(pooled, pooled_backward, 4, outputs=(0, 1))
