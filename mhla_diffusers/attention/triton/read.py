"""Queries read the mixed states of their blocks.

With f = φ(q), S and z the mixed KV state and normaliser state of the query's block, the output is fᵀS / fᵀz, or fᵀS to
leave it as it is. A gradient g of the quotient o gives ∂(fᵀS) = g / fᵀz and ∂(fᵀz) =
-(g · o) / fᵀz for every query, which the kernel of :mod:`.states` adds up to gradients of the mixed states.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from .features import (
    PLACE,
    SIZES,
    Tables,
    load_tile,
    load_tokens,
    read_state,
    shared_arguments,
    store_input_gradient,
    store_tile,
    strides_of,
    tables_of,
)
from .operators import allocate, differentiable, operator, padded
from .states import sum_states


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    query,
    states,
    sums,
    members,
    starts,
    angles,
    heads,
    tokens,
    blocks,
    query_batch,
    query_token,
    query_head,
    angle_tokens,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    output=None,
    normalisers=None,
    output_gradient=None,
    normaliser_gradient=None,
    query_gradient=None,
    product_gradient=None,
    sum_weight=None,
    gradient_batch=0,
    gradient_token=0,
    gradient_head=0,
):
    """Output of one tile of the queries of one block; or, given its gradient, those of all that it is made of."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    d = tl.arange(0, padded(HEAD_DIM))
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        query += (batch * query_batch + head * query_head) * ALIGNMENT
        if angles is not None:
            angles += batch * angle_tokens * HEAD_DIM
        index, token, source = load_tokens(
            members, query, angles, begin, end, query_token * ALIGNMENT, eps, HEAD_DIM, BLOCK_M
        )
        there, base = source.there, whole * blocks + block
        product, normaliser = read_state(source, states, sums, base, HEAD_DIM, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)
        slope = 1.0 / normaliser
        values = product if sums is None else product * slope[:, None]
        here = (batch * tokens + token) * heads + head
        if output_gradient is None:
            if normalisers is not None:
                tl.store(normalisers + here, normaliser, mask=there)
            store_tile(output + here * HEAD_DIM, there, d, values, HEAD_DIM)
        else:
            gradient = load_tile(output_gradient + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            of_normaliser = normaliser
            if sums is not None:
                of_normaliser = tl.load(normaliser_gradient + here, mask=there, other=0.0)
                of_normaliser -= slope * tl.sum(gradient * values, 1)
                tl.store(sum_weight + whole * tokens + index, of_normaliser, mask=there)
                gradient *= slope[:, None]
            gradient = gradient.to(states.dtype.element_ty)
            out = (batch * gradient_batch + head * gradient_head + token * gradient_token) * ALIGNMENT
            store_tile(product_gradient + out, there, d, gradient, HEAD_DIM)
            tile = (query_gradient + out, source, gradient, of_normaliser, states, sums, base)
            store_input_gradient(*tile, HEAD_DIM, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)


_INPUTS = f"Tensor query, Tensor states, Tensor? sums, Tensor? angles, {PLACE}, bool in_float32"


def _launch(kernel: str, query, states, sums, angles, *settings: Any) -> tuple[Tables, Any, Any]:
    """Tables, programs and arguments of a forward ("read") or backward pass ("query_gradient")."""
    *place, feature_map, eps, rope_before, _ = settings
    _, tables = tables_of(query, *place)
    tile = tables.tile_of(kernel, query)
    programs = len(query) * query.shape[2], triton.cdiv(tables.longest, tile.m), tables.blocks
    inputs = {"query": query, "states": states, "sums": sums}
    shared = shared_arguments(query, tables, angles, feature_map, eps, rope_before)
    return tables, programs, inputs | shared | tile.arguments


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def read_states(*inputs: Any):
    """Read the mixed states of each query's block.

    The query is (B, N, H, D) of any strides but the last; states (B, H, M, D, D) and normaliser states float32
    (B, H, M, D), if any, are mixed and of the blocks that its tokens may lie in; all but the query is contiguous.

    Returns:
        Output (B, N, H, D), contiguous, in the type of the query or ``in_float32``; and normaliser fᵀz, float32
        (B, N, H, 1), empty without.
    """
    query, _, sums, *_, in_float32 = inputs
    _, programs, arguments = _launch("read", *inputs)
    output = allocate(query.shape, torch.float32 if in_float32 else query.dtype, query.device)
    normalisers = allocate((0,) if sums is None else (*query.shape[:3], 1), torch.float32, query.device)
    read_kernel[programs](
        output=output,
        normalisers=None if sums is None else normalisers,
        **strides_of(query=query),
        **arguments,
    )
    return output, normalisers


@operator(f"(Tensor output_gradient, Tensor normaliser_gradient, {_INPUTS}) -> Tensor[]")
def read_states_backward(output_gradient, normaliser_gradient, *inputs: Any):
    """Gradients of query, states and any sums."""
    query, states, sums, angles, *_, feature_map, eps, rope_before, _ = inputs
    tables, programs, arguments = _launch("query_gradient", *inputs)
    query_gradient, product_gradient = (
        allocate(query.shape, dtype, query.device) for dtype in (query.dtype, states.dtype)
    )
    sum_weight: torch.Tensor | None = None
    if sums is not None:
        sum_weight = allocate((programs[0], query.shape[1]), torch.float32, query.device)
    read_kernel[programs](
        output_gradient=output_gradient,
        normaliser_gradient=None if sums is None else normaliser_gradient,
        query_gradient=query_gradient,
        product_gradient=product_gradient,
        sum_weight=sum_weight,
        **strides_of(query=query, gradient=query_gradient),
        **arguments,
    )
    shared = shared_arguments(query, tables, angles, feature_map, eps, rope_before)
    of_states = sum_states(query, product_gradient, tables, shared, sums is not None, sum_weight=sum_weight)
    return [x for x in (query_gradient, *of_states) if x is not None]


@read_states.register_fake
def _(query, states, sums, *settings: Any):
    normaliser = (0,) if sums is None else (*query.shape[:3], 1)
    dtype = torch.float32 if settings[-1] else query.dtype
    return query.new_empty(query.shape, dtype=dtype), query.new_empty(normaliser, dtype=torch.float32)


differentiable(read_states, read_states_backward, 3)
