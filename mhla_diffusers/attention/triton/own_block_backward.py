"""Kernels of the own block's backward pass, with their launches.

With L the log of a query's sum of weights and P = ∂o · o − ∂L, the gradient of a weight w_t is (∂o · v_t − P) / exp(L),
as in every attention that is normalised; of MHLA with RoPE after the feature map, ∂o · v_t belongs to the rotated
features and P to the others. The kernel of the queries leaves P.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..call import Call
from .arguments import Source, like, numbers, rows
from .features import input_gradient, softmax_scale
from .forward_kernels import token_weight
from .launches import Launch
from .own_block_forward import all_features, number_per_token, own_block_inputs, own_block_plan, places
from .tile import accurate_dot, block_box, load_rows, numbers_of, plain_layout, store_rows, this_program, tile_of

LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class OutputSide:
    """What the backward pass knows of the output."""

    output: torch.Tensor
    """float32 (B, N, H, D)."""
    log_sum: torch.Tensor
    """float32 (B, N, H, 1)."""
    output_gradient: torch.Tensor
    """Like ``output``."""
    log_sum_gradient: torch.Tensor | None
    """Like ``log_sum``."""


@triton.jit
def _load_numbers(pointers, tile):
    """One for every token of a tile, float32; 0 for those that do not exist."""
    return tl.load(numbers_of(pointers, tile), mask=tile.exists, other=0.0)


@triton.jit
def _store_gradient(
    pointer,
    source,
    gradient,
    of_plain,
    tile,
    channels,
    layout,
    HEAD_DIM: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
):
    """Write the gradient of query or key, given that of its features."""
    row_product = tl.zeros(tile.tokens.shape, tl.float32)
    if FEATURE_MAP == "softmax":  # loaded again, since few registers are left to keep them until now
        features, plain = all_features(source, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
        if source.angles is None or ROPE_BEFORE:
            row_product += tl.sum(plain * gradient, axis=1)
        else:
            row_product += tl.sum(features * gradient + plain * of_plain, axis=1)
    scale = softmax_scale(source, tile, HEAD_DIM, channels.shape[0], FEATURE_MAP, ROPE_BEFORE)
    values = input_gradient(
        source, scale, gradient, of_plain, row_product, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE
    )
    store_rows(pointer, values, tile, channels, layout, HEAD_DIM)


@triton.jit
def own_block_query_gradient_kernel(
    query,
    key,
    value,
    angles,
    key_mask,
    output,
    output_gradient,
    log_sums,
    of_log_sums,
    query_gradient,
    products,
    layout,
    scale,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of some queries of one block, and their P."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    own = tile_of(program, program.part, box, layout, OWN)
    own_places = places(program.part, OWN)
    of_queries, of_keys = Source(query, angles, layout, eps), Source(key, angles, layout, eps)
    queries = all_features(of_queries, own, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
    of_output = load_rows(output_gradient, own, channels, HEAD_DIM)
    product_sum = tl.zeros((OWN,), tl.float32)
    log_sum = tl.zeros((OWN,), tl.float32)
    if NORMALIZE:
        product_sum += tl.sum(of_output * load_rows(output, own, channels, HEAD_DIM), axis=1)
        if of_log_sums is not None:
            product_sum -= _load_numbers(of_log_sums, own)
        tl.store(numbers_of(products, own), product_sum, mask=own.exists)
        log_sum += _load_numbers(log_sums, own)
        if not SOFTMAX:
            of_output *= tl.exp(-log_sum)[:, None]
            product_sum *= tl.exp(-log_sum)
    gradient = tl.zeros((OWN, BLOCK_D), tl.float32)
    end = tl.cdiv(tl.minimum((program.part + 1) * OWN, box.end), OTHERS)
    two_features: tl.constexpr = NORMALIZE and angles is not None and not ROPE_BEFORE
    for index in range(0, end):
        others = tile_of(program, index, box, layout, OTHERS)
        seen = (places(index, OTHERS)[None, :] <= own_places[:, None]) & others.exists[None, :]
        keys = all_features(of_keys, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
        values = load_rows(value, others, channels, HEAD_DIM)
        weight = token_weight(key_mask, others, layout)
        square = tl.zeros((OWN, OTHERS), tl.float32)
        exact: tl.constexpr = SOFTMAX and number == tl.bfloat16
        of_weights = accurate_dot(of_output, tl.trans(values), square, PRECISION, False, number == tl.bfloat16)
        if SOFTMAX:
            logits = accurate_dot(queries, tl.trans(keys), square, PRECISION, exact, exact) * scale
            logits += tl.log2(weight)[None, :] - log_sum[:, None] * LOG2_E
            of_weights = (of_weights - product_sum[:, None]) * tl.exp2(tl.where(seen, logits, float("-inf")))
        else:
            if not two_features:
                of_weights -= product_sum[:, None]
            of_weights = tl.where(seen, of_weights * weight[None, :], 0.0)
        gradient = accurate_dot(of_weights, keys, gradient, PRECISION, False, exact)
    if SOFTMAX:
        gradient *= scale / LOG2_E
    of_plain = tl.zeros((OWN, BLOCK_D), tl.float32)
    if two_features:
        for index in range(0, end):
            others = tile_of(program, index, box, layout, OTHERS)
            seen = (places(index, OTHERS)[None, :] <= own_places[:, None]) & others.exists[None, :]
            plain_keys = all_features(of_keys, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[1]
            weight = token_weight(key_mask, others, layout)
            of_weights = tl.where(seen, -product_sum[:, None] * weight[None, :], 0.0)
            of_plain = accurate_dot(of_weights, plain_keys, of_plain, PRECISION, False, False)
    _store_gradient(
        query_gradient,
        of_queries,
        gradient,
        of_plain,
        own,
        channels,
        layout,
        HEAD_DIM,
        FEATURE_MAP,
        ROPE_BEFORE,
    )


@triton.jit
def own_block_key_value_gradient_kernel(
    query,
    key,
    value,
    angles,
    key_mask,
    output_gradient,
    log_sums,
    products,
    key_gradient,
    value_gradient,
    layout,
    scale,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of some keys and values of one block, from the queries that do not come before them."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    own = tile_of(program, program.part, box, layout, OWN)
    own_places = places(program.part, OWN)
    of_queries, of_keys = Source(query, angles, layout, eps), Source(key, angles, layout, eps)
    keys = all_features(of_keys, own, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
    weight = token_weight(key_mask, own, layout)
    square = tl.zeros((OWN, OTHERS), tl.float32)
    of_values = tl.zeros((OWN, BLOCK_D), tl.float32)
    begin, end = program.part * OWN // OTHERS, tl.cdiv(box.end, OTHERS)
    exact: tl.constexpr = SOFTMAX and number == tl.bfloat16
    two_features: tl.constexpr = NORMALIZE and angles is not None and not ROPE_BEFORE
    # a loop for each sum, since several of them at once spill registers
    for index in range(begin, end):
        others = tile_of(program, index, box, layout, OTHERS)
        seen = (own_places[:, None] <= places(index, OTHERS)[None, :]) & others.exists[None, :]
        queries = all_features(of_queries, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
        of_output = load_rows(output_gradient, others, channels, HEAD_DIM)
        weights = accurate_dot(keys, tl.trans(queries), square, PRECISION, exact, exact)
        if SOFTMAX:
            weights *= scale
            weights += tl.log2(weight)[:, None] - _load_numbers(log_sums, others)[None, :] * LOG2_E
            weights = tl.exp2(tl.where(seen, weights, float("-inf")))
        else:
            weights = tl.where(seen, weights * weight[:, None], 0.0)
            if NORMALIZE:
                of_output *= tl.exp(-_load_numbers(log_sums, others))[:, None]
        of_values = accurate_dot(weights, of_output, of_values, PRECISION, False, False)
    store_rows(value_gradient, of_values, own, channels, layout, HEAD_DIM)
    values = load_rows(value, own, channels, HEAD_DIM)
    gradient = tl.zeros((OWN, BLOCK_D), tl.float32)
    for index in range(begin, end):
        others = tile_of(program, index, box, layout, OTHERS)
        seen = (own_places[:, None] <= places(index, OTHERS)[None, :]) & others.exists[None, :]
        queries = all_features(of_queries, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
        of_output = load_rows(output_gradient, others, channels, HEAD_DIM)
        of_weights = accurate_dot(values, tl.trans(of_output), square, PRECISION, number == tl.bfloat16, False)
        if NORMALIZE and not two_features:
            of_weights -= _load_numbers(products, others)[None, :]
        if SOFTMAX:
            weights = accurate_dot(keys, tl.trans(queries), square, PRECISION, exact, exact) * scale
            weights += tl.log2(weight)[:, None] - _load_numbers(log_sums, others)[None, :] * LOG2_E
            of_weights *= tl.exp2(tl.where(seen, weights, float("-inf")))
        else:
            if NORMALIZE:
                of_weights *= tl.exp(-_load_numbers(log_sums, others))[None, :]
            of_weights = tl.where(seen, of_weights * weight[:, None], 0.0)
        gradient = accurate_dot(of_weights, queries, gradient, PRECISION, False, exact)
    if SOFTMAX:
        gradient *= scale / LOG2_E
    of_plain = tl.zeros((OWN, BLOCK_D), tl.float32)
    if two_features:
        for index in range(begin, end):
            others = tile_of(program, index, box, layout, OTHERS)
            seen = (own_places[:, None] <= places(index, OTHERS)[None, :]) & others.exists[None, :]
            plain_queries = all_features(of_queries, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[1]
            product_sum = _load_numbers(products, others) * tl.exp(-_load_numbers(log_sums, others))
            of_weights = tl.where(seen, -product_sum[None, :] * weight[:, None], 0.0)
            of_plain = accurate_dot(of_weights, plain_queries, of_plain, PRECISION, False, False)
    _store_gradient(
        key_gradient,
        of_keys,
        gradient,
        of_plain,
        own,
        channels,
        layout,
        HEAD_DIM,
        FEATURE_MAP,
        ROPE_BEFORE,
    )


def query_gradient_launch(
    call: Call, has_softmax: bool, side: OutputSide, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor | None]:
    """Gradient of the queries (B, N, H, D) and, where there is a normaliser, P, float32 (B, N, H, 1)."""
    plan = own_block_plan(own_block_query_gradient_kernel, call, has_softmax, architecture)
    gradient, products = like(call.query), number_per_token(call) if call.normalize else None
    arguments = _known(call, side, products) | {
        "output": rows(side.output),
        "of_log_sums": numbers(side.log_sum_gradient) if side.log_sum_gradient is not None else None,
        "query_gradient": gradient,
    }
    return plan.launch(arguments), gradient, products


def key_value_gradient_launch(
    call: Call, has_softmax: bool, side: OutputSide, products: torch.Tensor | None, architecture: str | None = None
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of keys and values (B, N, H, D)."""
    plan = own_block_plan(own_block_key_value_gradient_kernel, call, has_softmax, architecture)
    gradients = like(call.key), like(call.value)
    arguments = _known(call, side, products) | {"key_gradient": gradients[0], "value_gradient": gradients[1]}
    return plan.launch(arguments), gradients


def _known(call: Call, side: OutputSide, products: torch.Tensor | None) -> dict[str, Any]:
    """What both kernels take."""
    return own_block_inputs(call) | {
        "output_gradient": rows(side.output_gradient),
        "log_sums": numbers(side.log_sum) if call.normalize else None,
        "products": numbers(products) if products is not None else None,
    }


def backward(call: Call, has_softmax: bool, side: OutputSide) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    launch, of_query, products = query_gradient_launch(call, has_softmax, side)
    launch.run()
    launch, (of_key, of_value) = key_value_gradient_launch(call, has_softmax, side, products)
    launch.run()
    return of_query, of_key, of_value
