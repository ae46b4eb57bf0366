"""The three kernels of the backward pass.

With f = φ(q), S and z the mixed summary and key sum of the query's block, n = fᵀS, d = fᵀz, u = n / d, the output is
u · r · w · SiLU(g), where r = 1 / sqrt(mean(u²) + ε) and w belong to the output norm, g to the gate. Nothing of it is
kept from the forward pass; the query kernel leaves three numbers per token, so that the kernel after it can form the
gradient of some columns of n by themselves: ∂n = slope · (∂o · SiLU(g) · w) − shrink · n, and ∂d.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from .arguments import Source
from .features import load_features, softmax_scale
from .forward_kernels import output_norm_weight, token_weight
from .state import read_state, store_source_gradient
from .tile import (
    accurate_dot,
    block_box,
    end_tile,
    first_tile,
    load_rows,
    load_state,
    numbers_of,
    plain_layout,
    state_of,
    store_part,
    store_rows,
    this_program,
    tile_of,
    tokens_in,
)

SLOPE, SHRINK, NORMALISER_GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def token_numbers_at(pointer, which: tl.constexpr, tile, layout):
    """Addresses of one of the three numbers per token in a contiguous (B, H, 3, N)."""
    return pointer + ((tile.batch * layout.heads + tile.head) * 3 + which) * tokens_in(layout) + tile.tokens


@triton.jit
def query_gradient_kernel(
    query,
    angles,
    mixed,
    output_norm,
    output_gate,
    output_gradient,
    of_normalisers,
    query_gradient,
    gate_gradient,
    norm_gradients,
    token_numbers,
    layout,
    eps,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of query, gate and (one row per program) norm weight, and the three numbers per token.

    The normaliser may have a gradient of its own, where it was an output too.
    """
    layout = plain_layout(layout)
    source = Source(query, angles, layout, eps)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    state = state_of(mixed, program, layout, HEAD_DIM, NORMALIZE)
    held = load_state(state, tl.arange(0, BLOCK_C), channels, HEAD_DIM)
    norm_gradient = tl.zeros((BLOCK_D,), tl.float32)
    for index in range(first_tile(program, box, layout, BLOCK_T), end_tile(program, box, layout, BLOCK_T)):
        tile = tile_of(program, index, box, layout, BLOCK_T)
        scale = softmax_scale(source, tile, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        values, normaliser = read_state(
            source,
            scale,
            tile,
            state,
            held,
            channels,
            HEAD_DIM,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            NORMALIZE,
            PRECISION,
        )
        slope = 1.0 / normaliser
        values = values * slope[:, None]
        gradient = load_rows(output_gradient, tile, channels, HEAD_DIM)
        root = tl.full(slope.shape, 1.0, tl.float32)
        if output_norm is not None:
            root = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + norm_eps)
        if output_gate is not None:
            gate = load_rows(output_gate, tile, channels, HEAD_DIM)
            sigmoid = tl.sigmoid(gate)
            ungated = values * root[:, None]
            if output_norm is not None:
                ungated *= output_norm_weight(output_norm, BLOCK_D, HEAD_DIM)[None, :]
            slope_of_gate = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            store_rows(gate_gradient, gradient * ungated * slope_of_gate, tile, channels, layout, HEAD_DIM)
            gradient *= gate * sigmoid
        shrink = tl.zeros_like(slope)
        if output_norm is not None:
            norm_gradient += tl.sum(gradient * values * root[:, None], axis=0)
            gradient *= output_norm_weight(output_norm, BLOCK_D, HEAD_DIM)[None, :]
            shrink = root * root * root * tl.sum(gradient * values, axis=1) / HEAD_DIM
            gradient = root[:, None] * gradient - shrink[:, None] * values
        normaliser_gradient = -slope * tl.sum(gradient * values, axis=1)
        if of_normalisers is not None:
            normaliser_gradient += tl.load(numbers_of(of_normalisers, tile), mask=tile.exists, other=0.0)
        gradient *= slope[:, None]
        tl.store(token_numbers_at(token_numbers, SLOPE, tile, layout), slope * root, mask=tile.exists)
        tl.store(token_numbers_at(token_numbers, SHRINK, tile, layout), shrink * slope * slope, mask=tile.exists)
        tl.store(
            token_numbers_at(token_numbers, NORMALISER_GRADIENT, tile, layout), normaliser_gradient, mask=tile.exists
        )
        row_product = tl.sum(gradient * values, axis=1) * normaliser
        if NORMALIZE:
            row_product += normaliser_gradient * normaliser
        store_source_gradient(
            query_gradient,
            source,
            scale,
            tile,
            state,
            held,
            channels,
            gradient,
            normaliser_gradient,
            row_product,
            tile.exists.to(tl.float32),
            layout,
            HEAD_DIM,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            NORMALIZE,
            PRECISION,
            False,
        )
    if output_norm is not None:
        row = norm_gradients + tl.program_id(0).to(tl.int64) * HEAD_DIM
        tl.store(row + channels, norm_gradient, mask=channels < HEAD_DIM)


@triton.jit
def summary_gradient_kernel(
    query,
    angles,
    mixed,
    output_norm,
    output_gate,
    output_gradient,
    token_numbers,
    summary_gradients,
    layout,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the mixed summary from one part of one block's queries, for BLOCK_E channels of the value."""
    layout = plain_layout(layout)
    source = Source(query, angles, layout, eps)
    program = this_program(layout, (HEAD_DIM + BLOCK_E - 1) // BLOCK_E)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    columns = program.column * BLOCK_E + tl.arange(0, BLOCK_E)
    summary = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    key_sum = tl.zeros((BLOCK_D,), tl.float32)
    if output_norm is not None:
        state = state_of(mixed, program, layout, HEAD_DIM, NORMALIZE)
        held = load_state(state, tl.arange(0, BLOCK_E), columns, HEAD_DIM)
        weight = tl.load(output_norm + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
    for index in range(first_tile(program, box, layout, BLOCK_T), end_tile(program, box, layout, BLOCK_T)):
        tile = tile_of(program, index, box, layout, BLOCK_T)
        scale = softmax_scale(source, tile, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        rotated, plain = load_features(source, scale, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
        gradient = load_rows(output_gradient, tile, columns, HEAD_DIM)
        if output_gate is not None:
            gate = load_rows(output_gate, tile, columns, HEAD_DIM)
            gradient *= gate * tl.sigmoid(gate)
        slope = tl.load(token_numbers_at(token_numbers, SLOPE, tile, layout), mask=tile.exists, other=0.0)
        gradient *= slope[:, None]
        if output_norm is not None:
            values, _ = read_state(
                source,
                scale,
                tile,
                state,
                held,
                columns,
                HEAD_DIM,
                BLOCK_E,
                FEATURE_MAP,
                ROPE_BEFORE,
                False,
                PRECISION,
            )
            shrink = tl.load(token_numbers_at(token_numbers, SHRINK, tile, layout), mask=tile.exists, other=0.0)
            gradient = gradient * weight[None, :] - shrink[:, None] * values
        summary = accurate_dot(tl.trans(rotated), gradient, summary, PRECISION, False, False)
        if NORMALIZE:
            normaliser_gradient = tl.load(
                token_numbers_at(token_numbers, NORMALISER_GRADIENT, tile, layout), mask=tile.exists, other=0.0
            )
            key_sum += tl.sum(plain * normaliser_gradient[:, None], axis=0)
    store_part(summary_gradients, summary, key_sum, program, columns, layout, HEAD_DIM, NORMALIZE)


@triton.jit
def key_value_gradient_kernel(
    key,
    value,
    angles,
    key_mask,
    summary_gradient,
    key_gradient,
    value_gradient,
    layout,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of key and value for one part of one block, from the gradient of the block's summary."""
    number: tl.constexpr = key.pointer.dtype.element_ty
    layout = plain_layout(layout)
    source = Source(key, angles, layout, eps)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    state = state_of(summary_gradient, program, layout, HEAD_DIM, NORMALIZE)
    held = load_state(state, tl.arange(0, BLOCK_C), channels, HEAD_DIM)
    for index in range(first_tile(program, box, layout, BLOCK_T), end_tile(program, box, layout, BLOCK_T)):
        tile = tile_of(program, index, box, layout, BLOCK_T)
        scale = softmax_scale(source, tile, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        gradient, key_sum_product = read_state(
            source,
            scale,
            tile,
            state,
            held,
            channels,
            HEAD_DIM,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            NORMALIZE,
            PRECISION,
        )
        weight = token_weight(key_mask, tile, layout)
        store_rows(value_gradient, gradient * weight[:, None], tile, channels, layout, HEAD_DIM)
        values = load_rows(value, tile, channels, HEAD_DIM)
        row_product = tl.sum(gradient * values, axis=1)
        if NORMALIZE:
            row_product += key_sum_product
        store_source_gradient(
            key_gradient,
            source,
            scale,
            tile,
            state,
            held,
            channels,
            values,
            tl.full(weight.shape, 1.0, tl.float32),
            row_product,
            weight,
            layout,
            HEAD_DIM,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            NORMALIZE,
            PRECISION,
            number == tl.bfloat16,
        )
