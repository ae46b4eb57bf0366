"""Reading a block's mixed summary with a tile of features, and the gradient of doing so."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from .features import input_gradient, load_features
from .tile import accurate_dot, load_key_sum, load_state, store_rows


@triton.jit
def read_state(
    source,
    scale,
    tile,
    state,
    held,
    columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features × columns of the KV summary, float32 (tokens, columns); and features × key sum, 1 if not NORMALIZE.

    Args:
        state: where the summary begins.
        held: the columns of its first BLOCK_C rows, which are all of them if BLOCK_C is not less than HEAD_DIM.
    """
    product = tl.zeros((tile.tokens.shape[0], columns.shape[0]), tl.float32)
    normaliser = tl.zeros(tile.tokens.shape, tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_C):  # a loop that is not unrolled: unrolled, it spills registers
        channels = first + tl.arange(0, BLOCK_C)
        rotated, plain = load_features(source, scale, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
        if HEAD_DIM > BLOCK_C:
            held = load_state(state, channels, columns, HEAD_DIM)
        product = accurate_dot(rotated, held, product, PRECISION, False, state.dtype.element_ty == tl.bfloat16)
        if NORMALIZE:
            normaliser += tl.sum(plain * load_key_sum(state, channels, HEAD_DIM)[None, :], axis=1)
    if NORMALIZE:
        # a token that does not exist would divide by zero, and 0 * nan is nan in a sum over tokens
        return product, tl.where(tile.exists, normaliser, 1.0)
    else:
        return product, normaliser + 1.0


@triton.jit
def store_source_gradient(
    pointer,
    source,
    scale,
    tile,
    state,
    held,
    columns,
    values,
    key_sum_weight,
    row_product,
    feature_weight,
    layout,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT_VALUES: tl.constexpr,
):
    """Write the gradient of query or key whose features f enter as weight × (fᵀ S values + key_sum_weight fᵀ z).

    Args:
        pointer: contiguous (B, N, H, D) to write.
        state: where S and z begin.
        held: as in :func:`read_state`.
        columns: all channels of the values.
        values: (tokens, columns).
        key_sum_weight: (tokens,).
        row_product: fᵀ S values + key_sum_weight fᵀ z, (tokens,).
        feature_weight: (tokens,).
    """
    for first in range(0, HEAD_DIM, BLOCK_C):
        channels = first + tl.arange(0, BLOCK_C)
        if HEAD_DIM > BLOCK_C:
            held = load_state(state, channels, columns, HEAD_DIM)
        rotated = tl.zeros((tile.tokens.shape[0], BLOCK_C), tl.float32)
        rotated = accurate_dot(values, tl.trans(held), rotated, PRECISION, EXACT_VALUES, False)
        plain = tl.zeros_like(rotated)
        if NORMALIZE:
            plain += key_sum_weight[:, None] * load_key_sum(state, channels, HEAD_DIM)[None, :]
        gradient = input_gradient(
            source, scale, rotated, plain, row_product, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE
        )
        store_rows(pointer, gradient * feature_weight[:, None], tile, channels, layout, HEAD_DIM)
