"""Kernels of the exact tiles' backward pass, with their launches.

With L the log of a query's sum of weights, p_t = exp(s_t − L) the weight of a key or mean, and P = ∂o · o − ∂L, the
gradient of its logit is ∂s_t = p_t (∂o · v_t − P), as in every softmax attention. The kernel of the queries leaves P;
that of the means gives the gradients of means, which the kernel of the keys hands on to every key of the tile.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import torch
import triton
import triton.language as tl

from .arguments import Lists, Means, like, numbers, rows
from .exact_forward import run_means
from .exact_key_gradients import OutputSide, QuerySide, key_value_gradient_launch, mean_gradient_launch
from .exact_lists import ExactCall, lists_of_keys, lists_of_queries
from .exact_tile import (
    LOG2_E,
    inputs,
    key_bias,
    list_of,
    listed_tokens,
    load_log_sums,
    load_mean,
    means_at,
    one_per_token,
    pair_plan_of,
    this_pair_program,
    tiles_in_grid,
    tokens_of_tile,
    unlisted_bias,
)
from .launches import Launch
from .tile import load_operand, load_rows, numbers_of, operand, plain, plain_layout, product, store_rows


@triton.jit
def _query_step(
    queries,
    of_output,
    keys,
    values,
    bias,
    scale,
    log_sum,
    product_sum,
    gradient,
    number: tl.constexpr,
    PRECISION: tl.constexpr,
):
    square = tl.zeros((queries.shape[0], keys.shape[0]), tl.float32)
    logits = product(queries, tl.trans(keys), square, PRECISION) * scale + bias[None, :]
    weights = tl.exp2(logits - log_sum[:, None])
    of_logits = weights * (product(of_output, tl.trans(values), square, PRECISION) - product_sum[:, None])
    return product(operand(of_logits, number), keys, gradient, PRECISION)


@triton.jit
def exact_query_gradient_kernel(
    query,
    key,
    value,
    key_mask,
    lists,
    means,
    output,
    output_gradient,
    log_sums,
    of_log_sums,
    query_gradient,
    rounded_gradient,
    products,
    layout,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of some queries of one tile; P, and the output's gradient in the type of the tensor cores."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    # rounded before P too: what rounding adds to ∂o · v_t, it then adds to P as well, and most of it cancels
    of_output = operand(load_rows(output_gradient, own, channels, HEAD_DIM), number)
    product_sum = tl.sum(of_output.to(tl.float32) * load_rows(output, own, channels, HEAD_DIM), axis=1)
    if of_log_sums is not None:
        product_sum -= tl.load(numbers_of(of_log_sums, own), mask=own.exists, other=0.0)
    tl.store(numbers_of(products, own), product_sum, mask=own.exists)
    store_rows(rounded_gradient, of_output, own, channels, layout, HEAD_DIM)
    queries = load_operand(query, own, channels, HEAD_DIM)
    log_sum = load_log_sums(log_sums, own)
    gradient = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * plain(lists.longest), OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS)
        keys = load_operand(key, others, channels, HEAD_DIM)
        values = load_operand(value, others, channels, HEAD_DIM)
        bias = key_bias(key_mask, others, layout)
        gradient = _query_step(
            queries, of_output, keys, values, bias, scale, log_sum, product_sum, gradient, number, PRECISION
        )
    if means is not None:
        for first in range(0, tiles_in_grid(layout), OTHERS):
            others = means_at(batch, head, first, layout, OTHERS)
            keys = load_mean(means.key, means, others, channels, HEAD_DIM)
            values = load_mean(means.value, means, others, channels, HEAD_DIM)
            bias = unlisted_bias(means, others, row, layout)
            gradient = _query_step(
                queries, of_output, keys, values, bias, scale, log_sum, product_sum, gradient, number, PRECISION
            )
    store_rows(query_gradient, gradient * (scale / LOG2_E), own, channels, layout, HEAD_DIM)


def query_gradient_launch(
    call: ExactCall, lists: Lists, means: Means | None, output: OutputSide, architecture: str | None = None
) -> tuple[Launch, QuerySide]:
    """Gradient of the queries, and what the other kernels need."""
    plan = pair_plan_of(exact_query_gradient_kernel, call, architecture)
    side = QuerySide(like(call.query), like(call.query), one_per_token(call))
    arguments = inputs(call, lists, means) | {
        "output": rows(output.output),
        "output_gradient": rows(output.output_gradient),
        "log_sums": numbers(output.log_sum),
        "of_log_sums": numbers(output.log_sum_gradient) if output.log_sum_gradient is not None else None,
        "query_gradient": side.gradient,
        "rounded_gradient": side.output_gradient,
        "products": numbers(side.products),
    }
    return plan.launch(call, arguments, plan.parts(call), call.number_of_tiles), side


def backward(call: ExactCall, output: OutputSide) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and pooled_bias, which is empty where there are no means."""
    lists = lists_of_keys(call)
    means = run_means(call, lists)
    launch, side = query_gradient_launch(call, lists, means, output)
    launch.run()
    of_means = None
    if means is not None:
        launch, shares = mean_gradient_launch(call, means, output, side)
        launch.run()
        of_means = shares.added()
    launch, (of_key, of_value) = key_value_gradient_launch(call, lists_of_queries(call), means, of_means, output, side)
    launch.run()
    return side.gradient, of_key, of_value, of_means.bias if of_means is not None else output.log_sum.new_empty(0)
