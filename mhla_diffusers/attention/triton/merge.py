"""Listed and pooled keys under one denominator, with what is read from mixed states, in sequence order; β and γ.

With σ the far share of the common denominator and M the mixed states of a query's block,

    o = (1 - σ) near + σ (far + γ scale q M)
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import layout_of
from ..precision import product
from ..sparse import best_weights, fitting_rows
from .operators import allocate, differentiable, operator, padded
from .prepare import GRID
from .softmax import load_rows, store_rows
from .tiles import constants_of, tile_of

_AT_ONCE = 64
"""Queries whose mixed states are multiplied at once."""


@triton.jit(do_not_specialize=["tokens", "heads", "rows", "query_blocks"])
def merge_kernel(
    near,
    near_lse,
    far,
    far_lse,
    query,
    mixed,
    state_weight,
    order,
    tokens,
    heads,
    rows,
    query_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    output=None,
    output_gradient=None,
    near_gradient=None,
    near_lse_gradient=None,
    far_gradient=None,
    far_lse_gradient=None,
    read_gradient=None,
):
    """Output of BLOCK_M rows of one block of queries of one head; or, given its gradient, those of what is merged, 0 of
    padding, and of what is read from the states.
    """
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(order + row)
    at = group * rows + row
    total = load_rows(far, at, None, HEAD_DIM).to(tl.float32)
    if mixed is not None:
        mixed += (group * query_blocks + tl.program_id(0) * BLOCK_M // QUERY_ROWS) * HEAD_DIM * HEAD_DIM
        read = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
        for first in range(0, HEAD_DIM, BLOCK_N):
            own = first + tl.arange(0, BLOCK_N)
            inside = own < HEAD_DIM
            q = tl.load(query + at[:, None] * HEAD_DIM + own[None, :], mask=inside[None, :], other=0.0)
            state = load_rows(mixed, own, inside, HEAD_DIM)
            read = tl.dot(q.to(state.dtype), state, read, input_precision=PRECISION)
        slope = tl.load(state_weight + group) * scale
        total += slope * read
    share = tl.sigmoid(tl.load(near_lse + at) - tl.load(far_lse + at))
    listed = load_rows(near, at, None, HEAD_DIM).to(tl.float32)
    place = (group // heads * tokens + token) * heads + group % heads
    if output_gradient is None:
        merged = share[:, None] * listed + (1 - share)[:, None] * total
        store_rows(output, place, token >= 0, merged, HEAD_DIM)
    else:
        upstream = load_rows(output_gradient, place, token >= 0, HEAD_DIM).to(tl.float32)
        of_lse = share * (1 - share) * tl.sum(upstream * (listed - total), 1)
        tl.store(near_lse_gradient + at, of_lse)
        tl.store(far_lse_gradient + at, -of_lse)
        store_rows(near_gradient, at, None, share[:, None] * upstream, HEAD_DIM)
        of_far = (1 - share)[:, None] * upstream
        store_rows(far_gradient, at, None, of_far, HEAD_DIM)
        if mixed is not None:
            store_rows(read_gradient, at, None, slope * of_far, HEAD_DIM)


_INPUTS = (
    "Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, Tensor? query, Tensor? mixed, Tensor? state_weight, "
    "float scale, SymInt[] grid, SymInt block_size, SymInt heads"
)


_TENSORS = "near", "near_lse", "far", "far_lse", "query", "mixed", "state_weight"


def _launch(inputs: tuple[Any, ...], **outputs: Any) -> None:
    near, *_, scale, grid, block_size, heads = inputs
    rows = near.shape[1]
    tile = tile_of("merge", near, block_size)
    merge_kernel[rows // tile.m, len(near)](
        order=layout_of(tuple(grid), block_size, 0, near.device).order,
        tokens=math.prod(grid),
        heads=heads,
        rows=rows,
        query_blocks=rows // block_size,
        scale=scale,
        QUERY_ROWS=block_size,
        **dict(zip(_TENSORS, inputs[:7], strict=True)),
        **constants_of(near),
        **tile.arguments,
        **outputs,
    )


def _output(near, *inputs: Any) -> torch.Tensor:
    """Allocate what :func:`merge` returns."""
    *_, grid, _, heads = inputs
    return allocate((near.shape[0] // heads, math.prod(list(grid)), heads, near.shape[2]), near.dtype, near.device)


@operator(f"({_INPUTS}) -> Tensor")
def merge(*inputs: Any):
    """Add two outputs under the sum of their denominators: (B, N, H, D) of the grid's tokens.

    ``near``, ``far`` and ``query`` are rows (B H, R, D) of blocks of queries, the LSE natural, float32 (B H, R). Mixed
    states (B H, Tq, D, D) come with query and γ, float32 (B H,); without them all three are None.
    """
    output = _output(*inputs)
    _launch(inputs, output=output)
    return output


@operator(f"(Tensor output_gradient, {_INPUTS}) -> Tensor[]")
def merge_backward(output_gradient, *inputs: Any):
    """Gradients of both outputs and LSE, and with mixed states of query and states."""
    query, mixed, block_size = inputs[4], inputs[5], inputs[9]
    found = [allocate(x.shape, x.dtype, x.device) for x in inputs[:4]]
    gradients = {f"{name}_gradient": x for name, x in zip(_TENSORS[:4], found, strict=True)}
    read = None if mixed is None else allocate(query.shape, mixed.dtype, query.device)
    _launch(inputs, output_gradient=output_gradient, read_gradient=read, **gradients)
    if read is not None:
        read, q = (x.unflatten(1, (-1, block_size)).to(mixed.dtype) for x in (read, query))
        found += [product(read, mixed.mT).flatten(1, 2).to(query.dtype), product(q.mT, read)]
    return found


merge.register_fake(_output)
differentiable(merge, merge_backward, 6)


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, "
    f"Tensor? mixed, float scale, {GRID}) -> (Tensor, Tensor)"
)
def fit(query, key, value, bias, near, near_lse, far, far_lse, mixed, scale, grid, block_size, extra):
    """β and γ with which sparse attention comes closest to softmax attention on some queries: float32 (G,) each.

    The queries are those of :func:`mhla_diffusers.attention.sparse.fitting_rows`; ``near`` is what
    :func:`.listed.listed` returns for the same query, key, value and bias, ``far`` what :func:`.pooled.pooled` does,
    and ``mixed`` (G, Tq, D, D) the mixed states of the query blocks, None without them, whose γ is 0 then.
    """
    layout, some = layout_of(tuple(grid), block_size, extra, query.device), fitting_rows(math.prod(grid), query.device)
    if bias is None and len(layout.order) != len(layout.rows):  # padding is left out
        bias = (layout.order >= 0).float().log()[None]
    mask = None if bias is None else bias[:, None, None].to(query.dtype)
    q, k, v = (x[:, None] for x in (query[:, some], key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    of_states: torch.Tensor | None = None
    if mixed is not None:
        block_size = query.shape[1] // mixed.shape[1]
        parts = (  # some at a time, as each has a state of its own
            query[:, rows, None].float() @ mixed[:, rows // block_size].float() for rows in some.split(_AT_ONCE)
        )
        of_states = scale * torch.cat(list(parts), dim=1)[:, :, 0]
    near, far = near[:, some].float(), far[:, some].float()
    return best_weights(truth.flatten(0, 1).float(), near, near_lse[:, some], far, far_lse[:, some], of_states)


@fit.register_fake
def _(query, *_: Any):
    return tuple(query.new_empty(query.shape[:1], dtype=torch.float32) for _ in range(2))
