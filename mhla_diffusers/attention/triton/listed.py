"""Softmax attention of blocks of queries to the keys of the blocks that their lists name.

Rows lie on flat axes, groups (samples and heads) after each other. The gradient of the keys walks through transposed
lists, so that no sum is shared by two programs and the same inputs give the same bits.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import layout_of
from .operators import allocate, differentiable, operator, padded
from .prepare import GRID
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
from .tiles import MAX_HEAD_DIM, Tile, constants_of, tile_of

_MANY = 4
"""Times the mean length of the transposed lists: longer ones are walked first."""


@triton.jit
def load_entries(entries, valid, i, count, columns, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key block of tile i, or of each of its columns, those of the last tile beyond it; and how many keys of it there
    are, which of several blocks is looked up where it matters.
    """
    if BLOCK_SIZE >= BLOCK_N:
        entry = i // (BLOCK_SIZE // BLOCK_N)
        block = tl.load(entries + tl.maximum(tl.minimum(entry, count - 1), 0), mask=count > 0, other=0)
        return block, tl.load(valid + block)
    else:
        blocks = tl.zeros((BLOCK_N,), tl.int32)
        for part in tl.static_range(BLOCK_N // BLOCK_SIZE):  # one number for all threads each, and no load per column
            entry = i * (BLOCK_N // BLOCK_SIZE) + part
            block = tl.load(entries + tl.maximum(tl.minimum(entry, count - 1), 0), mask=count > 0, other=0)
            blocks = tl.where(columns // BLOCK_SIZE == part, block, blocks)
        return blocks, tl.full((), 0, tl.int32)


@triton.jit(do_not_specialize=["width", "extra_blocks"])
def listed_kernel(
    query,
    key,
    value,
    valid,
    bias,
    indices,
    counts,
    output,
    lse,
    width,
    extra_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    output_gradient=None,
    lse_gradient=None,
    dq=None,
    shift=None,
    delta=None,
):
    """Output and log-sum-exp of BLOCK_M rows of one block of queries.

    Given the output's gradient, that of these rows; and what the gradient of keys needs of each row: shift and delta.
    """
    FORWARD: tl.constexpr = output_gradient is None
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // BLOCK_N  # tiles of a block of keys
    PER_TILE: tl.constexpr = BLOCK_N // BLOCK_SIZE
    program = tl.program_id(0)
    block = program // (QUERY_ROWS // BLOCK_M)
    first = program.to(tl.int64) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    if FORWARD:
        top = tl.full((BLOCK_M,), EMPTY, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    else:
        do, s, d = load_upstream(output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM)
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM)
    entries = indices + block.to(tl.int64) * width
    count = tl.load(counts + block)
    j, real = load_entries(entries, valid, 0, count, columns, BLOCK_SIZE, BLOCK_N)
    for i in range(0, count * PER_BLOCK if PER_BLOCK > 0 else tl.cdiv(count, PER_TILE)):
        if PER_BLOCK > 0:
            start, offsets = j.to(tl.int64) * BLOCK_SIZE + i % PER_BLOCK * BLOCK_N, columns
        else:
            start, offsets = tl.full((), 0, tl.int64), j.to(tl.int64) * BLOCK_SIZE + columns % BLOCK_SIZE
        k = load_rows(key + start * HEAD_DIM, offsets, None, HEAD_DIM)
        v = load_rows(value + start * HEAD_DIM, offsets, None, HEAD_DIM)
        if bias is not None:
            if PER_BLOCK > 0:
                b = tl.load(bias + start + offsets)
            else:
                b = tl.load(bias + offsets, mask=i * PER_TILE + columns // BLOCK_SIZE < count, other=float("-inf"))
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # blocks with padding are the last of the grid and of the extra tokens, and lists ascend
        if bias is not None:
            logits = tl.fma(b[None, :], LOG2E / scale, logits)
        elif PER_BLOCK > 0:
            left = real - i % PER_BLOCK * BLOCK_N
            if left < BLOCK_N:
                logits = tl.where((columns < left)[None, :], logits, float("-inf"))
        elif (i + 1) * PER_TILE >= count - extra_blocks:
            inside = (i * PER_TILE + columns // BLOCK_SIZE < count) & (columns % BLOCK_SIZE < tl.load(valid + j))
            logits = tl.where(inside[None, :], logits, float("-inf"))
        if CAUSAL and start + BLOCK_N - 1 > first:
            logits = tl.where((start + columns)[None, :] <= (first + rows)[:, None], logits, float("-inf"))
        if FORWARD:
            top, total, sums = softmax_step(logits, v, top, total, sums, scale, PRECISION)
        else:
            sums, _ = gradient_step(logits, do, k, v, s, d, sums, scale, PRECISION)
        j, real = load_entries(entries, valid, i + 1, count, columns, BLOCK_SIZE, BLOCK_N)
    if FORWARD:
        store_softmax(output, lse, first, rows, top, total, sums, HEAD_DIM)
    else:
        store_rows(dq + first * HEAD_DIM, rows, None, sums * (scale / LOG2E), HEAD_DIM)


@triton.jit
def listed_dkv_kernel(
    query,
    key,
    value,
    valid,
    bias,
    turns,
    starts,
    queries,
    output_gradient,
    shift,
    delta,
    dk,
    dv,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N rows of keys and values, from the blocks of queries whose lists name their block."""
    SPLITS: tl.constexpr = QUERY_ROWS // BLOCK_M
    program = tl.program_id(0)
    block = tl.load(turns + program // (BLOCK_SIZE // BLOCK_N))
    part = program % (BLOCK_SIZE // BLOCK_N) * BLOCK_N
    first = block.to(tl.int64) * BLOCK_SIZE + part
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k = load_rows(key + first * HEAD_DIM, columns, None, HEAD_DIM)
    v = load_rows(value + first * HEAD_DIM, columns, None, HEAD_DIM)
    if bias is not None:
        b = tl.load(bias + first + columns) * (LOG2E / scale)
    key_gradient = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    begin, end = tl.load(starts + block) * SPLITS, tl.load(starts + block + 1) * SPLITS
    j = tl.load(queries + begin // SPLITS, mask=begin < end, other=0)
    for i in range(begin, end):
        start = j.to(tl.int64) * QUERY_ROWS + i % SPLITS * BLOCK_M
        q = load_rows(query + start * HEAD_DIM, rows, None, HEAD_DIM)
        do = load_rows(output_gradient + start * HEAD_DIM, rows, None, HEAD_DIM)
        s, d = tl.load(shift + start + rows), tl.load(delta + start + rows)
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if bias is not None:
            logits += b[:, None]
        if CAUSAL and first + BLOCK_N - 1 > start:
            logits = tl.where((first + columns)[:, None] <= (start + rows)[None, :], logits, float("-inf"))
        weights = tl.math.exp2(tl.fma(logits, scale, s[None, :]))
        value_gradient = tl.dot(weights.to(do.dtype), do, value_gradient, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - d[None, :])
        key_gradient = tl.dot(ds.to(q.dtype), q, key_gradient, input_precision=PRECISION)
        j = tl.load(queries + tl.minimum(i + 1, end - 1) // SPLITS)
    key_gradient *= scale / LOG2E
    if bias is None:
        real = (columns < tl.load(valid + block) - part)[:, None]
        key_gradient, value_gradient = tl.where(real, key_gradient, 0.0), tl.where(real, value_gradient, 0.0)
    store_rows(dk + first * HEAD_DIM, columns, None, key_gradient, HEAD_DIM)
    store_rows(dv + first * HEAD_DIM, columns, None, value_gradient, HEAD_DIM)


def transpose_lists(
    indices: torch.Tensor, counts: torch.Tensor, key_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which blocks of queries name each block of keys, computed on the device without waiting for it: int32.

    Returns:
        The order to walk the blocks of keys in (Tk,): one that very many lists name comes first, for as the last it
        would run alone, and the others stay in order, for neighbours read the same queries. Where the list of each
        begins (Tk + 1,) in the last, blocks of queries (Tq * n,), ascending within each list.
    """
    width = indices.shape[1]
    named = torch.arange(width, device=indices.device) < counts[:, None]
    blocks, order = torch.where(named, indices, key_blocks).flatten().sort(stable=True)
    every = torch.arange(key_blocks + 1, dtype=torch.int32, device=indices.device)
    starts = torch.searchsorted(blocks, every, out_int32=True)
    is_short = starts.diff() * key_blocks <= _MANY * indices.numel()
    return is_short.to(torch.int8).argsort(stable=True).int(), starts, (order // width).int()


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor indices, Tensor counts, float scale, "
    f"{GRID}, bool causal"
)


def _arguments(inputs: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that all kernels take, with both axes flat, groups after each other; and those of lists."""
    query, key, value, bias, indices, counts, scale, grid, block_size, extra, causal = inputs
    layout = layout_of(tuple(grid), block_size, extra, query.device)
    shared = {"query": query, "key": key, "value": value, "valid": layout.valid.repeat(len(query)), "bias": bias}
    sizes = {"QUERY_ROWS": query.shape[:2].numel() // len(indices), "BLOCK_SIZE": block_size, "CAUSAL": causal}
    lists = {"indices": indices, "counts": counts, "width": indices.shape[1]}
    lists["extra_blocks"] = layout.blocks - layout.grid_blocks
    return shared | constants_of(query) | sizes | {"scale": scale * LOG2E.value}, lists


def _tile(kernel: str, shared: dict[str, Any]) -> Tile:
    """Return the tile of a kernel that walks lists; with a causal list no tile spans two blocks."""
    most_n = shared["BLOCK_SIZE"] if shared["CAUSAL"] else MAX_HEAD_DIM
    return tile_of(kernel, shared["query"], shared["QUERY_ROWS"], most_n)


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def listed(*inputs: Any):
    """Attention of the rows of each block of queries to the keys of the blocks that its list names.

    Args:
        query: (G, Q, D), contiguous, Tq blocks of rows; ``key`` and ``value`` (G, R, D) have all blocks.
        bias: float32 (G, R), contiguous: log of the weight of every key; None for 1.
        indices: int32 (G Tq, n), numbers of key blocks on the flat axis of all groups, n at least 1.
        counts: int32 (G Tq,), how many entries of each list are real; those come first and ascend, since only blocks at
            the end of a list may have padding; the others may hold anything.
        causal: also hide keys whose row is beyond the query's, of queries that have all rows.

    Returns:
        Output (G, Q, D) in the type of the query and LSE float32 (G, Q), natural; 0 and EMPTY for a row that attends to
        nothing.
    """
    (shared, lists), query = _arguments(inputs), inputs[0]
    tile = _tile("softmax_forward_128" if shared["QUERY_ROWS"] > 64 else "softmax_forward", shared)
    output, lse = outputs_of(query)
    listed_kernel[(lse.numel() // tile.m,)](output=output, lse=lse, **lists, **shared, **tile.arguments)
    return output, lse


@operator(f"(Tensor output_gradient, Tensor lse_gradient, Tensor output, Tensor lse, {_INPUTS}) -> Tensor[]")
def listed_backward(output_gradient, lse_gradient, output, lse, *inputs: Any):
    """Gradients of query, key and value; the same bits for the same inputs."""
    (shared, lists), (query, key, value, *_) = _arguments(inputs), inputs
    dq, dk, dv = (allocate(x.shape, x.dtype, x.device) for x in (query, key, value))
    shift, delta = (allocate(lse.shape, torch.float32, lse.device) for _ in range(2))
    shared |= {"output_gradient": output_gradient, "shift": shift, "delta": delta}
    tile = _tile("softmax_dq", shared)
    listed_kernel[(lse.numel() // tile.m,)](
        output=output, lse=lse, lse_gradient=lse_gradient, dq=dq, **lists, **shared, **tile.arguments
    )
    turns, starts, queries = transpose_lists(lists["indices"], lists["counts"], len(shared["valid"]))
    tile = tile_of("softmax_dkv", query, shared["QUERY_ROWS"], shared["BLOCK_SIZE"])
    listed_dkv_kernel[(key.shape[:2].numel() // tile.n,)](
        turns=turns, starts=starts, queries=queries, dk=dk, dv=dv, **shared, **tile.arguments
    )
    return [dq, dk, dv]


listed.register_fake(outputs_of)
differentiable(listed, listed_backward, 3, outputs=(0, 1))
