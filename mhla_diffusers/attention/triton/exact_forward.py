"""Kernels of the exact tiles' forward pass, with their launches.

A program holds some queries of one tile and takes the keys of its list, then the means of all other tiles, as online
softmax attention does. Logits are in base 2. Queries and keys come after RoPE.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .arguments import Layout, Lists, Means, Tile, allocate, rows
from .exact_lists import ExactCall, bitmap, lists_of_keys
from .forward_kernels import token_weight
from .launches import Launch
from .tile import (
    load_operand,
    load_rows,
    numbers_of,
    operand,
    product,
    store_rows,
    to_bfloat16,
)
from .tuning import PairTiling, architecture_of, pair_tiling

LOWEST = torch.finfo(torch.float32).min
"""Log of the sum of weights of a query that attends to nothing."""
_LOWEST = tl.constexpr(LOWEST)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))


@triton.jit
def this_pair_program(layout, TILES_ONLY: tl.constexpr):
    """Batch, head, tile (of T) and part of this program.

    Parts and tiles vary fastest: programs that run together then read the keys of one head, which the cache holds.
    """
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    rest = tl.program_id(0)
    part = 0
    if not TILES_ONLY:
        part = rest % layout.parts
        rest = rest // layout.parts
    tile = rest % tiles
    rest = rest // tiles
    return (rest // layout.heads).to(tl.int64), (rest % layout.heads).to(tl.int64), tile, part


@triton.jit
def tokens_of_tile(lists, batch, head, tile, first, BLOCK: tl.constexpr, LONGEST: tl.constexpr):
    """BLOCK tokens of a tile from place ``first`` on."""
    place = first + tl.arange(0, BLOCK)
    tokens = tl.load(lists.tokens + tile * LONGEST + place, mask=place < LONGEST, other=-1)
    return Tile(batch, head, tl.maximum(tokens, 0).to(tl.int64), tokens >= 0)


@triton.jit
def list_of(lists, batch, head, tile, layout):
    """Row of a tile's list, where it begins and how many tiles it holds."""
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    row = batch * lists.sample_stride + head * tiles + tile
    begin = tl.load(lists.offsets + row)
    return row, begin, (tl.load(lists.offsets + row + 1) - begin).to(tl.int32)


@triton.jit
def listed_tokens(lists, batch, head, begin, length, first, BLOCK: tl.constexpr, LONGEST: tl.constexpr):
    """BLOCK tokens of a list from place ``first`` on, its tiles laid end to end, so that short ones fill a block."""
    place = first + tl.arange(0, BLOCK)
    listed = place < length * LONGEST
    tile = tl.load(lists.tiles + begin + place // LONGEST, mask=listed, other=0).to(tl.int32)
    tokens = tl.load(lists.tokens + tile * LONGEST + place % LONGEST, mask=listed, other=-1)
    return Tile(batch, head, tl.maximum(tokens, 0).to(tl.int64), tokens >= 0)


@triton.jit
def key_bias(key_mask, tile, layout):
    """What is added to the logits of a tile of keys, (tokens,): minus infinity for a key that takes no part."""
    if key_mask is None:
        return tl.where(tile.exists, 0.0, float("-inf"))
    else:
        return tl.log2(token_weight(key_mask, tile, layout))


@triton.jit
def means_at(batch, head, first, layout, BLOCK: tl.constexpr):
    """BLOCK means from tile ``first`` on, as a tile of tokens."""
    tile = first + tl.arange(0, BLOCK)
    return Tile(batch, head, tile.to(tl.int64), tile < layout.blocks_0 * layout.blocks_1 * layout.blocks_2)


@triton.jit
def mean_bias(means, tile, layout):
    """What is added to the logits of means, (means,): β and the log of the number of tokens."""
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    counts = means.counts + (tile.batch * layout.heads + tile.head) * tiles + tile.tokens
    beta = tl.load(means.bias + tile.head) * _LOG2_E
    return tl.log2(tl.load(counts, mask=tile.exists, other=0.0)) + beta


@triton.jit
def unlisted_bias(means, tile, row, layout):
    """:func:`mean_bias`, minus infinity for the tiles that the queries of list ``row`` meet exactly."""
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    is_exact = tl.load(means.is_exact + row * tiles + tile.tokens, mask=tile.exists, other=1)
    return tl.where(is_exact != 0, float("-inf"), mean_bias(means, tile, layout))


@triton.jit
def _attend(queries, keys, values, bias, scale, total, maximum, values_sum, number: tl.constexpr):
    """One step of online softmax attention: (queries,) sum of weights and maximum, (queries, channels) values."""
    square = tl.zeros((queries.shape[0], keys.shape[0]), tl.float32)
    logits = product(queries, tl.trans(keys), square) * scale + bias[None, :]
    largest = tl.maximum(maximum, tl.max(logits, axis=1))
    # where nothing has been seen yet, minus infinity less minus infinity would be NaN
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(maximum - base)
    values_sum = product(operand(weights, number), values, values_sum * shrink[:, None])
    return total * shrink + tl.sum(weights, axis=1), largest, values_sum


@triton.jit(do_not_specialize=["layout"])
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
    LONGEST: tl.constexpr,
):
    """Output of some queries of one tile, and the log of each query's sum of weights."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    batch, head, tile, part = this_pair_program(layout, False)
    channels = tl.arange(0, BLOCK_D)
    own = tokens_of_tile(lists, batch, head, tile, part * OWN, OWN, LONGEST)
    row, begin, length = list_of(lists, batch, head, tile, layout)
    queries = load_operand(query, own, channels, HEAD_DIM)
    total = tl.zeros((OWN,), tl.float32)
    maximum = tl.full((OWN,), float("-inf"), tl.float32)
    values_sum = tl.zeros((OWN, BLOCK_D), tl.float32)
    for first in range(0, length * LONGEST, OTHERS):
        others = listed_tokens(lists, batch, head, begin, length, first, OTHERS, LONGEST)
        keys = load_operand(key, others, channels, HEAD_DIM)
        values = load_operand(value, others, channels, HEAD_DIM)
        bias = key_bias(key_mask, others, layout)
        total, maximum, values_sum = _attend(queries, keys, values, bias, scale, total, maximum, values_sum, number)
    if means is not None:
        for first in range(0, layout.blocks_0 * layout.blocks_1 * layout.blocks_2, OTHERS):
            others = means_at(batch, head, first, layout, OTHERS)
            keys = load_operand(means.key, others, channels, HEAD_DIM)
            values = load_operand(means.value, others, channels, HEAD_DIM)
            bias = unlisted_bias(means, others, row, layout)
            total, maximum, values_sum = _attend(queries, keys, values, bias, scale, total, maximum, values_sum, number)
    seen = total > 0
    store_rows(output, values_sum / tl.where(seen, total, 1.0)[:, None], own, channels, layout, HEAD_DIM)
    log_sum = tl.where(seen, (maximum + tl.log2(total)) * _LN_2, _LOWEST)
    tl.store(numbers_of(log_sums, own), log_sum, mask=own.exists)


@triton.jit(do_not_specialize=["layout"])
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
    LONGEST: tl.constexpr,
):
    """Means of the keys and of the values of one tile, contiguous (B, T, H, D), and the sum of its key mask."""
    batch, head, tile, _ = this_pair_program(layout, True)
    channels = tl.arange(0, BLOCK_D)
    key_sum = tl.zeros((BLOCK_D,), tl.float32)
    value_sum = tl.zeros((BLOCK_D,), tl.float32)
    count = tl.zeros((OTHERS,), tl.float32)
    for first in range(0, LONGEST, OTHERS):
        others = tokens_of_tile(lists, batch, head, tile, first, OTHERS, LONGEST)
        weight = token_weight(key_mask, others, layout)
        key_sum += tl.sum(load_rows(key, others, channels, HEAD_DIM) * weight[:, None], axis=0)
        value_sum += tl.sum(load_rows(value, others, channels, HEAD_DIM) * weight[:, None], axis=0)
        count += weight
    total = tl.sum(count)
    tiles = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
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


class PairShape:
    """Tiles, programs and layout of one kernel for one call."""

    def __init__(self, call: ExactCall, kernel: str, architecture: str | None) -> None:
        query = call.query
        name = architecture or architecture_of(query.device)
        self.call = call
        self.tiles: PairTiling = pair_tiling(kernel, query.shape[3], query.dtype, call.longest_tile, name)

    def launch(self, kernel: Any, arguments: dict[str, Any], parts: int, whole: int) -> Launch:
        """``kernel`` with those of the shared constants that it takes, in ``parts`` programs for each of ``whole``."""
        batch, _, heads, head_dim = self.call.query.shape
        missing = (1,) * (3 - len(self.call.grid))
        constants = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "OWN": self.tiles.own,
            "OTHERS": self.tiles.others,
            "LONGEST": self.call.longest_tile,
        }
        shared = {"layout": Layout._make((heads, *missing, *self.call.grid, *missing, *self.call.counts, parts))}
        taken = {name: value for name, value in constants.items() if name in kernel.arg_names}
        return Launch(kernel, batch * heads * whole * parts, arguments | shared, taken, self.tiles)

    @property
    def parts(self) -> int:
        """Programs that share the tokens of a tile."""
        return -(-self.call.longest_tile // self.tiles.own)


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
    launch = PairShape(call, "means", architecture).launch(means_kernel, arguments, 1, tiles)
    return launch, Means(rows(key_means), rows(value_means), counts, call.mean_bias, bitmap(call))


def exact_launch(
    call: ExactCall, lists: Lists, means: Means | None, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), both float32."""
    shape = PairShape(call, "exact", architecture)
    batch, tokens, heads, _ = call.query.shape
    output = allocate(tuple(call.query.shape), torch.float32, call.query.device)
    log_sum = allocate((batch, heads, tokens), torch.float32, call.query.device).transpose(1, 2)[..., None]
    arguments = inputs(call, lists, means) | {"output": output, "log_sums": rows(log_sum)}
    return shape.launch(exact_kernel, arguments, shape.parts, call.number_of_tiles), output, log_sum


def inputs(call: ExactCall, lists: Lists, means: Means | None) -> dict[str, Any]:
    """What every kernel that walks lists of keys takes."""
    return {
        "query": rows(call.query),
        "key": rows(call.key),
        "value": rows(call.value),
        "key_mask": call.key_mask,
        "lists": lists,
        "means": means,
        "scale": math.log2(math.e) * call.query.shape[3] ** -0.5,
    }


def forward(call: ExactCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator returns."""
    lists = lists_of_keys(call)
    means = run_means(call, lists)
    launch, output, log_sum = exact_launch(call, lists, means)
    launch.run()
    return output, log_sum


def run_means(call: ExactCall, lists: Lists) -> Means | None:
    """The means, where the call wants them."""
    if call.mean_bias is None:
        return None
    launch, means = means_launch(call, lists)
    launch.run()
    return means
