"""Which tiles are worth being exact: scores of pairs of tiles, kept compactly, and how a budget of pairs is spent.

A score says what attending to a pair exactly is worth, for every head, query tile and key tile: (H, T, T), from 0 to 1
over all layers, which can be compared.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .blocks import Shape
from .mixing import resize_mixing
from .parallel.collectives import summed
from .parallel.tiles import OwnTiles
from .rotary import rotated
from .tiles import BlockLists, in_tiles, tokens_of_tiles

KEPT = 0.2
"""Part of all pairs whose scores are kept: budgets beyond it are spread evenly over the rest."""
FLOOR = 0.5
"""Key tiles that every query tile attends to exactly, in units of the average, and at least one."""
CEILING = 2.0
"""Key tiles that one query tile may attend to exactly, in the same units."""


def kept_pairs(heads: int, tiles: int) -> int:
    """How many pairs of a layer have their score kept."""
    return math.ceil(KEPT * heads * tiles**2)


def heaviest_pairs(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of (H, T, T) scores that are kept, in descending order.

    Returns:
        int32 place in the flattened scores, and the score as float16; each (:func:`kept_pairs`,).
    """
    found = scores.flatten().sort(descending=True, stable=True)
    count = kept_pairs(scores.shape[0], scores.shape[1])
    return found.indices[:count].int(), found.values[:count].half()


def all_scores(pairs: torch.Tensor, values: torch.Tensor, heads: int, tiles: int) -> torch.Tensor:
    """Inverse of :func:`heaviest_pairs`: float32 (H, T, T), pairs that were not kept with a score of 0."""
    scores = torch.zeros(heads * tiles**2, device=pairs.device)
    scores[pairs.long()] = values.float()
    return scores.view(heads, tiles, tiles)


def resize_scores(scores: torch.Tensor, counts: Shape, new_counts: Shape) -> torch.Tensor:
    """Scores (H, T, T) carried over to other tile counts by linear interpolation over tile positions: (H, T', T')."""
    return resize_mixing(scores, counts, new_counts).clamp_min(0)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Place of every key tile in the order of its query tile's scores (H, T, T), the best first: int16 (H, T, T).

    Equal ones follow the query tile's own place, so that no key tile is preferred by all.
    """
    tiles = torch.arange(scores.shape[-1], device=scores.device)
    turned = ((tiles[:, None] + tiles) % len(tiles)).expand_as(scores)
    order = turned.gather(-1, scores.gather(-1, turned).argsort(dim=-1, descending=True, stable=True))
    return torch.empty_like(order, dtype=torch.int16).scatter_(-1, order, tiles.to(torch.int16).expand_as(order))


def priorities(scores: torch.Tensor, rank: torch.Tensor, share: float) -> torch.Tensor:
    """Scores (H, T, T) such that whoever spends by them keeps a floor and a ceiling.

    Every query tile's best key tiles, ``FLOOR`` times the average list, come before everything else, and what exceeds
    ``CEILING`` times the average list after it.
    """
    average = share * scores.shape[-1]
    least, most = max(1, int(FLOOR * average)), max(1, math.ceil(CEILING * average))
    return torch.where(rank < least, math.inf, torch.where(rank < most, scores, -1 / (1 + scores)))


def budget_of(shapes: Sequence[torch.Size], share: float) -> int:
    """Pairs that a share of those of all layers, (H, T, T), is; at least one for every query tile."""
    return max(round(share * sum(shape.numel() for shape in shapes)), sum(heads * tiles for heads, tiles, _ in shapes))


def spend(scores: Sequence[torch.Tensor], share: float) -> list[torch.Tensor]:
    """Spend a budget on the pairs of all layers where it is worth most: bool (H, T, T) of every layer.

    Among pairs of equal score, as those that were not kept, the query tiles of all heads and layers get one in turn.

    Args:
        scores: (H, T, T) of every layer.
        share: part of all pairs that the budget is; every query tile gets at least one key tile.
    """
    orders = [ranks(layer) for layer in scores]
    flat = torch.cat([priorities(*both, share).flatten() for both in zip(scores, orders, strict=True)])
    budget = budget_of([layer.shape for layer in scores], share)
    least = flat.topk(budget).values[-1]
    chosen = flat > least
    equal = (flat == least).nonzero().flatten()
    turn = torch.cat([order.flatten() for order in orders])[equal].argsort(stable=True)
    chosen[equal[turn[: budget - int(chosen.sum())]]] = True
    parts = chosen.split([layer.numel() for layer in scores])
    return [part.view(layer.shape) for part, layer in zip(parts, scores, strict=True)]


def list_length(share: float, tiles: int) -> int:
    """Key tiles of every query tile where all get as many: a share of T, and at least one."""
    return max(1, round(share * tiles))


@torch.no_grad()
def tiles_by_content(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    grid: Shape,
    counts: Shape,
    share: float,
    first: int = 0,
    group: str | None = None,
) -> BlockLists:
    """For every query tile as many key tiles, those that their mean stands for worst.

    To first order a tile's mean is wrong by its softmax weight times the spread of its logits, so for a mean query q a
    key tile with mean k̄ and variance σ² per channel is judged by q·k̄/√D + ½ log Σ_d q_d² σ_d²/D.

    Args:
        query: (B, N, H, D).
        key: (B, N, H, D).
        table: of RoPE, see :func:`mhla_diffusers.attention.rotary.rotary_table`.
        grid: token grid.
        counts: tile counts.
        share: part of all pairs; at least one key tile for every query tile.
        first: place on the grid of the first token.
        group: of the processes that hold the grid's tokens between them; their sums, and so their lists, are the same.
    """
    keys = choose_tiles(query, key, table, grid, counts, share, first, group)
    lists = query.shape[0] * query.shape[2] * math.prod(counts)
    offsets = torch.arange(lists + 1, device=keys.device) * list_length(share, math.prod(counts))
    return BlockLists(counts, query.shape[2], offsets, keys)


@torch.library.custom_op(
    "mhla_diffusers::choose_tiles",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor? table, SymInt[] grid, SymInt[] counts, float share, SymInt first,"
    " str? group) -> Tensor",
)
def choose_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    grid: Sequence[int],
    counts: Sequence[int],
    share: float,
    first: int,
    group: str | None,
) -> torch.Tensor:
    """The key tiles of :func:`tiles_by_content`, int64 (B H T list length,), ascending within a list.

    An operator, so that torch.compile takes it as a whole: it would compile how the tables come about, for the CPU.
    """
    grid, counts = tuple(grid), tuple(counts)
    tokens, exists = _tiles_on(grid, counts, query.device)
    lengths, own = exists.sum(dim=-1, keepdim=True), None
    if group is not None:
        own = OwnTiles.of(grid, counts, (first, query.shape[1]), query.device)
        tokens, exists, lengths = own.tokens, own.exists, lengths[own.tiles]
    weight = (exists / lengths).to(query.dtype)[:, :, None]
    dtype = torch.promote_types(query.dtype, torch.float32)

    def means(*some: torch.Tensor) -> torch.Tensor:
        """Of every tile's tokens, (B, H, T or own tiles, L, D) each, side by side: (B, H, T, Σ D)."""
        here = torch.cat([(weight * x).sum(dim=3, dtype=dtype) for x in some], dim=-1)
        if own is None:
            return here
        size = *here.shape[:2], math.prod(counts), here.shape[-1]
        return summed(here.new_zeros(size).index_copy(2, own.tiles, here), group)

    query, key = (in_tiles(rotated(x, table), tokens) for x in (query, key))
    mean_query, mean_key = means(query, key).chunk(2, dim=-1)
    mean_of_own = mean_key if own is None else mean_key[:, :, own.tiles]
    variance = means((key - mean_of_own[:, :, :, None].to(key.dtype)).square())
    mean_query = mean_query * query.shape[-1] ** -0.5
    spread = (mean_query.square() @ variance.mT).clamp_min(torch.finfo(dtype).tiny)
    scores = mean_query @ mean_key.mT + spread.log() / 2
    return scores.topk(list_length(share, math.prod(counts)), dim=-1).indices.sort(dim=-1).values.flatten()


@lru_cache(maxsize=64)
def _tiles_on(grid: Shape, counts: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`tokens_of_tiles` on a device, kept: copying them there at every call would wait for it."""
    tokens, exists = tokens_of_tiles(grid, counts)
    return tokens.to(device), exists.to(device)


@choose_tiles.register_fake
def _choice_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor | None,
    grid: Sequence[int],
    counts: Sequence[int],
    share: float,
    *_: Any,
) -> torch.Tensor:
    tiles = math.prod(counts)
    size = query.shape[0] * query.shape[2] * tiles * list_length(share, tiles)
    return query.new_empty(size, dtype=torch.int64)


@register_flop_formula(torch.ops.mhla_diffusers.choose_tiles)
def _flops(
    query: torch.Size, key: torch.Size, table: torch.Size | None, grid: Any, counts: Shape, *_: Any, **__: Any
) -> int:
    """Of the two products of means, for PyTorch's counter."""
    return 4 * query[0] * query[2] * math.prod(counts) ** 2 * query[3]
