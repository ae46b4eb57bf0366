"""Softmax attention of blocks of queries to the keys of the blocks that their lists name.

Queries are rows (Rq, D), cut into Tq blocks; keys and values are rows (Rk, D), cut into Tk blocks, and both axes are
flat: samples and heads follow each other, and a list tells which they meet. All lists are n long, and a count tells how
many entries are real. The gradient of the keys walks through transposed lists, so that no sum is shared by two programs
and the same inputs give the same bits.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import EMPTY, LOG2E, Launch, allocate, architecture_of, power_of_two, precision_of
from .prepare import layout_for
from .softmax import load_rows, load_upstream, register_branch, softmax_end, softmax_step, store_rows, tile_for

_EMPTY = tl.constexpr(EMPTY)
_LOG2E = tl.constexpr(LOG2E)
_MANY = 4
"""Times the mean length of the transposed lists: longer ones are walked first."""


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


class Inputs(NamedTuple):
    """What all kernels read, on flat axes."""

    query: torch.Tensor
    """(Rq, D), Tq blocks of Rq / Tq rows, one or two times the Rk / Tk rows of a block of keys; 16 or more, a power of
    two."""
    key: torch.Tensor
    """(Rk, D), Tk blocks; ``value`` likewise."""
    value: torch.Tensor
    valid: torch.Tensor
    """int32 (Tk,), how many rows of each block of keys hold a token; those come first."""
    bias: torch.Tensor | None
    """float32 (Rk,), added to the logits of each key: the log of its weight, -inf for one that does not count. Where
    given, ``valid`` is not looked at."""
    indices: torch.Tensor
    """int32 (Tq, n), numbers of blocks of keys on the flat axis, n at least 1."""
    counts: torch.Tensor
    """int32 (Tq,), how many entries of each list count; those come first, the others may hold anything."""
    scale: float
    """Of the logits, positive."""
    causal: bool = False
    """Also hide keys whose row is beyond the query's, both on the same flat axis."""

    def launch(self, name: str, kernel: Any, architecture: str | None, arguments: dict[str, Any]) -> Launch:
        """One kernel with what is its own beside the rows."""
        query, key, architecture = self.query, self.key, architecture or architecture_of(self.query.device)
        query_rows, key_rows = len(query) // len(self.indices), len(key) // len(self.valid)
        if query_rows > 64 and name == "forward":
            name = "forward of 128"
        tile, head_dim = tile_for(name, architecture, query), query.shape[1]
        block_m, block_n = min(query_rows, tile.queries), min(key_rows, tile.keys)
        arguments = arguments | {
            **{"query": query, "key": key, "value": self.value, "valid": self.valid, "bias": self.bias},
            **{"scale": self.scale * LOG2E, "HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim)},
            **{"QUERY_ROWS": query_rows, "KEY_ROWS": key_rows, "BLOCK_M": block_m, "BLOCK_N": block_n},
            **{"CAUSAL": self.causal, "PRECISION": precision_of(query.dtype, architecture)},
        }
        programs = len(key) // block_n if name == "dkv" else len(query) // block_m
        return Launch(kernel, (programs,), arguments, tile.warps, tile.stages)

    @property
    def lists(self) -> dict[str, Any]:
        """Arguments of the kernels that walk the lists of queries."""
        return {"indices": self.indices, "counts": self.counts, "width": self.indices.shape[1]}


def forward_launch(inputs: Inputs, output: torch.Tensor, lse: torch.Tensor, architecture: str | None = None) -> Launch:
    """The launch that writes ``output`` and ``lse``."""
    arguments = {"output": output, "lse": lse, **inputs.lists}
    return inputs.launch("forward", listed_forward_kernel, architecture, arguments)


def backward_launches(
    inputs: Inputs,
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    transposed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    architecture: str | None = None,
) -> tuple[Launch, Launch]:
    """The launches that write ``dq``, and ``dk`` and ``dv``; ``transposed`` is of :func:`transpose_lists`."""
    query, key, value = inputs[:3]
    dq, dk, dv = (allocate(x.shape, x.dtype, x.device) for x in (query, key, value))
    shift, delta = (allocate(lse.shape, torch.float32, lse.device) for _ in range(2))
    passed = {"output_gradient": output_gradient, "shift": shift, "delta": delta}
    upstream = {"output": output, "lse": lse, "lse_gradient": lse_gradient}
    turns, starts, queries = transposed
    by_key = {"turns": turns, "starts": starts, "queries": queries, "dk": dk, "dv": dv}
    return (
        inputs.launch("dq", listed_dq_kernel, architecture, {"dq": dq, **passed, **upstream, **inputs.lists}),
        inputs.launch("dkv", listed_dkv_kernel, architecture, {**passed, **by_key}),
    )


def listed_forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the rows of each block of queries to the keys of the blocks that its list names.

    Returns:
        Output (Rq, D) in the type of the query and log-sum-exp float32 (Rq,), natural; 0 and EMPTY for a row that
        attends to nothing.

    Raises:
        ValueError: D is more than 256.
    """
    query = inputs.query
    output = allocate(query.shape, query.dtype, query.device)
    lse = allocate(query.shape[:1], torch.float32, query.device)
    forward_launch(inputs, output, lse).run()
    return output, lse


def listed_backward(
    inputs: Inputs,
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, in their types; the same bits for the same inputs."""
    transposed = transpose_lists(inputs.indices, inputs.counts, len(inputs.valid))
    by_query, by_key = backward_launches(inputs, output_gradient, lse_gradient, output, lse, transposed)
    by_query.run()
    by_key.run()
    return by_query.arguments["dq"], by_key.arguments["dk"], by_key.arguments["dv"]


_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor indices, Tensor counts, float scale, "
    "SymInt[] grid, SymInt block_size, SymInt extra, bool causal"
)


@torch.library.custom_op("mhla_diffusers::listed", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def listed(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the keys of listed blocks: output (G, Q, D) and LSE (G, Q).

    Args:
        query: (G, Q, D), Tq blocks of rows; then key and value (G, R, D); ``bias`` (B, R), log of the weight of every
            key, None for 1; ``indices`` int32 (G Tq, n), on the flat axis of all key blocks; ``counts`` int32 (G Tq,);
            the scale of logits; token grid, rows of a block and number of extra tokens; and ``causal``, to also hide
            keys whose row is beyond the query's, of queries that have all rows.
    """
    output, lse = listed_forward(_flat(query, *others))
    return output.view(query.shape), lse.view(query.shape[:2])


@torch.library.custom_op(
    "mhla_diffusers::listed_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor lse, {_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor)",
)
def listed_gradients(
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, given the inputs of :func:`listed`."""
    lse_gradient = None if lse_gradient is None else lse_gradient.flatten()
    upstream = output_gradient.flatten(0, 1), lse_gradient, output.flatten(0, 1), lse.flatten()
    found = listed_backward(_flat(*inputs), *upstream)
    return tuple(x.view(like.shape) for x, like in zip(found, inputs[:3], strict=True))


def _flat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    grid: Sequence[int],
    block_size: int,
    extra: int,
    causal: bool,
) -> Inputs:
    groups = len(query)
    valid = layout_for(grid, block_size, extra, query.device).valid.repeat(groups)
    if bias is not None:
        bias = bias.repeat_interleave(groups // len(bias), dim=0).flatten()
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    return Inputs(query, key, value, valid, bias, indices, counts, scale, causal)


register_branch(listed, listed_gradients)
