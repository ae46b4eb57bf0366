"""What queries read from the mixed states of their blocks.

With f = φ(q), S and z the mixed KV state and normaliser state of the query's block, the output is fᵀS / fᵀz, or fᵀS to
leave it as it is; then come output norm and gate. A gradient g of the quotient o gives ∂(fᵀS) = g / fᵀz and ∂(fᵀz) =
-(g · o) / fᵀz for every query, which the kernel of :mod:`.states` adds up to gradients of the mixed states.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from ..precision import OUTPUT_NORM_EPS
from .features import (
    PLACE,
    SIZES,
    Tables,
    load_tile,
    load_tokens,
    read_state,
    rows_like,
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
    output_norm,
    gate,
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
    norm_eps,
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
    norm_gradients=None,
    gate_gradient=None,
    gradient_batch=0,
    gradient_token=0,
    gradient_head=0,
):
    """Output of one tile of the queries of one block; or, given its gradient, those of all that it is made of."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    d = tl.arange(0, padded(HEAD_DIM))
    norm_gradient = tl.zeros((padded(HEAD_DIM),), tl.float32)
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
        if output_norm is not None:
            weight = tl.load(output_norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + norm_eps)
        if output_gradient is None:
            if normalisers is not None:
                tl.store(normalisers + here, normaliser, mask=there)
            if output_norm is not None:
                values = values * root[:, None] * weight[None, :]
            if gate is not None:
                gates = load_tile(gate + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
                values *= gates * tl.sigmoid(gates)
            store_tile(output + here * HEAD_DIM, there, d, values, HEAD_DIM)
        else:
            gradient = load_tile(output_gradient + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            if gate is not None:
                gates = load_tile(gate + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
                sigmoid = tl.sigmoid(gates)
                of_gate = gradient * values * sigmoid * (1.0 + gates * (1.0 - sigmoid))
                if output_norm is not None:
                    of_gate *= root[:, None] * weight[None, :]
                store_tile(gate_gradient + here * HEAD_DIM, there, d, of_gate, HEAD_DIM)
                gradient *= gates * sigmoid
            if output_norm is not None:
                norm_gradient = tl.sum(gradient * values * root[:, None], 0)
                gradient *= weight[None, :]
                along = tl.sum(gradient * values, 1) / HEAD_DIM
                gradient = root[:, None] * (gradient - (root * root * along)[:, None] * values)
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
    if norm_gradients is not None:
        program = (whole * tl.num_programs(1) + tl.program_id(1)) * blocks + block
        tl.store(norm_gradients + program * HEAD_DIM + d, norm_gradient, mask=d < HEAD_DIM)


_INPUTS = f"Tensor query, Tensor states, Tensor? sums, Tensor? output_norm, Tensor? gate, Tensor? angles, {PLACE}"


def _launch(kernel: str, query, states, sums, output_norm, gate, angles, *settings: Any) -> tuple[Tables, Any, Any]:
    """Tables, programs and arguments of a forward ("read") or backward pass ("query_gradient")."""
    *place, feature_map, eps, rope_before = settings
    _, tables = tables_of(query, *place)
    tile = tables.tile_of(kernel, query)
    programs = len(query) * query.shape[2], triton.cdiv(tables.longest, tile.m), tables.blocks
    inputs = {"query": query, "states": states, "sums": sums, "output_norm": output_norm, "gate": gate}
    shared = shared_arguments(query, tables, angles, feature_map, eps, rope_before)
    return tables, programs, inputs | shared | tile.arguments | {"norm_eps": OUTPUT_NORM_EPS}


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def read_states(*inputs: Any):
    """What the queries read from the mixed states of their blocks.

    The query is (B, N, H, D) of any strides but the last; states (B, H, M, D, D) and normaliser states float32
    (B, H, M, D), if any, are mixed and of the blocks that its tokens may lie in; all but the query is contiguous.

    Returns:
        Output (B, N, H, D), contiguous; and normaliser fᵀz, float32 (B, N, H, 1), empty without.
    """
    query, _, sums, *_ = inputs
    _, programs, arguments = _launch("read", *inputs)
    output = allocate(query.shape, query.dtype, query.device)
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
    """Gradients of query, states, sums, norm and gate; None for those that were not given."""
    query, states, sums, norm, gate, angles, *_, feature_map, eps, rope_before = inputs
    tables, programs, arguments = _launch("query_gradient", *inputs)
    query_gradient, product_gradient = rows_like(query, query.dtype), rows_like(query, states.dtype)

    def float32(wanted: bool, *shape: int) -> torch.Tensor | None:
        return allocate(shape, torch.float32, query.device) if wanted else None

    sum_weight = float32(sums is not None, programs[0], query.shape[1])
    norm_gradients = float32(norm is not None, *programs, query.shape[3])
    gate_gradient = None if gate is None else allocate(gate.shape, gate.dtype, gate.device)
    read_kernel[programs](
        output_gradient=output_gradient,
        normaliser_gradient=None if sums is None else normaliser_gradient,
        query_gradient=query_gradient,
        product_gradient=product_gradient,
        sum_weight=sum_weight,
        norm_gradients=norm_gradients,
        gate_gradient=gate_gradient,
        **strides_of(query=query, gradient=query_gradient),
        **arguments,
    )
    shared = shared_arguments(query, tables, angles, feature_map, eps, rope_before)
    of_states = sum_states(query, product_gradient, tables, shared, sums is not None, sum_weight=sum_weight)
    of_norm = None if norm_gradients is None else norm_gradients.sum((0, 1, 2)).to(norm.dtype)
    return [x for x in (query_gradient.contiguous(), *of_states, of_norm, gate_gradient) if x is not None]


@read_states.register_fake
def _(query, states, sums, *_: Any):
    normaliser = (0,) if sums is None else (*query.shape[:3], 1)
    return query.new_empty(query.shape), query.new_empty(normaliser, dtype=torch.float32)


differentiable(read_states, read_states_backward, 5)
