"""Tiles along the curve, and β, that are found by query and key at every call, without any training.

Both are operators, so that torch.compile takes each as a whole and what they read of tables is never traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .blocks import Shape
from .call import Call
from .eager import without_autocast
from .parallel.collectives import gathered, summed
from .parallel.tiles import OwnTiles
from .rotary import rotated
from .tile_scores import list_length, tiles_by_content
from .tiles import Cut, BlockLists, in_tiles, tile_count, tokens_of_tiles

BIASES = (-3.0, 3.0, 25)
"""β that are tried: the first, the last and how many."""
FITTING_QUERIES = 256
"""Queries of a head that β is fitted on; of fewer than 96 times as many tokens, one in 96 and at least 8."""


def with_chosen_tiles(call: Call) -> Call:
    """With the lists, and β, that are found by query and key, where they are to be."""
    if call.rule is None:
        return call
    rule, batch, heads = call.rule, call.query.shape[0], call.query.shape[2]
    table, size = call.rotary_of_tokens, rule.counts
    if not isinstance(size, int):
        lists = tiles_by_content(call.query, call.key, table, call.grid, size, rule.share, call.first, call.group)
        return replace(call, sparse=lists, by_content=None)
    tiles = tile_count(call.grid, size)
    inputs, place = (call.query, call.key, table, call.key_mask), (call.grid, size, call.first, call.group)
    with torch.no_grad(), without_autocast(call.query.device):
        keys = choose_by_content(*inputs, *place, rule.share)
    offsets = torch.arange(batch * heads * tiles + 1, device=keys.device) * list_length(rule.share, tiles)
    call = replace(call, sparse=BlockLists(size, heads, offsets, keys, tiles), by_content=None)
    if not rule.fit_pooled_bias:
        return call
    others = call.extra
    of_others = (None, None, None) if others is None else (others.key, others.value, others.key_mask)
    with torch.no_grad(), without_autocast(call.query.device):
        bias = fit_pooled_bias(*inputs, *place, call.value, *of_others, keys, len(call.shares))
    return replace(call, pooled_bias=bias)


@dataclass(frozen=True)
class _OwnTokens:
    """The tokens of a process tile by tile, and sums over the tiles of all processes: Q of T tiles."""

    tiles: torch.Tensor | None
    """int64 (Q,): which tiles these are; None for all."""
    tokens: torch.Tensor
    """int64 (Q, L): own tokens."""
    exists: torch.Tensor
    """Bool (Q, L)."""
    count: int
    """T."""
    group: str | None

    @classmethod
    def of(cls, query: torch.Tensor, grid: Shape, cut: Cut, first: int, group: str | None) -> "_OwnTokens":
        count = tile_count(grid, cut)
        if group is not None:
            own = OwnTiles.of(grid, cut, (first, query.shape[1]), query.device)
            return cls(own.tiles, own.tokens, own.exists, count, group)
        return cls(None, *_tiles_on(grid, cut, query.device), count, None)

    def weights(self, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """(1 or B, Q, L), 0 where there is no token."""
        weights = self.exists.to(dtype)[None]
        return weights if mask is None else weights * mask.to(dtype)[:, self.tokens]

    def totals(self, x: torch.Tensor) -> torch.Tensor:
        """(..., Q, C) of the own tokens to (..., T, C) of all."""
        if self.tiles is None:
            return x
        everywhere = x.new_zeros(*x.shape[:-2], self.count, x.shape[-1])
        return summed(everywhere.index_copy(x.ndim - 2, self.tiles, x), self.group)

    def means(self, weights: torch.Tensor, *some: torch.Tensor) -> list[torch.Tensor]:
        """Weighted means over every tile, (B, H, T, D), of (B, H, Q, L, D)."""
        sums = self.totals(weights.sum(dim=-1)[..., None]).clamp_min(torch.finfo(weights.dtype).tiny)
        rows = weights[:, None, :, None]
        return [self.totals((rows @ x).squeeze(-2)) / sums[:, None] for x in some]


@lru_cache(maxsize=64)
def _tiles_on(grid: Shape, cut: Cut, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`tokens_of_tiles` on a device, kept: copying them there at every call would wait for it."""
    tokens, exists = tokens_of_tiles(grid, cut)
    return tokens.to(device), exists.to(device)


_INPUTS = (
    "Tensor query, Tensor key, Tensor? table, Tensor? key_mask, SymInt[] grid, SymInt block_size, SymInt first, "
    "str? group"
)


@torch.library.custom_op(
    "mhla_diffusers::choose_by_content", mutates_args=(), schema=f"({_INPUTS}, float share) -> Tensor"
)
def choose_by_content(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    first: int,
    group: str | None,
    share: float,
) -> torch.Tensor:
    """For every query tile as many key tiles, those that their mean stands for worst.

    To first order a tile's mean is wrong by its softmax weight times the spread of its logits, so for a mean query q a
    key tile with mean k̄ and variance σ² per channel is judged by q·k̄/√D + ½ log Σ_d q_d² σ_d²/D. A tile in which no
    key takes part comes after all others. Processes that share the tokens of a call find the same lists.

    Args:
        query: (B, N, H, D).
        key: (B, N, H, D).
        table: of RoPE, see :func:`mhla_diffusers.attention.rotary.rotary_table`.
        key_mask: (B, N).
        grid: token grid.
        block_size: tokens of a tile.
        first: place on the grid of the first token.
        group: of the processes that hold the grid's tokens between them.
        share: part of all pairs; at least one key tile for every query tile.

    Returns:
        int64 (B H T list length,), ascending within a list.
    """
    dtype, least = torch.promote_types(query.dtype, torch.float32), torch.finfo(torch.float32).tiny
    own, scale = _OwnTokens.of(query, tuple(grid), block_size, first, group), query.shape[-1] ** -0.5
    query, key = (in_tiles(rotated(x, table).to(dtype), own.tokens) for x in (query, key))
    weights = own.weights(key_mask, dtype)
    mean_query = own.means(own.weights(None, dtype), query)[0] * scale
    (mean_key,) = own.means(weights, key)
    mean_of_own = mean_key if own.tiles is None else mean_key[:, :, own.tiles]
    (variance,) = own.means(weights, (key - mean_of_own[:, :, :, None]).square())
    scores = mean_query @ mean_key.mT + (mean_query.square() @ variance.mT).clamp_min(least).log() / 2
    if key_mask is not None:
        is_masked = own.totals(weights.sum(dim=-1)[..., None]) == 0
        scores = scores.masked_fill(is_masked.mT[:, None], torch.finfo(dtype).min)
    return scores.topk(list_length(share, own.count), dim=-1).indices.sort(dim=-1).values.flatten()


@choose_by_content.register_fake
def _choice_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    first: int,
    group: str | None,
    share: float,
) -> torch.Tensor:
    tiles = tile_count(tuple(grid), block_size)
    size = query.shape[0] * query.shape[2] * tiles * list_length(share, tiles)
    return query.new_empty(size, dtype=torch.int64)


@register_flop_formula(torch.ops.mhla_diffusers.choose_by_content)
def _flops(
    query: torch.Size, key: torch.Size, table: Any, key_mask: Any, grid: Any, block_size: int, *_: Any, **__: Any
) -> int:
    """Of the two products of means, for PyTorch's counter."""
    return 4 * query[0] * query[2] * tile_count(tuple(grid), block_size) ** 2 * query[3]


@torch.library.custom_op(
    "mhla_diffusers::fit_pooled_bias",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor value, Tensor? other_key, Tensor? other_value, Tensor? other_mask, Tensor keys,"
    " SymInt processes) -> Tensor",
)
def fit_pooled_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    first: int,
    group: str | None,
    value: torch.Tensor,
    other_key: torch.Tensor | None,
    other_value: torch.Tensor | None,
    other_mask: torch.Tensor | None,
    keys: torch.Tensor,
    processes: int,
) -> torch.Tensor:
    """β with which exact tiles and means come closest to softmax attention.

    On some queries, evenly spread along the tiles, the output of softmax attention over all keys is computed; of the β
    tried the one with the least squared error is taken, for every sample and head.

    Args:
        query: as :func:`choose_by_content`, and so up to ``group``.
        key: likewise.
        table: likewise.
        key_mask: likewise.
        grid: likewise.
        block_size: likewise.
        first: likewise.
        group: likewise.
        value: (B, N, H, D).
        other_key: (B, n, H, D) after RoPE, of extra tokens, to which softmax attends.
        other_value: likewise.
        other_mask: (B, n).
        keys: what :func:`choose_by_content` gave.
        processes: of the group.

    Returns:
        float32 (float64 for float64 inputs) (B, H).
    """
    dtype, device, tokens = torch.promote_types(query.dtype, torch.float32), query.device, query.shape[1]
    tiny, lowest = torch.finfo(dtype).tiny, torch.finfo(dtype).min
    batch, _, heads, head_dim = query.shape
    own = _OwnTokens.of(query, tuple(grid), block_size, first, group)
    some, tile = _fitting_tokens(tuple(grid), block_size, device)
    is_own, here = (some >= first) & (some < first + tokens), (some - first).clamp(0, tokens - 1)
    query = rotated(query[:, here].to(dtype), None if table is None else table[:, here])
    query = summed(query * is_own[:, None, None], group).transpose(1, 2) * head_dim**-0.5
    key, value = (in_tiles(x, own.tokens) for x in (rotated(key.to(dtype), table), value.to(dtype)))
    weights = own.weights(key_mask, dtype)
    mean_key, mean_value = own.means(weights, key, value)
    log_count = own.totals(weights.sum(dim=-1)[..., None]).log().mT

    logits = query @ key.flatten(2, 3).mT + weights.log().flatten(1)[:, None, None]
    of_means = query @ mean_key.mT + log_count[:, None]
    largest = torch.cat([logits, of_means], dim=-1).amax(dim=-1, keepdim=True)
    if group is not None:
        largest = gathered(largest[None], [1] * processes, group).amax(dim=0)
    largest = largest.clamp_min(lowest)
    lists = keys.view(batch, heads, own.count, -1)[:, :, tile]
    is_exact = torch.zeros_like(of_means, dtype=torch.bool).scatter(-1, lists, True)
    is_own_exact = is_exact if own.tiles is None else is_exact[..., own.tiles]
    softmax = (logits - largest).exp().unflatten(-1, own.tokens.shape)
    value = torch.nn.functional.pad(value, (0, 1), value=1).flatten(2, 3)  # the sum of weights is a further channel
    everything, near = (summed(x.flatten(-2) @ value, group) for x in (softmax, softmax * is_own_exact[..., None]))
    far = (of_means - largest).exp().masked_fill(is_exact, 0) @ torch.nn.functional.pad(mean_value, (0, 1), value=1)
    if other_key is not None and other_value is not None:
        logits = query @ other_key.to(dtype).transpose(1, 2).mT - largest
        if other_mask is not None:
            logits = logits + other_mask.to(dtype).log()[:, None, None]
        more = logits.exp() @ torch.nn.functional.pad(other_value.to(dtype).transpose(1, 2), (0, 1), value=1)
        everything, near = everything + more, near + more
    truth = everything[..., :-1] / everything[..., -1:].clamp_min(tiny)
    # what either pulls the output away by, before both are divided by their common sum
    pull, far_pull = (x[..., :-1] - x[..., -1:] * truth for x in (near, far))
    bias = torch.linspace(*BIASES, device=device, dtype=dtype)
    factor = bias.exp()
    squares = (
        pull.square().sum(dim=-1, keepdim=True)
        + 2 * factor * (pull * far_pull).sum(dim=-1, keepdim=True)
        + factor.square() * far_pull.square().sum(dim=-1, keepdim=True)
    )
    total = (near[..., -1:] + factor * far[..., -1:]).clamp_min(tiny**0.5)
    return bias[(squares / total.square()).sum(dim=2).argmin(dim=-1)]


@fit_pooled_bias.register_fake
def _bias_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))


@lru_cache(maxsize=64)
def _fitting_tokens(grid: Shape, cut: Cut, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose queries β is fitted on, evenly spread along the tiles, and their tiles: int64, at most 256."""
    tokens, exists = tokens_of_tiles(grid, cut)
    in_order = tokens[exists]
    number = min(FITTING_QUERIES, max(8, len(in_order) // 96), len(in_order))
    places = ((torch.arange(number) + 0.5) * len(in_order) / number).long()
    tile = torch.arange(len(tokens))[:, None].expand_as(tokens)[exists]
    return in_order[places].to(device), tile[places].to(device)
