"""The two kernels of the forward pass: summaries of key and value, and the output."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from .arguments import Source
from .features import load_features, softmax_scale
from .state import read_state
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


@triton.jit
def token_weight(key_mask, tile, layout):
    """1 for a token that takes part, float32 (tokens,)."""
    if key_mask is None:
        return tile.exists.to(tl.float32)
    else:
        return tl.load(key_mask + tile.batch * tokens_in(layout) + tile.tokens, mask=tile.exists, other=0.0)


@triton.jit
def summary_kernel(
    key,
    value,
    angles,
    key_mask,
    summaries,
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
    """KV summary and key sum of one part of one block (paper, Eq. 3), for BLOCK_E channels of the value."""
    number: tl.constexpr = key.pointer.dtype.element_ty
    layout = plain_layout(layout)
    source = Source(key, angles, layout, eps)
    program = this_program(layout, (HEAD_DIM + BLOCK_E - 1) // BLOCK_E)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    columns = program.column * BLOCK_E + tl.arange(0, BLOCK_E)
    summary = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    key_sum = tl.zeros((BLOCK_D,), tl.float32)
    for index in range(first_tile(program, box, layout, BLOCK_T), end_tile(program, box, layout, BLOCK_T)):
        tile = tile_of(program, index, box, layout, BLOCK_T)
        scale = softmax_scale(source, tile, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        rotated, plain = load_features(source, scale, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
        weight = token_weight(key_mask, tile, layout)[:, None]
        values = load_rows(value, tile, columns, HEAD_DIM)
        summary = accurate_dot(tl.trans(rotated * weight), values, summary, PRECISION, False, number == tl.bfloat16)
        key_sum += tl.sum(plain * weight, axis=0)
    store_part(summaries, summary, key_sum, program, columns, layout, HEAD_DIM, NORMALIZE)


@triton.jit
def output_norm_weight(output_norm, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Weight of the output norm, float32 (BLOCK_D,)."""
    channels = tl.arange(0, BLOCK_D)
    return tl.load(output_norm + channels, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def output_kernel(
    query,
    angles,
    mixed,
    output_norm,
    output_gate,
    output,
    normalisers,
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
    """Output of one part of one block's queries (paper, Eq. 4) with output norm and gate, and their normalisers."""
    layout = plain_layout(layout)
    source = Source(query, angles, layout, eps)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    state = state_of(mixed, program, layout, HEAD_DIM, NORMALIZE)
    held = load_state(state, tl.arange(0, BLOCK_C), channels, HEAD_DIM)
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
        if normalisers is not None:
            tl.store(numbers_of(normalisers, tile), normaliser, mask=tile.exists)
        values = values / normaliser[:, None]
        if output_norm is not None:
            root = tl.sqrt(tl.sum(values * values, axis=1) / HEAD_DIM + norm_eps)
            values = values / root[:, None] * output_norm_weight(output_norm, BLOCK_D, HEAD_DIM)[None, :]
        if output_gate is not None:
            gate = load_rows(output_gate, tile, channels, HEAD_DIM)
            values *= gate * tl.sigmoid(gate)
        store_rows(output, values, tile, channels, layout, HEAD_DIM)
