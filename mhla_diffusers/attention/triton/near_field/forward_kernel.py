"""The forward pass: softmax over the keys of the block, with the far field as one more key."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from ..arguments import Source
from ..features import load_input, softmax_scale
from ..state import read_state
from ..tile import block_box, load_rows, load_state, state_of, store_rows, this_program, tile_of, tiles_in
from .tile import key_bias, numbers_of, operand, product


@triton.jit
def _far_field(
    source,
    mixed,
    far_field_weight,
    tile,
    program,
    layout,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The far field as a key that each query has to itself: value (tokens, channels), weight 1 and logit (tokens,)."""
    channels = tl.arange(0, BLOCK_D)
    state = state_of(mixed, program, layout, HEAD_DIM, True)
    held = load_state(state, tl.arange(0, BLOCK_C), channels, HEAD_DIM)
    scale = softmax_scale(source, tile, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
    values, normaliser = read_state(
        source, scale, tile, state, held, channels, HEAD_DIM, BLOCK_C, FEATURE_MAP, ROPE_BEFORE, True, IEEE
    )
    weight = tl.load(far_field_weight + program.head) * normaliser
    seen = weight != 0  # a row of the mixing matrix that is zero off the diagonal sees no other block
    values = tl.where(seen[:, None], values / normaliser[:, None], 0.0)
    return values, seen.to(tl.float32), tl.log(weight)


@triton.jit(do_not_specialize=["layout"])
def near_field_kernel(
    query,
    key,
    value,
    rotary,
    key_mask,
    mixed,
    far_field_weight,
    output,
    log_sums,
    layout,
    eps,
    logit_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
):
    """Output of one tile of a block's queries, and the logarithm of each query's sum of weights."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    tile = tile_of(program, program.part, box, layout, BLOCK_T)
    source = Source(query, rotary, eps)
    if mixed is not None:
        values, total, maximum = _far_field(
            source,
            mixed,
            far_field_weight,
            tile,
            program,
            layout,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_C,
            FEATURE_MAP,
            ROPE_BEFORE,
            number == tl.float32,
        )
    else:
        values = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_T,), tl.float32)
        maximum = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    queries = operand(load_input(source, tile, channels, HEAD_DIM, True), number)
    for index in range(0, tiles_in(box, BLOCK_T)):
        others = tile_of(program, index, box, layout, BLOCK_T)
        keys = operand(load_input(Source(key, rotary, eps), others, channels, HEAD_DIM, True), number)
        logits = product(queries, tl.trans(keys), tl.zeros((BLOCK_T, BLOCK_T), tl.float32)) * logit_scale
        logits += key_bias(key_mask, others, layout)[None, :]
        largest = tl.maximum(maximum, tl.max(logits, axis=1))
        # where nothing has been seen yet, minus infinity less minus infinity would be NaN
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(maximum - base)
        total = total * shrink + tl.sum(weights, axis=1)
        others_values = operand(load_rows(value, others, channels, HEAD_DIM), number)
        values = product(operand(weights, number), others_values, values * shrink[:, None])
        maximum = largest
    store_rows(output, values / total[:, None], tile, channels, layout, HEAD_DIM)
    tl.store(numbers_of(log_sums, tile, layout), maximum + tl.log(total), mask=tile.exists)
