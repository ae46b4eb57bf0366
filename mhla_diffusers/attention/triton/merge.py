"""Listed and pooled keys under one denominator, with what is read from mixed states, in sequence order.

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

from ..precision import product
from .operators import allocate, operator, refuse_second_derivative
from .prepare import layout_for
from .softmax import load_rows, store_rows
from .tiles import constants_of, precision_of, tile_of


@triton.jit
def far_of(
    far,
    query,
    mixed,
    state_weight,
    group,
    at,
    block,
    query_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of the pooled keys of some rows of one block, with what they read from mixed states if there are any."""
    total = load_rows(far, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    if mixed is not None:
        read = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        mixed += (group * query_blocks + block) * HEAD_DIM * HEAD_DIM
        for first in range(0, HEAD_DIM, BLOCK_N):
            own = first + tl.arange(0, BLOCK_N)
            inside = own < HEAD_DIM
            q = tl.load(query + at[:, None] * HEAD_DIM + own[None, :], mask=inside[None, :], other=0.0)
            state = load_rows(mixed, own, inside, HEAD_DIM, BLOCK_D)
            read = tl.dot(q.to(state.dtype), state, read, input_precision=PRECISION)
        total += tl.load(state_weight + group) * scale * read
    return total


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
    output,
    tokens,
    heads,
    rows,
    query_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M rows of one block of queries of one head."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(0) * BLOCK_M // QUERY_ROWS
    token = tl.load(order + row)
    at = group * rows + row
    total = far_of(
        far,
        query,
        mixed,
        state_weight,
        group,
        at,
        block,
        query_blocks,
        scale,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        PRECISION,
    )
    share = tl.sigmoid(tl.load(near_lse + at) - tl.load(far_lse + at))[:, None]
    merged = share * load_rows(near, at, None, HEAD_DIM, BLOCK_D).to(tl.float32) + (1 - share) * total
    out = (group // heads * tokens + token) * heads + group % heads
    store_rows(output, out, token >= 0, merged, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "heads", "rows", "query_blocks"])
def merge_backward_kernel(
    output_gradient,
    near,
    near_lse,
    far,
    far_lse,
    query,
    mixed,
    state_weight,
    order,
    near_gradient,
    near_lse_gradient,
    far_gradient,
    far_lse_gradient,
    read_gradient,
    tokens,
    heads,
    rows,
    query_blocks,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_M rows of one block of queries of one head, and of what they read, 0 of padding."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(0) * BLOCK_M // QUERY_ROWS
    token = tl.load(order + row)
    at = group * rows + row
    apart = load_rows(near, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    apart -= far_of(
        far,
        query,
        mixed,
        state_weight,
        group,
        at,
        block,
        query_blocks,
        scale,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        PRECISION,
    )
    share = tl.sigmoid(tl.load(near_lse + at) - tl.load(far_lse + at))
    upstream_at = (group // heads * tokens + token) * heads + group % heads
    upstream = load_rows(output_gradient, upstream_at, token >= 0, HEAD_DIM, BLOCK_D).to(tl.float32)
    of_lse = share * (1 - share) * tl.sum(upstream * apart, 1)
    store_rows(near_gradient, at, None, share[:, None] * upstream, HEAD_DIM, BLOCK_D)
    of_far = (1 - share)[:, None] * upstream
    store_rows(far_gradient, at, None, of_far, HEAD_DIM, BLOCK_D)
    if mixed is not None:
        of_read = tl.load(state_weight + group) * scale * of_far
        store_rows(read_gradient, at, None, of_read, HEAD_DIM, BLOCK_D)
    tl.store(near_lse_gradient + at, of_lse)
    tl.store(far_lse_gradient + at, -of_lse)


_INPUTS = (
    "Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, Tensor query, Tensor? mixed, Tensor? state_weight, "
    "float scale, SymInt[] grid, SymInt block_size, SymInt heads"
)


def _arguments(
    near, near_lse, far, far_lse, query, mixed, state_weight, scale, grid, block_size, heads
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs and arguments of both kernels."""
    order = layout_for(grid, block_size, 0, near.device).order
    rows = near.shape[1]
    tile = tile_of("merge", near, block_size)
    inputs = {"near": near, "near_lse": near_lse, "far": far, "far_lse": far_lse, "query": query}
    inputs |= {"mixed": mixed, "state_weight": state_weight, "order": order, "scale": scale}
    sizes = {"tokens": math.prod(grid), "heads": heads, "rows": rows, "query_blocks": rows // block_size}
    constants = constants_of(near) | {"QUERY_ROWS": block_size}
    if mixed is not None:
        constants["PRECISION"] = precision_of(near)
    return (rows // tile.m, len(near)), inputs | sizes | constants | tile.arguments


@operator(f"({_INPUTS}) -> Tensor")
def merge(*inputs: Any):
    """Add two outputs under the sum of their denominators: (B, N, H, D) of the grid's tokens.

    Args:
        near: (B H, R, D), contiguous, rows of the blocks of the grid.
        near_lse: float32 (B H, R), natural.
        far: like ``near``.
        far_lse: like ``near_lse``.
        query: like ``near``, which reads the mixed states.
        mixed: (B H, Tq, D, D), contiguous, one for every block of queries; None for none.
        state_weight: γ, float32 (B H,); given where ``mixed`` is.
        scale: of the queries.
        grid: token grid.
        block_size: rows of a block of queries, 16 at least.
        heads: H.
    """
    near, *_, grid, _, heads = inputs
    programs, shared = _arguments(*inputs)
    output = allocate((len(near) // heads, math.prod(grid), heads, near.shape[2]), near.dtype, near.device)
    merge_kernel[programs](output=output, **shared)
    return output


@operator(f"(Tensor output_gradient, {_INPUTS}) -> Tensor[]")
def merge_backward(output_gradient, *inputs: Any):
    """Gradients of both outputs, in their types, of their LSE, float32, and with mixed states of query and states."""
    near, near_lse, far, far_lse, query, mixed, *_, block_size, _ = inputs
    programs, shared = _arguments(*inputs)
    named = {"near": near, "near_lse": near_lse, "far": far, "far_lse": far_lse}
    gradients = {f"{name}_gradient": allocate(x.shape, x.dtype, x.device) for name, x in named.items()}
    read = None if mixed is None else allocate(query.shape, mixed.dtype, query.device)
    merge_backward_kernel[programs](output_gradient=output_gradient, read_gradient=read, **gradients, **shared)
    found = list(gradients.values())
    if read is not None:
        read, q = (x.unflatten(1, (-1, block_size)).to(mixed.dtype) for x in (read, query))
        found += [product(read, mixed.mT).flatten(1, 2).to(query.dtype), product(q.mT, read)]
    return found


@merge.register_fake
def _(near, *inputs: Any):
    *_, grid, _, heads = inputs
    return near.new_empty(near.shape[0] // heads, math.prod(list(grid)), heads, near.shape[2])


@merge_backward.register_fake
def _(output_gradient, *inputs: Any):
    mixed = inputs[5]
    return [torch.empty_like(x) for x in inputs[: 4 if mixed is None else 6]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    found = merge_backward(upstream.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return *found, *(None,) * (11 - len(found))


merge.register_autograd(_differentiate, setup_context=_save)
merge_backward.register_autograd(refuse_second_derivative)
