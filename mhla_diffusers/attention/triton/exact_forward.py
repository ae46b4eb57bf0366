"""Kernels of the exact tiles' forward pass, with their launches.

A program holds some queries of one tile and takes the keys of its list, then the means of all other tiles, as online
softmax attention does. Logits are in base 2. Queries and keys come after RoPE.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math

import torch
import triton
import triton.language as tl

from .arguments import Lists, Means, allocate, numbers, rows
from .exact_lists import ExactCall, bitmap, lists_of_keys
from .exact_tile import (
    inputs,
    key_bias,
    list_of,
    listed_tokens,
    load_mean,
    means_at,
    one_per_token,
    pair_plan_of,
    this_pair_program,
    tiles_in_grid,
    tokens_of_tile,
    unlisted_bias,
)
from .forward_kernels import token_weight
from .launches import Launch
from .tile import load_operand, load_rows, numbers_of, operand, plain, plain_layout, product, store_rows, to_bfloat16

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Log of the sum of weights of a query that attends to nothing."""
_LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _attend(
    queries, keys, values, bias, scale, total, maximum, values_sum, number: tl.constexpr, PRECISION: tl.constexpr
):
    """One step of online softmax attention: (queries,) sum of weights and maximum, (queries, channels) values."""
    square = tl.zeros((queries.shape[0], keys.shape[0]), tl.float32)
    logits = product(queries, tl.trans(keys), square, PRECISION) * scale + bias[None, :]
    largest = tl.maximum(maximum, tl.max(logits, axis=1))
    # where nothing has been seen yet, minus infinity less minus infinity would be NaN
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(maximum - base)
    values_sum = product(operand(weights, number), values, values_sum * shrink[:, None], PRECISION)
    return total * shrink + tl.sum(weights, axis=1), largest, values_sum


@triton.jit
def exact_kernel(
    query,
    key,
    value,
    key_mask,
    lists,
    means,
    output,
    log_sums,
    layout,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of some queries of one tile, and the log of each query's sum of weights."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    queries = load_operand(query, own, channels, HEAD_DIM)
    total = tl.zeros((OWN,), tl.float32)
    maximum = tl.full((OWN,), float("-inf"), tl.float32)
    values_sum = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * plain(lists.longest), OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS)
        keys = load_operand(key, others, channels, HEAD_DIM)
        values = load_operand(value, others, channels, HEAD_DIM)
        bias = key_bias(key_mask, others, layout)
        total, maximum, values_sum = _attend(
            queries, keys, values, bias, scale, total, maximum, values_sum, number, PRECISION
        )
    if means is not None:
        for first in range(0, tiles_in_grid(layout), OTHERS):
            others = means_at(batch, head, first, layout, OTHERS)
            keys = load_mean(means.key, means, others, channels, HEAD_DIM)
            values = load_mean(means.value, means, others, channels, HEAD_DIM)
            bias = unlisted_bias(means, others, row, layout)
            total, maximum, values_sum = _attend(
                queries, keys, values, bias, scale, total, maximum, values_sum, number, PRECISION
            )
    seen = total > 0
    store_rows(output, values_sum / tl.where(seen, total, 1.0)[:, None], own, channels, layout, HEAD_DIM)
    log_sum = tl.where(seen, (maximum + tl.log2(total)) * _LN_2, _LOWEST)
    tl.store(numbers_of(log_sums, own), log_sum, mask=own.exists)


@triton.jit
def means_kernel(
    key,
    value,
    key_mask,
    lists,
    key_means,
    value_means,
    counts,
    layout,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Means of the keys and of the values of one tile, contiguous (B, T, H, D), and the sum of its key mask."""
    layout = plain_layout(layout)
    batch, head, tile, _ = this_pair_program(layout, True)
    channels = tl.arange(0, BLOCK_D)
    key_sum = tl.zeros((BLOCK_D,), tl.float32)
    value_sum = tl.zeros((BLOCK_D,), tl.float32)
    count = tl.zeros((OTHERS,), tl.float32)
    for first in range(0, plain(lists.longest), OTHERS):
        others = tokens_of_tile(lists, batch, head, tile, first, OTHERS)
        weight = token_weight(key_mask, others, layout)
        key_sum += tl.sum(load_rows(key, others, channels, HEAD_DIM) * weight[:, None], axis=0)
        value_sum += tl.sum(load_rows(value, others, channels, HEAD_DIM) * weight[:, None], axis=0)
        count += weight
    total = tl.sum(count)
    tiles = tiles_in_grid(layout)
    tl.store(counts + (batch * layout.heads + head) * tiles + tile, total)
    share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    place = ((batch * tiles + tile) * layout.heads + head) * HEAD_DIM + channels
    tl.store(key_means + place, _rounded(key_sum * share, key_means.dtype.element_ty), mask=channels < HEAD_DIM)
    tl.store(value_means + place, _rounded(value_sum * share, value_means.dtype.element_ty), mask=channels < HEAD_DIM)


@triton.jit
def _rounded(x, number: tl.constexpr):
    if number == tl.bfloat16:
        return to_bfloat16(x)
    else:
        return x


def means_launch(call: ExactCall, lists: Lists, architecture: str | None = None) -> tuple[Launch, Means]:
    """The means of all tiles, in the type of the keys."""
    batch, _, heads, head_dim = call.query.shape
    tiles, device = call.number_of_tiles, call.query.device
    key_means, value_means = (allocate((batch, tiles, heads, head_dim), call.query.dtype, device) for _ in range(2))
    counts = allocate((batch, heads, tiles), torch.float32, device)
    arguments = {
        "key": rows(call.key),
        "value": rows(call.value),
        "key_mask": call.key_mask,
        "lists": lists,
        "key_means": key_means,
        "value_means": value_means,
        "counts": counts,
    }
    launch = pair_plan_of(means_kernel, call, architecture).launch(call, arguments, 1, tiles)
    return launch, Means(key_means, value_means, *rows(key_means)[1:], counts, call.pooled_bias, bitmap(call))


def exact_launch(
    call: ExactCall, lists: Lists, means: Means | None, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), both float32."""
    plan = pair_plan_of(exact_kernel, call, architecture)
    output = allocate(tuple(call.query.shape), torch.float32, call.query.device)
    log_sum = one_per_token(call)
    arguments = inputs(call, lists, means) | {"output": output, "log_sums": numbers(log_sum)}
    return plan.launch(call, arguments, plan.parts(call), call.number_of_tiles), output, log_sum


def forward(call: ExactCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator returns."""
    lists = lists_of_keys(call)
    means = run_means(call, lists)
    launch, output, log_sum = exact_launch(call, lists, means)
    launch.run()
    return output, log_sum


def run_means(call: ExactCall, lists: Lists) -> Means | None:
    """The means, where the call wants them."""
    if call.pooled_bias is None:
        return None
    launch, means = means_launch(call, lists)
    launch.run()
    return means
