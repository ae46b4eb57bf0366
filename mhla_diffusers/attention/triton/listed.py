"""Softmax attention of blocks of queries to the keys of the blocks that their lists name.

Queries are rows (Rq, D), cut into Tq blocks; keys and values are rows (Rk, D), cut into Tk blocks, and both axes are
flat: samples and heads follow each other, and a list tells which they meet. All lists are n long, and a count tells how
many entries are real. The gradient of the keys walks through transposed lists, so that no sum is shared by two programs
and the same inputs give the same bits.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import EMPTY, LOG2E, Launch, allocate, architecture_of, power_of_two, precision_of
from .softmax import Tile, load_rows, load_upstream, softmax_end, softmax_step, store_rows, tile_for

_EMPTY = tl.constexpr(EMPTY)
_LOG2E = tl.constexpr(LOG2E)
_MANY = 4
"""Times the mean length of the transposed lists: longer ones are walked first."""

_WIDE = {256: Tile(32, 32, 4, 1)}
_FLOAT32 = {128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)}
TILES: dict[str, dict[str, dict[int, Tile]]] = {
    "forward": {
        "sm_90": {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
        "sm_100": {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
        "": {128: Tile(64, 64, 4, 2), **_WIDE},
        "float32": _FLOAT32,
    },
    "forward of 128": {
        "sm_90": {128: Tile(128, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
        "": {128: Tile(128, 64, 8, 2), **_WIDE},
        "float32": _FLOAT32,
    },
    "dq": {
        "sm_90": {128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
        "sm_100": {128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
        "gfx942": {128: Tile(64, 32, 4, 2), **_WIDE},
        "": {128: Tile(64, 64, 4, 2), **_WIDE},
        "float32": _FLOAT32,
    },
    "dkv": {
        "sm_90": {128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
        "sm_100": {128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
        "gfx942": {128: Tile(32, 64, 4, 2), **_WIDE},
        "": {128: Tile(64, 64, 8, 2), **_WIDE},
        "float32": _FLOAT32,
    },
}
"""Kernel, architecture ("" stands for those without their own) or float32, and the largest head dim of an entry."""


@triton.jit
def real_logits(logits, bias, real, first, start, scale, rows, columns, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Logits of rows first + rows and keys start + columns, -inf where a key does not count: seldom taken branches."""
    if bias is not None:
        logits = tl.fma(bias[None, :], _LOG2E / scale, logits)
    elif real < BLOCK_N:
        logits = tl.where((columns < real)[None, :], logits, float("-inf"))
    if CAUSAL and start + BLOCK_N - 1 > first:
        logits = tl.where((start + columns)[None, :] <= (first + rows)[:, None], logits, float("-inf"))
    return logits


@triton.jit(do_not_specialize=["width"])
def listed_forward_kernel(
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
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of BLOCK_M rows of one block of queries."""
    PARTS: tl.constexpr = KEY_ROWS // BLOCK_N
    program = tl.program_id(0)
    block = program // (QUERY_ROWS // BLOCK_M)
    first = program.to(tl.int64) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    top = tl.full((BLOCK_M,), _EMPTY, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    entries = indices + block.to(tl.int64) * width
    count = tl.load(counts + block) * PARTS
    j = tl.load(entries, mask=count > 0, other=0)
    real = tl.load(valid + j)
    for i in range(0, count):
        start = j.to(tl.int64) * KEY_ROWS + i % PARTS * BLOCK_N
        k = load_rows(key + start * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
        v = load_rows(value + start * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
        b = None if bias is None else tl.load(bias + start + columns)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = real_logits(logits, b, real - i % PARTS * BLOCK_N, first, start, scale, rows, columns, BLOCK_N, CAUSAL)
        top, total, sums = softmax_step(logits, v, top, total, sums, scale, PRECISION)
        j = tl.load(entries + tl.minimum(i + 1, count - 1) // PARTS)
        real = tl.load(valid + j)
    out, log_sum = softmax_end(top, total, sums)
    store_rows(output + first * HEAD_DIM, rows, None, out, HEAD_DIM, BLOCK_D)
    tl.store(lse + first + rows, log_sum)


@triton.jit(do_not_specialize=["width"])
def listed_dq_kernel(
    query,
    key,
    value,
    valid,
    bias,
    indices,
    counts,
    output,
    output_gradient,
    lse,
    lse_gradient,
    dq,
    shift,
    delta,
    width,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of BLOCK_M rows of queries; and what the gradient of keys needs of each row: shift and delta."""
    PARTS: tl.constexpr = KEY_ROWS // BLOCK_N
    program = tl.program_id(0)
    block = program // (QUERY_ROWS // BLOCK_M)
    first = program.to(tl.int64) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    do, s, d = load_upstream(output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM, BLOCK_D)
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    entries = indices + block.to(tl.int64) * width
    count = tl.load(counts + block) * PARTS
    j = tl.load(entries, mask=count > 0, other=0)
    real = tl.load(valid + j)
    for i in range(0, count):
        start = j.to(tl.int64) * KEY_ROWS + i % PARTS * BLOCK_N
        k = load_rows(key + start * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
        v = load_rows(value + start * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
        b = None if bias is None else tl.load(bias + start + columns)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = real_logits(logits, b, real - i % PARTS * BLOCK_N, first, start, scale, rows, columns, BLOCK_N, CAUSAL)
        weights = tl.math.exp2(tl.fma(logits, scale, s[:, None]))
        ds = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])
        gradient = tl.dot(ds.to(k.dtype), k, gradient, input_precision=PRECISION)
        j = tl.load(entries + tl.minimum(i + 1, count - 1) // PARTS)
        real = tl.load(valid + j)
    store_rows(dq + first * HEAD_DIM, rows, None, gradient * (scale / _LOG2E), HEAD_DIM, BLOCK_D)


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
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N rows of keys and values, from the blocks of queries whose lists name their block."""
    PARTS: tl.constexpr = QUERY_ROWS // BLOCK_M
    program = tl.program_id(0)
    block = tl.load(turns + program // (KEY_ROWS // BLOCK_N))
    part = program % (KEY_ROWS // BLOCK_N) * BLOCK_N
    first = block.to(tl.int64) * KEY_ROWS + part
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k = load_rows(key + first * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
    v = load_rows(value + first * HEAD_DIM, columns, None, HEAD_DIM, BLOCK_D)
    if bias is not None:
        b = tl.load(bias + first + columns) * (_LOG2E / scale)
    key_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin, end = tl.load(starts + block) * PARTS, tl.load(starts + block + 1) * PARTS
    j = tl.load(queries + begin // PARTS, mask=begin < end, other=0)
    for i in range(begin, end):
        start = j.to(tl.int64) * QUERY_ROWS + i % PARTS * BLOCK_M
        q = load_rows(query + start * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
        do = load_rows(output_gradient + start * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
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
        j = tl.load(queries + tl.minimum(i + 1, end - 1) // PARTS)
    key_gradient *= scale / _LOG2E
    if bias is None:
        real = (columns < tl.load(valid + block) - part)[:, None]
        key_gradient, value_gradient = tl.where(real, key_gradient, 0.0), tl.where(real, value_gradient, 0.0)
    store_rows(dk + first * HEAD_DIM, columns, None, key_gradient, HEAD_DIM, BLOCK_D)
    store_rows(dv + first * HEAD_DIM, columns, None, value_gradient, HEAD_DIM, BLOCK_D)


def transpose_lists(
    indices: torch.Tensor, counts: torch.Tensor, key_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which blocks of queries name each block of keys, computed on the device without waiting for it.

    Returns:
        turns: int32 (Tk,), the order to walk the blocks of keys in. One that very many lists name comes first, for as
            the last it would run alone; the others stay in order, for neighbours read the same queries.
        starts: int32 (Tk + 1,), where the list of each begins in ``queries``.
        queries: int32 (Tq * n,), blocks of queries, ascending within each list.
    """
    width = indices.shape[1]
    named = torch.arange(width, device=indices.device) < counts[:, None]
    blocks, order = torch.where(named, indices, key_blocks).flatten().sort(stable=True)
    every = torch.arange(key_blocks + 1, dtype=torch.int32, device=indices.device)
    starts = torch.searchsorted(blocks, every, out_int32=True)
    is_short = starts.diff() * key_blocks <= _MANY * indices.numel()
    return is_short.to(torch.int8).argsort(stable=True).int(), starts, (order // width).int()


def forward_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
    architecture: str | None = None,
) -> Launch:
    """Launch of the forward kernel, which writes ``output`` and ``lse``."""
    constants, tile = _cut("forward", query, key, valid, indices, causal, architecture)
    arguments = {
        **{"query": query, "key": key, "value": value, "valid": valid, "bias": bias},
        **{"indices": indices, "counts": counts, "output": output, "lse": lse},
        **{"width": indices.shape[1], "scale": scale * LOG2E},
    }
    grid = (query.shape[0] // constants["BLOCK_M"],)
    return Launch(listed_forward_kernel, grid, arguments | constants, tile.warps, tile.stages)


def dq_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    output: torch.Tensor,
    output_gradient: torch.Tensor,
    lse: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    dq: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    causal: bool,
    architecture: str | None = None,
) -> Launch:
    """Launch of the kernel that writes ``dq``, and ``shift`` and ``delta`` (Rq,) float32 for the next one."""
    constants, tile = _cut("dq", query, key, valid, indices, causal, architecture)
    arguments = {
        **{"query": query, "key": key, "value": value, "valid": valid, "bias": bias},
        **{"indices": indices, "counts": counts, "output": output, "output_gradient": output_gradient},
        **{"lse": lse, "lse_gradient": lse_gradient, "dq": dq, "shift": shift, "delta": delta},
        **{"width": indices.shape[1], "scale": scale * LOG2E},
    }
    grid = (query.shape[0] // constants["BLOCK_M"],)
    return Launch(listed_dq_kernel, grid, arguments | constants, tile.warps, tile.stages)


def dkv_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    transposed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output_gradient: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    causal: bool,
    architecture: str | None = None,
) -> Launch:
    """Launch of the kernel that writes ``dk`` and ``dv``."""
    constants, tile = _cut("dkv", query, key, valid, indices, causal, architecture)
    turns, starts, queries = transposed
    arguments = {
        **{"query": query, "key": key, "value": value, "valid": valid, "bias": bias},
        **{"turns": turns, "starts": starts, "queries": queries, "output_gradient": output_gradient},
        **{"shift": shift, "delta": delta, "dk": dk, "dv": dv, "scale": scale * LOG2E},
    }
    grid = (key.shape[0] // constants["BLOCK_N"],)
    return Launch(listed_dkv_kernel, grid, arguments | constants, tile.warps, tile.stages)


def _cut(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    valid: torch.Tensor,
    indices: torch.Tensor,
    causal: bool,
    architecture: str | None,
) -> tuple[dict[str, Any], Tile]:
    """Compile-time constants of a kernel, and the entry of the table that they come from."""
    architecture = architecture or architecture_of(query.device)
    head_dim = query.shape[1]
    query_rows, key_rows = query.shape[0] // indices.shape[0], key.shape[0] // valid.shape[0]
    if query_rows > 64 and kernel == "forward":
        kernel = "forward of 128"
    tile = tile_for(TILES[kernel], architecture, query)
    return {
        **{"HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim), "QUERY_ROWS": query_rows, "KEY_ROWS": key_rows},
        **{"BLOCK_M": min(query_rows, tile.queries), "BLOCK_N": min(key_rows, tile.keys)},
        **{"CAUSAL": causal, "PRECISION": precision_of(query.dtype, architecture)},
    }, tile


def listed_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the rows of each block of queries to the keys of the blocks that its list names.

    Args:
        query: (Rq, D), Tq blocks of Rq / Tq rows, one or two times the Rk / Tk rows of a block of keys; 16 or more, a
            power of two.
        key, value: (Rk, D), Tk blocks.
        valid: int32 (Tk,), how many rows of each block of keys hold a token; those come first.
        bias: float32 (Rk,), added to the logits of each key: the log of its weight, -inf for one that does not count.
            Where given, ``valid`` is not looked at.
        indices: int32 (Tq, n), numbers of blocks of keys on the flat axis, n at least 1.
        counts: int32 (Tq,), how many entries of each list count; those come first. The others may hold anything.
        scale: of the logits, positive.
        causal: Also hide keys whose row is beyond the query's, both on the same flat axis.

    Returns:
        Output (Rq, D) in the type of the query and log-sum-exp float32 (Rq,), natural; 0 and EMPTY for a row that
        attends to nothing.

    Raises:
        ValueError: D is more than 256.
    """
    output = allocate(query.shape, query.dtype, query.device)
    lse = allocate(query.shape[:1], torch.float32, query.device)
    forward_launch(query, key, value, valid, bias, indices, counts, output, lse, scale, causal).run()
    return output, lse


def listed_backward(
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query (Rq, D), key and value (Rk, D), in their types; the same bits for the same inputs.

    Args:
        output_gradient: (Rq, D), of the output.
        lse_gradient: float32 (Rq,), of the log-sum-exp; None is 0.
        output, lse: what ``listed_forward`` returned.

    The other arguments are those of ``listed_forward``.
    """
    dq, dk, dv = (allocate(x.shape, x.dtype, x.device) for x in (query, key, value))
    shift, delta = (allocate(lse.shape, torch.float32, lse.device) for _ in range(2))
    lists = query, key, value, valid, bias, indices
    dq_launch(*lists, counts, output, output_gradient, lse, lse_gradient, dq, shift, delta, scale, causal).run()
    transposed = transpose_lists(indices, counts, valid.shape[0])
    dkv_launch(*lists, transposed, output_gradient, shift, delta, dk, dv, scale, causal).run()
    return dq, dk, dv
