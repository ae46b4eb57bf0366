"""The kernels of the near field's backward pass.

With L the stored logarithm of a query's sum of weights, p_t = exp(s_t − L) the weight of a key of its block and
P = ∂o · o, the gradient of the logit is ∂s_t = p_t (∂o · v_t − P), as in every softmax attention. Of the far field,
with f = φ(q), n = fᵀS, d = fᵀz for the mixed summary and key sum without the own block, and c = exp(−L), the output
holds λ c n and the sum of weights holds λ d: so ∂n = λ c ∂o, ∂d = −λ c P and ∂λ = c (∂o · n − P d).

Queries, keys and logits are formed again. The far field's kernels write the gradients of query, key and value first,
and those of the near field add to them.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from ..arguments import Rows, Source
from ..backward_kernels import NORMALISER_GRADIENT, SLOPE, token_numbers_at
from ..features import load_input, softmax_scale
from ..state import read_state, store_source_gradient
from ..tile import (
    block_box,
    end_tile,
    first_tile,
    load_rows,
    load_state,
    rotate,
    state_of,
    store_rows,
    this_program,
    tile_of,
    tiles_in,
    tokens_in,
)
from .tile import key_bias, numbers_of, operand, product


@triton.jit(do_not_specialize=["layout"])
def far_query_gradient_kernel(
    query,
    rotary,
    mixed,
    far_field_weight,
    output,
    output_gradient,
    log_sums,
    query_gradient,
    weight_gradients,
    token_numbers,
    layout,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
):
    """The far field's gradients of query and (one number per program) λ, and what the summary's gradient needs."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    source = Source(query, rotary, eps)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    state = state_of(mixed, program, layout, HEAD_DIM, True)
    held = load_state(state, tl.arange(0, BLOCK_C), channels, HEAD_DIM)
    weight = tl.load(far_field_weight + program.head)
    weight_gradient = tl.zeros((BLOCK_T,), tl.float32)
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
            True,
            number == tl.float32,
        )
        gradient = load_rows(output_gradient, tile, channels, HEAD_DIM)
        output_product = tl.sum(gradient * load_rows(output, tile, channels, HEAD_DIM), axis=1)
        share = tl.exp(-tl.load(numbers_of(log_sums, tile, layout), mask=tile.exists, other=float("inf")))
        of_weight = share * (tl.sum(gradient * values, axis=1) - output_product * normaliser)
        weight_gradient += of_weight
        normaliser_gradient = -weight * share * output_product
        tl.store(token_numbers_at(token_numbers, SLOPE, tile, layout), weight * share, mask=tile.exists)
        tl.store(
            token_numbers_at(token_numbers, NORMALISER_GRADIENT, tile, layout), normaliser_gradient, mask=tile.exists
        )
        store_source_gradient(
            query_gradient,
            source,
            scale,
            tile,
            state,
            held,
            channels,
            gradient * (weight * share)[:, None],
            normaliser_gradient,
            weight * of_weight,
            tile.exists.to(tl.float32),
            layout,
            HEAD_DIM,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            True,
            number == tl.float32,
            False,
        )
    tl.store(weight_gradients + tl.program_id(0), tl.sum(weight_gradient))


@triton.jit
def _contiguous(pointer, layout, HEAD_DIM: tl.constexpr):
    """A contiguous (B, N, H, D) as :class:`Rows`."""
    token_stride = layout.heads * HEAD_DIM
    return Rows(pointer, tokens_in(layout) * token_stride, token_stride, HEAD_DIM)


@triton.jit
def _store_sum(pointer, gradient, tile, channels, layout, HEAD_DIM: tl.constexpr, FAR_FIELD: tl.constexpr):
    """Add to the gradient that the far field's kernel wrote, where there is a far field."""
    if FAR_FIELD:
        gradient += load_rows(_contiguous(pointer, layout, HEAD_DIM), tile, channels, HEAD_DIM)
    store_rows(pointer, gradient, tile, channels, layout, HEAD_DIM)


@triton.jit
def _rotated_back(gradient, rotary, tile, channels, HEAD_DIM: tl.constexpr):
    if rotary is None:
        return gradient
    else:
        return rotate(gradient, load_rows(rotary, tile, channels, HEAD_DIM), True)


@triton.jit(do_not_specialize=["layout"])
def near_query_gradient_kernel(
    query,
    key,
    value,
    rotary,
    key_mask,
    output,
    output_gradient,
    log_sums,
    query_gradient,
    output_products,
    layout,
    logit_scale,
    FAR_FIELD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Gradient of one tile of a block's queries, and P."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    tile = tile_of(program, program.part, box, layout, BLOCK_T)
    queries = operand(load_input(Source(query, rotary, 0.0), tile, channels, HEAD_DIM, True), number)
    of_output = load_rows(output_gradient, tile, channels, HEAD_DIM)
    output_product = tl.sum(of_output * load_rows(output, tile, channels, HEAD_DIM), axis=1)
    tl.store(numbers_of(output_products, tile, layout), output_product, mask=tile.exists)
    of_output = operand(of_output, number)
    log_sum = tl.load(numbers_of(log_sums, tile, layout), mask=tile.exists, other=float("inf"))
    gradient = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for index in range(0, tiles_in(box, BLOCK_T)):
        others = tile_of(program, index, box, layout, BLOCK_T)
        keys = operand(load_input(Source(key, rotary, 0.0), others, channels, HEAD_DIM, True), number)
        values = operand(load_rows(value, others, channels, HEAD_DIM), number)
        logits = product(queries, tl.trans(keys), square) * logit_scale
        weights = tl.exp(logits + key_bias(key_mask, others, layout)[None, :] - log_sum[:, None])
        of_logits = weights * (product(of_output, tl.trans(values), square) - output_product[:, None])
        gradient = product(operand(of_logits, number), keys, gradient)
    gradient = _rotated_back(gradient * logit_scale, rotary, tile, channels, HEAD_DIM)
    _store_sum(query_gradient, gradient, tile, channels, layout, HEAD_DIM, FAR_FIELD)


@triton.jit(do_not_specialize=["layout"])
def near_key_value_gradient_kernel(
    query,
    key,
    value,
    rotary,
    key_mask,
    output_gradient,
    log_sums,
    output_products,
    key_gradient,
    value_gradient,
    layout,
    logit_scale,
    FAR_FIELD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Gradients of one tile of a block's keys and values."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    tile = tile_of(program, program.part, box, layout, BLOCK_T)
    keys = operand(load_input(Source(key, rotary, 0.0), tile, channels, HEAD_DIM, True), number)
    values = operand(load_rows(value, tile, channels, HEAD_DIM), number)
    bias = key_bias(key_mask, tile, layout)
    of_keys = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    of_values = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for index in range(0, tiles_in(box, BLOCK_T)):
        others = tile_of(program, index, box, layout, BLOCK_T)
        queries = operand(load_input(Source(query, rotary, 0.0), others, channels, HEAD_DIM, True), number)
        of_output = operand(load_rows(output_gradient, others, channels, HEAD_DIM), number)
        log_sum = tl.load(numbers_of(log_sums, others, layout), mask=others.exists, other=float("inf"))
        output_product = tl.load(numbers_of(output_products, others, layout), mask=others.exists, other=0.0)
        logits = product(keys, tl.trans(queries), square) * logit_scale
        weights = tl.exp(logits + bias[:, None] - log_sum[None, :])
        of_values = product(operand(weights, number), of_output, of_values)
        of_logits = weights * (product(values, tl.trans(of_output), square) - output_product[None, :])
        of_keys = product(operand(of_logits, number), queries, of_keys)
    of_keys = _rotated_back(of_keys * logit_scale, rotary, tile, channels, HEAD_DIM)
    _store_sum(key_gradient, of_keys, tile, channels, layout, HEAD_DIM, FAR_FIELD)
    _store_sum(value_gradient, of_values, tile, channels, layout, HEAD_DIM, FAR_FIELD)
