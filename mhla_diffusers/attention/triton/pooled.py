"""Softmax attention of rows of queries to the pooled keys of all blocks that the query's list does not name.

Dense but for a mask of bits: bit c of word w of a block of queries tells that block 32 w + c of keys is listed, so its
pooled key is left out here. The gradients of pooled rows sum over all queries of a group: each program takes a share of
the queries, and the shares are added in a fixed order.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import EMPTY, LOG2E, Launch, allocate, architecture_of, power_of_two, precision_of, processors_of
from .softmax import load_rows, load_upstream, register_branch, softmax_end, softmax_step, store_rows, tile_for

_EMPTY = tl.constexpr(EMPTY)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def load_bits(words, start, blocks):
    """The 32 bits of the blocks around start, as one number for the whole program; set beyond the last block."""
    left = tl.maximum(blocks - start // 32 * 32, 0)
    word = tl.load(words + start // 32, mask=left > 0, other=-1)
    return tl.where(left < 32, word | (-1 << (left & 31)), word)


@triton.jit
def is_listed(words, start, columns, blocks, BLOCK_N: tl.constexpr):
    """Which of the blocks start + columns are left out: the listed ones, and those beyond the last."""
    bits = load_bits(words, start, blocks)
    if BLOCK_N > 32:
        tl.static_assert(BLOCK_N == 64)
        bits = tl.where(columns < 32, bits, load_bits(words, start + 32, blocks))
    return (bits & (1 << ((start + columns) & 31))) != 0


@triton.jit(do_not_specialize=["blocks", "query_blocks", "per_sample", "words_per_row"])
def pooled_forward_kernel(
    query,
    key,
    value,
    bias,
    listed,
    output,
    lse,
    blocks,
    query_blocks,
    per_sample,
    words_per_row,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of BLOCK_M rows of one block of queries."""
    block, group = tl.program_id(0) // (QUERY_ROWS // BLOCK_M), tl.program_id(1)
    first = (group.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    key += group.to(tl.int64) * blocks * HEAD_DIM
    value += group.to(tl.int64) * blocks * HEAD_DIM
    bias += group // per_sample * blocks
    listed += (group.to(tl.int64) * query_blocks + block) * words_per_row
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    top = tl.full((BLOCK_M,), _EMPTY, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, blocks, BLOCK_N):
        there = tl.minimum(start + columns, blocks - 1)
        k = load_rows(key, there, None, HEAD_DIM, BLOCK_D)
        v = load_rows(value, there, None, HEAD_DIM, BLOCK_D)
        b = tl.load(bias + there)
        b = tl.where(is_listed(listed, start, columns, blocks, BLOCK_N), float("-inf"), b)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = tl.fma(b[None, :], _LOG2E / scale, logits)
        top, total, sums = softmax_step(logits, v, top, total, sums, scale, PRECISION)
    out, log_sum = softmax_end(top, total, sums)
    store_rows(output + first * HEAD_DIM, rows, None, out, HEAD_DIM, BLOCK_D)
    tl.store(lse + first + rows, log_sum)


@triton.jit(do_not_specialize=["blocks", "query_blocks", "per_sample", "words_per_row"])
def pooled_dq_kernel(
    query,
    key,
    value,
    bias,
    listed,
    output,
    output_gradient,
    lse,
    lse_gradient,
    dq,
    shift,
    delta,
    blocks,
    query_blocks,
    per_sample,
    words_per_row,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of BLOCK_M rows of queries; and what the gradient of pooled rows needs of each: shift and delta."""
    block, group = tl.program_id(0) // (QUERY_ROWS // BLOCK_M), tl.program_id(1)
    first = (group.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    key += group.to(tl.int64) * blocks * HEAD_DIM
    value += group.to(tl.int64) * blocks * HEAD_DIM
    bias += group // per_sample * blocks
    listed += (group.to(tl.int64) * query_blocks + block) * words_per_row
    do, s, d = load_upstream(output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM, BLOCK_D)
    q = load_rows(query + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, blocks, BLOCK_N):
        there = tl.minimum(start + columns, blocks - 1)
        k = load_rows(key, there, None, HEAD_DIM, BLOCK_D)
        v = load_rows(value, there, None, HEAD_DIM, BLOCK_D)
        b = tl.load(bias + there)
        b = tl.where(is_listed(listed, start, columns, blocks, BLOCK_N), float("-inf"), b)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights = tl.math.exp2(tl.fma(logits, scale, tl.fma(b[None, :], _LOG2E, s[:, None])))
        ds = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])
        gradient = tl.dot(ds.to(k.dtype), k, gradient, input_precision=PRECISION)
    store_rows(dq + first * HEAD_DIM, rows, None, gradient * (scale / _LOG2E), HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["blocks", "query_blocks", "per_sample", "words_per_row", "share"])
def pooled_dkv_kernel(
    query,
    key,
    value,
    bias,
    listed,
    output_gradient,
    shift,
    delta,
    dk,
    dv,
    blocks,
    query_blocks,
    per_sample,
    words_per_row,
    share,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N pooled keys and values from one share of the queries: part of (shares, G, T, D) float32."""
    PARTS: tl.constexpr = QUERY_ROWS // BLOCK_M
    group = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = start + columns < blocks
    there = tl.minimum(start + columns, blocks - 1)
    k = load_rows(key + group * blocks * HEAD_DIM, start + columns, inside, HEAD_DIM, BLOCK_D)
    v = load_rows(value + group * blocks * HEAD_DIM, start + columns, inside, HEAD_DIM, BLOCK_D)
    b = tl.load(bias + group // per_sample * blocks + start + columns, mask=inside, other=float("-inf")) * _LOG2E
    words = listed + group * query_blocks * words_per_row
    first = group * query_blocks * QUERY_ROWS
    key_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = tl.program_id(1) * share
    for i in range(begin * PARTS, tl.minimum(begin + share, query_blocks) * PARTS):
        row = first + i * BLOCK_M
        q = load_rows(query + row * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
        do = load_rows(output_gradient + row * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
        s, d = tl.load(shift + row + rows), tl.load(delta + row + rows)
        bits = tl.load(words + i // PARTS * words_per_row + there // 32)
        left_out = (bits & (1 << (there & 31))) != 0
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        logits = tl.fma(logits, scale, tl.where(left_out, float("-inf"), b)[:, None])
        weights = tl.math.exp2(logits + s[None, :])
        value_gradient = tl.dot(weights.to(do.dtype), do, value_gradient, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - d[None, :])
        key_gradient = tl.dot(ds.to(q.dtype), q, key_gradient, input_precision=PRECISION)
    part = (tl.program_id(1) * tl.num_programs(2) + group) * blocks * HEAD_DIM
    store_rows(dk + part, start + columns, inside, key_gradient * (scale / _LOG2E), HEAD_DIM, BLOCK_D)
    store_rows(dv + part, start + columns, inside, value_gradient, HEAD_DIM, BLOCK_D)


class Inputs(NamedTuple):
    """What all kernels read."""

    query: torch.Tensor
    """(G, R, D), Tq blocks of R / Tq rows, 16 or more, a power of two."""
    key: torch.Tensor
    """(G, T, D), one row per block of keys; ``value`` likewise."""
    value: torch.Tensor
    bias: torch.Tensor
    """float32 (S, T), S a divisor of G, group g reads row g // (G // S): the log of the block's weight, which is its
    number of tokens or the sum of its key mask; -inf where nothing counts."""
    bits: torch.Tensor
    """int32 (G * Tq, ceil(T / 32)): bit c of word w is 1 where key block 32 w + c is listed."""
    scale: float
    """Of the logits, positive."""

    def launch(
        self, name: str, kernel: Any, architecture: str | None, arguments: dict[str, Any], grid: tuple[int, ...] = ()
    ) -> Launch:
        """One kernel with what is its own beside the rows; ``grid`` is that of the query's tiles if left out."""
        groups, rows, head_dim = self.query.shape
        architecture, query_blocks = architecture or architecture_of(self.query.device), len(self.bits) // groups
        tile = tile_for(name, architecture, self.query)
        block_m = min(rows // query_blocks, tile.queries)
        arguments = arguments | {
            **{"query": self.query, "key": self.key, "value": self.value, "bias": self.bias, "listed": self.bits},
            **{"blocks": self.key.shape[1], "query_blocks": query_blocks, "per_sample": groups // len(self.bias)},
            **{"words_per_row": self.bits.shape[1], "scale": self.scale * LOG2E},
            **{"HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim), "QUERY_ROWS": rows // query_blocks},
            **{"BLOCK_M": block_m, "BLOCK_N": tile.keys, "PRECISION": precision_of(self.query.dtype, architecture)},
        }
        return Launch(kernel, grid or (rows // block_m, groups), arguments, tile.warps, tile.stages)


def forward_launch(inputs: Inputs, output: torch.Tensor, lse: torch.Tensor, architecture: str | None = None) -> Launch:
    """The launch that writes ``output`` and ``lse``."""
    return inputs.launch("forward", pooled_forward_kernel, architecture, {"output": output, "lse": lse})


def backward_launches(
    inputs: Inputs,
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    architecture: str | None = None,
) -> tuple[Launch, Launch]:
    """The launches that write ``dq``, and ``dk`` and ``dv``, float32 (shares, G, T, D), which are to be added up.

    So many shares that their programs are at most four to a processor: two at a time, in two rounds.
    """
    query, key = inputs.query, inputs.key
    dq = allocate(query.shape, query.dtype, query.device)
    shift, delta = (allocate(lse.shape, torch.float32, lse.device) for _ in range(2))
    passed = {"output_gradient": output_gradient, "shift": shift, "delta": delta}
    upstream = {"output": output, "lse": lse, "lse_gradient": lse_gradient}
    card = architecture or architecture_of(query.device)
    groups, query_blocks = len(query), len(inputs.bits) // len(query)
    tiles = -(-key.shape[1] // tile_for("dkv", card, query).keys)
    shares = max(1, min(4 * processors_of(query.device, card) // (tiles * groups), query_blocks))
    share = -(-query_blocks // shares)
    shares = -(-query_blocks // share)
    parts = allocate((2, shares, *key.shape), torch.float32, query.device)
    by_key = {"share": share, "dk": parts[0], "dv": parts[1]}
    return (
        inputs.launch("dq", pooled_dq_kernel, architecture, {"dq": dq, **passed, **upstream}),
        inputs.launch("dkv", pooled_dkv_kernel, architecture, {**passed, **by_key}, (tiles, shares, groups)),
    )


_SCHEMA = "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor bits, float scale"


@torch.library.custom_op("mhla_diffusers::pooled", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def pooled(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row to the pooled keys of all blocks that its block of queries does not list.

    Takes what :class:`Inputs` holds.

    Returns:
        Output (G, R, D) in the type of the query and log-sum-exp float32 (G, R), natural; 0 and EMPTY for a row that
        attends to nothing.

    Raises:
        ValueError: D is more than 256.
    """
    given = Inputs(*inputs)
    output = allocate(given.query.shape, given.query.dtype, given.query.device)
    lse = allocate(given.query.shape[:2], torch.float32, given.query.device)
    forward_launch(given, output, lse).run()
    return output, lse


@torch.library.custom_op(
    "mhla_diffusers::pooled_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor lse, {_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor)",
)
def pooled_gradients(
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, in their types; the same bits for the same inputs."""
    given = Inputs(*inputs)
    by_query, by_key = backward_launches(given, output_gradient, lse_gradient, output, lse)
    by_query.run()
    by_key.run()
    # sums are of their own memory, as a custom operator must return
    dk, dv = (by_key.arguments[name].sum(0).to(given.key.dtype) for name in ("dk", "dv"))
    return by_query.arguments["dq"], dk, dv


register_branch(pooled, pooled_gradients)
