"""Kernels of the exact tiles' backward pass for means, and for keys and values, with their launches.

A program holds some means, or some keys of one tile, and takes queries: all of them, or those of its list.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .arguments import Lists, Means, Numbers, Rows, Tile, allocate, disguised, like, numbers, rows
from .exact_lists import ExactCall, lists_of_keys, tile_of_token
from .exact_tile import (
    LOG2_E,
    inputs,
    key_bias,
    list_of,
    listed_tokens,
    load_log_sums,
    load_mean,
    pooled_bias,
    means_at,
    pair_plan_of,
    this_pair_program,
    tiles_in_grid,
    tokens_of_tile,
)
from .forward_kernels import token_weight
from .launches import Launch
from .tile import load_operand, numbers_of, operand, plain, plain_layout, product, store_rows, tokens_in
from .tuning import parts_per_block


@triton.jit
def _pair_gradients(keys, values, bias, queries, of_output, log_sum, product_sum, scale, PRECISION: tl.constexpr):
    """Weights and gradients of logits of keys (rows) and queries (columns)."""
    square = tl.zeros((keys.shape[0], queries.shape[0]), tl.float32)
    logits = product(keys, tl.trans(queries), square, PRECISION) * scale + bias[:, None]
    weights = tl.exp2(logits - log_sum[None, :])
    return weights, weights * (product(values, tl.trans(of_output), square, PRECISION) - product_sum[None, :])


@triton.jit
def mean_gradient_kernel(
    query,
    means,
    tile_of_token,
    sample_stride,
    output_gradient,
    log_sums,
    products,
    key_gradient,
    value_gradient,
    bias_gradient,
    layout,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of some means from one part of all queries: (B, H, T, parts, D), and of the bias (B, H, T, parts)."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    tiles = tiles_in_grid(layout)
    rest = tl.program_id(0)
    part = rest % layout.parts
    rest = rest // layout.parts
    groups = tl.cdiv(tiles, OWN)
    group = rest % groups
    rest = rest // groups
    head = (rest % layout.heads).to(tl.int64)
    batch = (rest // layout.heads).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    own = means_at(batch, head, group * OWN, layout, OWN)
    keys = load_mean(means.key, means, own, channels, HEAD_DIM)
    values = load_mean(means.value, means, own, channels, HEAD_DIM)
    bias = pooled_bias(means, own, layout)
    of_keys = tl.zeros((OWN, BLOCK_D), tl.float32)
    of_values = tl.zeros((OWN, BLOCK_D), tl.float32)
    of_bias = tl.zeros((OWN,), tl.float32)
    tokens = tokens_in(layout).to(tl.int32)
    length = tl.cdiv(tl.cdiv(tokens, layout.parts), OTHERS) * OTHERS
    for first in range(part * length, tl.minimum((part + 1) * length, tokens), OTHERS):
        token = first + tl.arange(0, OTHERS)
        others = Tile(batch, head, token.to(tl.int64), token < tokens)
        queries = load_operand(query, others, channels, HEAD_DIM)
        of_output = load_operand(output_gradient, others, channels, HEAD_DIM)
        log_sum = load_log_sums(log_sums, others)
        product_sum = tl.load(numbers_of(products, others), mask=others.exists, other=0.0)
        tile = tl.load(tile_of_token + token, mask=others.exists, other=0)
        row = batch * plain(sample_stride) + head * tiles + tile
        both = own.exists[:, None] & others.exists[None, :]
        is_exact = tl.load(means.is_exact + row[None, :] * tiles + own.tokens[:, None], mask=both, other=1) != 0
        weights, of_logits = _pair_gradients(
            keys, values, bias, queries, of_output, log_sum, product_sum, scale, PRECISION
        )
        weights = tl.where(is_exact, 0.0, weights)
        of_logits = tl.where(is_exact, 0.0, of_logits)
        of_values = product(operand(weights, number), of_output, of_values, PRECISION)
        of_keys = product(operand(of_logits, number), queries, of_keys, PRECISION)
        of_bias += tl.sum(of_logits, axis=1)
    place = ((batch * layout.heads + head) * tiles + own.tokens) * layout.parts + part
    exists = own.exists[:, None] & (channels < HEAD_DIM)[None, :]
    addresses = place[:, None] * HEAD_DIM + channels[None, :]
    tl.store(key_gradient + addresses, of_keys * (scale / LOG2_E), mask=exists)
    tl.store(value_gradient + addresses, of_values, mask=exists)
    tl.store(bias_gradient + place, of_bias, mask=own.exists)


@triton.jit
def exact_key_value_gradient_kernel(
    query,
    key,
    value,
    key_mask,
    lists,
    means,
    output_gradient,
    log_sums,
    products,
    of_key_means,
    of_value_means,
    key_gradient,
    value_gradient,
    layout,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of some keys and values of one tile: from the queries of its list and from its mean."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    keys = load_operand(key, own, channels, HEAD_DIM)
    values = load_operand(value, own, channels, HEAD_DIM)
    bias = key_bias(key_mask, own, layout)
    of_keys = tl.zeros((OWN, BLOCK_D), tl.float32)
    of_values = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * plain(lists.longest), OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS)
        queries = load_operand(query, others, channels, HEAD_DIM)
        of_output = load_operand(output_gradient, others, channels, HEAD_DIM)
        log_sum = load_log_sums(log_sums, others)
        product_sum = tl.load(numbers_of(products, others), mask=others.exists, other=0.0)
        weights, of_logits = _pair_gradients(
            keys, values, bias, queries, of_output, log_sum, product_sum, scale, PRECISION
        )
        of_values = product(operand(weights, number), of_output, of_values, PRECISION)
        of_keys = product(operand(of_logits, number), queries, of_keys, PRECISION)
    of_keys *= scale / LOG2_E
    if means is not None:
        tiles = tiles_in_grid(layout)
        mean = (batch * layout.heads + head) * tiles + tile
        count = tl.load(means.counts + mean)
        share = token_weight(key_mask, own, layout) / tl.where(count > 0, count, 1.0)
        address = mean * HEAD_DIM + channels
        of_keys += share[:, None] * tl.load(of_key_means + address, mask=channels < HEAD_DIM, other=0.0)[None, :]
        of_values += share[:, None] * tl.load(of_value_means + address, mask=channels < HEAD_DIM, other=0.0)[None, :]
    store_rows(key_gradient, of_keys, own, channels, layout, HEAD_DIM)
    store_rows(value_gradient, of_values, own, channels, layout, HEAD_DIM)


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


@dataclass(frozen=True)
class QuerySide:
    """What the kernel of the queries leaves for those of keys and means."""

    gradient: torch.Tensor
    """Of the queries, (B, N, H, D)."""
    output_gradient: torch.Tensor
    """In the type of the query, (B, N, H, D)."""
    products: torch.Tensor
    """P, float32 (B, N, H, 1)."""


@dataclass(frozen=True)
class MeanGradients:
    """Of means and of their bias, float32, a share of each part of the queries."""

    keys: torch.Tensor
    """(B, H, T, parts, D)."""
    values: torch.Tensor
    """(B, H, T, parts, D)."""
    bias: torch.Tensor
    """(B, H, T, parts)."""

    def added(self) -> "MeanGradients":
        """All parts together, always in the same order: keys and values (B, H, T, D), bias (H,)."""
        return MeanGradients(self.keys.sum(dim=3), self.values.sum(dim=3), self.bias.sum(dim=(0, 2, 3)))


def mean_gradient_launch(
    call: ExactCall, means: Means, output: OutputSide, side: QuerySide, architecture: str | None = None
) -> tuple[Launch, MeanGradients]:
    """Gradients of means and bias from every query that does not meet their tile exactly."""
    plan = pair_plan_of(mean_gradient_kernel, call, architecture)
    batch, tokens, heads, head_dim = call.query.shape
    device, tiles = call.query.device, call.number_of_tiles
    groups = -(-tiles // plan.tiles.own)
    parts = parts_per_block(batch * heads * groups, tokens, plan.tiles.others, plan.processors)
    size = (batch, heads, tiles, parts)
    of_keys, of_values = (allocate((*size, head_dim), torch.float32, device) for _ in range(2))
    gradients = MeanGradients(of_keys, of_values, allocate(size, torch.float32, device))
    everything = inputs(call, lists_of_keys(call), means) | _known(output, side)
    arguments = {name: everything[name] for name in everything if name in mean_gradient_kernel.arg_names} | {
        "tile_of_token": tile_of_token(call),
        "sample_stride": disguised(call.sample_stride),
        "key_gradient": gradients.keys,
        "value_gradient": gradients.values,
        "bias_gradient": gradients.bias,
    }
    return plan.launch(call, arguments, parts, groups), gradients


def key_value_gradient_launch(
    call: ExactCall,
    lists: Lists,
    means: Means | None,
    of_means: MeanGradients | None,
    output: OutputSide,
    side: QuerySide,
    architecture: str | None = None,
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of keys and values (B, N, H, D); ``lists`` are those of queries."""
    plan = pair_plan_of(exact_key_value_gradient_kernel, call, architecture)
    gradients = like(call.key), like(call.value)
    arguments = (
        inputs(call, lists, means)
        | _known(output, side)
        | {
            "of_key_means": of_means.keys if of_means is not None else None,
            "of_value_means": of_means.values if of_means is not None else None,
            "key_gradient": gradients[0],
            "value_gradient": gradients[1],
        }
    )
    return plan.launch(call, arguments, plan.parts(call), call.number_of_tiles), gradients


def _known(output: OutputSide, side: QuerySide) -> dict[str, Rows | Numbers]:
    """What the kernels of keys and means know of the queries' side."""
    return {
        "output_gradient": rows(side.output_gradient),
        "log_sums": numbers(output.log_sum),
        "products": numbers(side.products),
    }
