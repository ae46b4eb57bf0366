"""Kernels of the exact tiles' backward pass, with their launches.

With L the log of a query's sum of weights, p_t = exp(s_t − L) the weight of a key or mean, and P = ∂o · o − ∂L, the
gradient of its logit is ∂s_t = p_t (∂o · v_t − P), as in every softmax attention. The kernel of the queries leaves P;
that of the means gives the gradients of means, which the kernel of the keys hands on to every key of the tile.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .arguments import Lists, Means, Rows, Tile, allocate, like, rows
from .exact_forward import (
    PairShape,
    inputs,
    key_bias,
    list_of,
    listed_tokens,
    mean_bias,
    means_at,
    run_means,
    this_pair_program,
    tokens_of_tile,
    unlisted_bias,
)
from .exact_lists import ExactCall, lists_of_keys, lists_of_queries, tile_of_token
from .forward_kernels import token_weight
from .launches import Launch
from .tile import load_operand, load_rows, numbers_of, operand, product, store_rows, tokens_in
from .tuning import parts_per_block

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _log_sums(log_sums, tile):
    """L in base 2; 0 for a query that attends to nothing, whose weights are 0 whatever they are divided by."""
    log_sum = tl.load(numbers_of(log_sums, tile), mask=tile.exists, other=float("inf"))
    return tl.where(log_sum < -1e38, 0.0, log_sum * _LOG2_E)


@triton.jit
def _query_step(queries, of_output, keys, values, bias, scale, log_sum, product_sum, gradient, number: tl.constexpr):
    square = tl.zeros((queries.shape[0], keys.shape[0]), tl.float32)
    logits = product(queries, tl.trans(keys), square) * scale + bias[None, :]
    weights = tl.exp2(logits - log_sum[:, None])
    of_logits = weights * (product(of_output, tl.trans(values), square) - product_sum[:, None])
    return product(operand(of_logits, number), keys, gradient)


@triton.jit(do_not_specialize=["layout"])
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
    LONGEST: tl.constexpr,
):
    """Gradient of some queries of one tile; P, and the output's gradient in the type of the tensor cores."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN, LONGEST)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    # rounded before P too: what rounding adds to ∂o · v_t, it then adds to P as well, and most of it cancels
    of_output = operand(load_rows(output_gradient, own, channels, HEAD_DIM), number)
    product_sum = tl.sum(of_output.to(tl.float32) * load_rows(output, own, channels, HEAD_DIM), axis=1)
    if of_log_sums is not None:
        product_sum -= tl.load(numbers_of(of_log_sums, own), mask=own.exists, other=0.0)
    tl.store(numbers_of(products, own), product_sum, mask=own.exists)
    store_rows(rounded_gradient, of_output, own, channels, layout, HEAD_DIM)
    queries = load_operand(query, own, channels, HEAD_DIM)
    log_sum = _log_sums(log_sums, own)
    gradient = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * LONGEST, OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS, LONGEST)
        keys = load_operand(key, others, channels, HEAD_DIM)
        values = load_operand(value, others, channels, HEAD_DIM)
        bias = key_bias(key_mask, others, layout)
        gradient = _query_step(queries, of_output, keys, values, bias, scale, log_sum, product_sum, gradient, number)
    if means is not None:
        for first in range(0, layout.blocks_0 * layout.blocks_1 * layout.blocks_2, OTHERS):
            others = means_at(batch, head, first, layout, OTHERS)
            keys = load_operand(means.key, others, channels, HEAD_DIM)
            values = load_operand(means.value, others, channels, HEAD_DIM)
            bias = unlisted_bias(means, others, row, layout)
            gradient = _query_step(
                queries, of_output, keys, values, bias, scale, log_sum, product_sum, gradient, number
            )
    store_rows(query_gradient, gradient * (scale / _LOG2_E), own, channels, layout, HEAD_DIM)


@triton.jit
def _pair_gradients(keys, values, bias, queries, of_output, log_sum, product_sum, scale):
    """Weights and gradients of logits of keys (rows) and queries (columns)."""
    square = tl.zeros((keys.shape[0], queries.shape[0]), tl.float32)
    logits = product(keys, tl.trans(queries), square) * scale + bias[:, None]
    weights = tl.exp2(logits - log_sum[None, :])
    return weights, weights * (product(values, tl.trans(of_output), square) - product_sum[None, :])


@triton.jit(do_not_specialize=["layout"])
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
):
    """Gradients of some means from one part of all queries: (B, H, T, parts, D), and of the bias (B, H, T, parts)."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
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
    keys = load_operand(means.key, own, channels, HEAD_DIM)
    values = load_operand(means.value, own, channels, HEAD_DIM)
    bias = mean_bias(means, own, layout)
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
        log_sum = _log_sums(log_sums, others)
        product_sum = tl.load(numbers_of(products, others), mask=others.exists, other=0.0)
        tile = tl.load(tile_of_token + token, mask=others.exists, other=0)
        row = batch * sample_stride + head * tiles + tile
        both = own.exists[:, None] & others.exists[None, :]
        is_exact = tl.load(means.is_exact + row[None, :] * tiles + own.tokens[:, None], mask=both, other=1) != 0
        weights, of_logits = _pair_gradients(keys, values, bias, queries, of_output, log_sum, product_sum, scale)
        weights = tl.where(is_exact, 0.0, weights)
        of_logits = tl.where(is_exact, 0.0, of_logits)
        of_values = product(operand(weights, number), of_output, of_values)
        of_keys = product(operand(of_logits, number), queries, of_keys)
        of_bias += tl.sum(of_logits, axis=1)
    place = ((batch * layout.heads + head) * tiles + own.tokens) * layout.parts + part
    exists = own.exists[:, None] & (channels < HEAD_DIM)[None, :]
    addresses = place[:, None] * HEAD_DIM + channels[None, :]
    tl.store(key_gradient + addresses, of_keys * (scale / _LOG2_E), mask=exists)
    tl.store(value_gradient + addresses, of_values, mask=exists)
    tl.store(bias_gradient + place, of_bias, mask=own.exists)


@triton.jit(do_not_specialize=["layout"])
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
    LONGEST: tl.constexpr,
):
    """Gradients of some keys and values of one tile: from the queries of its list and from its mean."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN, LONGEST)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    keys = load_operand(key, own, channels, HEAD_DIM)
    values = load_operand(value, own, channels, HEAD_DIM)
    bias = key_bias(key_mask, own, layout)
    of_keys = tl.zeros((OWN, BLOCK_D), tl.float32)
    of_values = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * LONGEST, OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS, LONGEST)
        queries = load_operand(query, others, channels, HEAD_DIM)
        of_output = load_operand(output_gradient, others, channels, HEAD_DIM)
        log_sum = _log_sums(log_sums, others)
        product_sum = tl.load(numbers_of(products, others), mask=others.exists, other=0.0)
        weights, of_logits = _pair_gradients(keys, values, bias, queries, of_output, log_sum, product_sum, scale)
        of_values = product(operand(weights, number), of_output, of_values)
        of_keys = product(operand(of_logits, number), queries, of_keys)
    of_keys *= scale / _LOG2_E
    if means is not None:
        tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
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


def query_gradient_launch(
    call: ExactCall, lists: Lists, means: Means | None, output: OutputSide, architecture: str | None = None
) -> tuple[Launch, QuerySide]:
    """Gradient of the queries, and what the other kernels need."""
    shape = PairShape(call, "exact_query_gradient", architecture)
    side = QuerySide(like(call.query), like(call.query), _like_log_sum(call))
    arguments = inputs(call, lists, means) | {
        "output": rows(output.output),
        "output_gradient": rows(output.output_gradient),
        "log_sums": rows(output.log_sum),
        "of_log_sums": rows(output.log_sum_gradient) if output.log_sum_gradient is not None else None,
        "query_gradient": side.gradient,
        "rounded_gradient": side.output_gradient,
        "products": rows(side.products),
    }
    return shape.launch(exact_query_gradient_kernel, arguments, shape.parts, call.number_of_tiles), side


def mean_gradient_launch(
    call: ExactCall, means: Means, output: OutputSide, side: QuerySide, architecture: str | None = None
) -> tuple[Launch, MeanGradients]:
    """Gradients of means and bias from every query that does not meet their tile exactly."""
    shape = PairShape(call, "mean_gradient", architecture)
    batch, tokens, heads, head_dim = call.query.shape
    device, tiles = call.query.device, call.number_of_tiles
    groups = -(-tiles // shape.tiles.own)
    parts = parts_per_block(batch * heads * groups, tokens, shape.tiles.others, device)
    size = (batch, heads, tiles, parts)
    of_keys, of_values = (allocate((*size, head_dim), torch.float32, device) for _ in range(2))
    gradients = MeanGradients(of_keys, of_values, allocate(size, torch.float32, device))
    everything = inputs(call, lists_of_keys(call), means) | _known(output, side)
    arguments = {name: everything[name] for name in everything if name in mean_gradient_kernel.arg_names} | {
        "tile_of_token": tile_of_token(call),
        "sample_stride": call.sample_stride,
        "key_gradient": gradients.keys,
        "value_gradient": gradients.values,
        "bias_gradient": gradients.bias,
    }
    return shape.launch(mean_gradient_kernel, arguments, parts, groups), gradients


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
    shape = PairShape(call, "exact_key_value_gradient", architecture)
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
    return shape.launch(exact_key_value_gradient_kernel, arguments, shape.parts, call.number_of_tiles), gradients


def _known(output: OutputSide, side: QuerySide) -> dict[str, Rows]:
    """What the kernels of keys and means know of the queries' side."""
    return {
        "output_gradient": rows(side.output_gradient),
        "log_sums": rows(output.log_sum),
        "products": rows(side.products),
    }


def _like_log_sum(call: ExactCall) -> torch.Tensor:
    """float32 (B, N, H, 1) whose tokens lie side by side."""
    batch, tokens, heads, _ = call.query.shape
    return allocate((batch, heads, tokens), torch.float32, call.query.device).transpose(1, 2)[..., None]


def backward(call: ExactCall, output: OutputSide) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and mean_bias, which is empty where there are no means."""
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
