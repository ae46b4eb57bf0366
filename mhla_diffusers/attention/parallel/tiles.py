"""Which exact tiles a process of the ring needs, and who sends it what of them.

All processes know all lists and who holds which tokens, so each knows for itself what every other lacks. P processes;
S, H, T as in :class:`mhla_diffusers.attention.tiles.BlockLists`, L tokens of the longest tile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..blocks import Shape
from ..tiles import Cut, BlockLists, longest_tile, places_of_tokens, row_of_pair, tile_index, tokens_of_tiles
from .collectives import exchanged
from .place import Share

_PLANS = 4
"""Token grids whose plans a list of tiles keeps."""


@dataclass(frozen=True)
class OwnTiles:
    """The tiles that hold tokens of a process, the tokens of others missing in them: Q of T."""

    tiles: torch.Tensor
    """int64 (Q,), ascending."""
    tokens: torch.Tensor
    """int64 (Q, L): own tokens, counted from the first; 0 where there is none."""
    exists: torch.Tensor
    """Bool (Q, L): whether a place holds an own token."""
    places: torch.Tensor
    """int64 (own tokens,): where every own token stands in :attr:`tokens`, read row by row."""

    @classmethod
    def of(cls, grid: Shape, cut: Cut, share: Share, device: torch.device) -> "OwnTiles":
        """Of a share of the tokens of a grid that has this cut."""
        first, count = share
        tokens, exists = tokens_of_tiles(grid, cut)
        exists = exists & (tokens >= first) & (tokens < first + count)
        tiles = exists.any(dim=1).nonzero().flatten()
        rows = torch.zeros(len(tokens), dtype=torch.int64)
        rows[tiles] = torch.arange(len(tiles))
        length = tokens.shape[1]
        places = places_of_tokens(grid, cut)[first : first + count]
        places = rows[places // length] * length + places % length
        exists = exists[tiles]
        found = tiles, (tokens[tiles] - first).where(exists, 0), exists, places
        return cls(*(x.to(device) for x in found))


@dataclass(frozen=True)
class Runs:
    """Numbers that follow each other in runs: an index without an entry of its own for every row."""

    shift: torch.Tensor
    """int64 (runs,): what a run's numbers are more than their places in the index."""
    lengths: torch.Tensor
    """int64 (runs,)."""
    count: int
    """Of all numbers."""

    @classmethod
    def of(cls, begins: torch.Tensor, lengths: torch.Tensor) -> "Runs":
        """Runs that begin at some numbers, (runs,) both."""
        return cls(begins - lengths.cumsum(dim=0) + lengths, lengths, int(lengths.sum()))

    def index(self) -> torch.Tensor:
        """int64 (count,); no device is waited for."""
        shift = torch.repeat_interleave(self.shift, self.lengths, output_size=self.count)
        return shift + torch.arange(self.count, device=shift.device)


@dataclass(frozen=True)
class FetchPlan:
    """How a process gets the keys and values of its lists, and its lists over what it got.

    A row is what one head's token, of one sample where samples have lists of their own, brings. K tiles are needed: a
    tile counts once for every head whose lists hold it. What a process holds of a tile is a run of rows, in a tile with
    its tokens in raster order and nothing between them.
    """

    own: OwnTiles
    """The query tiles."""
    by_tile: torch.Tensor
    """int64 (own tokens,): the own tokens tile by tile."""
    kept: Runs
    """Rows, of (S, H, own tokens tile by tile) read row by row, that this process needs itself."""
    due: Runs
    """Those that it sends, to the first process first."""
    sent: tuple[int, ...]
    """How many rows it sends to every process."""
    received: tuple[int, ...]
    """How many rows every process sends to this one."""
    places: Runs
    """Where the rows that are kept, then those that are received, stand among (K, L) read row by row."""
    tiles: torch.Tensor
    """int64 (K,): s T + the tile, for every tile that is needed, of a head of sample s."""
    offsets: torch.Tensor
    """int64 (S H Q + 1,): as of :class:`BlockLists`, for the query tiles alone."""
    keys: torch.Tensor
    """int64 (pairs,): key tiles of these lists, of T."""
    key_places: torch.Tensor
    """int64 (pairs,): the same, of K."""

    def fetch(self, x: torch.Tensor, samples: int, group: str) -> torch.Tensor:
        """Key tiles out of what all processes hold: the exact tiles of all query tiles.

        A row goes once to every process that needs it, and to no other, so that never more is sent than by gathering
        everything everywhere, which sends every row to all.

        Args:
            x: (B, own tokens, H, C).
            samples: S.
            group: of the processes.

        Returns:
            (B / S, K, L, C), the tokens of a tile first, then 0.
        """
        by_sample = x.index_select(1, self.by_tile).unflatten(0, (samples, -1))  # S, B / S, N, H, C
        rows = by_sample.permute(0, 3, 2, 1, 4).flatten(0, 2)
        others = exchanged(rows.index_select(0, self.due.index()), self.sent, self.received, group)
        here = torch.cat([rows.index_select(0, self.kept.index()), others])
        size = len(self.tiles), self.own.tokens.shape[1]
        found = rows.new_zeros(math.prod(size), *rows.shape[1:]).index_copy(0, self.places.index(), here)
        return found.unflatten(0, size).permute(2, 0, 1, 3)


def fetch_plan(tiles: BlockLists, grid: Shape, shares: Sequence[Share], rank: int) -> FetchPlan:
    """The plan for some lists, which keep it.

    Needs the values of the lists: a device is waited for, at the first call with the same lists alone.

    Args:
        tiles: the lists.
        grid: token grid.
        shares: of all processes.
        rank: which of them this one is.
    """
    place = grid, tuple(shares), rank
    if place not in tiles.plans:
        while len(tiles.plans) >= _PLANS:
            del tiles.plans[next(iter(tiles.plans))]
        with torch.inference_mode(False):  # it outlives the call, and others may want gradients
            tiles.plans[place] = _plan(tiles, grid, shares, rank)
    plan: FetchPlan = tiles.plans[place]
    return plan


def _plan(tiles: BlockLists, grid: Shape, shares: Sequence[Share], rank: int) -> FetchPlan:
    device, count = tiles.keys.device, tiles.tiles
    tile_of = tile_index(grid, tiles.counts).to(device)
    holds = torch.stack([torch.bincount(tile_of[a : a + n], minlength=count) for a, n in shares])
    row = row_of_pair(tiles.offsets, tiles.keys)
    lists, query_tile = row // count, row % count
    target = lists * count + tiles.keys
    needed = _needed(holds > 0, query_tile, target, (len(tiles.offsets) - 1) // count)
    kept, due, sent = _rows_to_give(needed, holds, rank)
    places, received = _places_to_fill(needed[rank], holds, rank, longest_tile(grid, tiles.counts))

    own = OwnTiles.of(grid, tiles.counts, shares[rank], device)
    query_row, of_keys = (x.flatten().cumsum(dim=0) - 1 for x in (holds[rank] > 0, needed[rank]))
    mine = holds[rank, query_tile] > 0
    own_row = lists[mine] * len(own.tiles) + query_row[query_tile[mine]]
    lengths = torch.bincount(own_row, minlength=len(needed[rank]) * len(own.tiles))
    list_, tile = needed[rank].nonzero().unbind(dim=1)
    return FetchPlan(
        own,
        tile_of[shares[rank][0] : sum(shares[rank])].argsort(stable=True),
        kept,
        due,
        sent,
        received,
        places,
        list_ // tiles.heads * count + tile,
        torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)),
        tiles.keys[mine],
        of_keys[target[mine]],
    )


def _rows_to_give(needed: torch.Tensor, holds: torch.Tensor, rank: int) -> tuple[Runs, Runs, tuple[int, ...]]:
    """Rows that this process needs itself, those that it sends to others, and how many to each.

    Args:
        needed: bool (P, S H, T), from :func:`_needed`.
        holds: (P, T), how many tokens of a tile a process has.
        rank: this process.
    """
    begins, tokens = holds[rank].cumsum(dim=0) - holds[rank], holds[rank].sum()
    runs = []
    for of_process in needed:
        list_, tile = of_process.nonzero().unbind(dim=1)
        runs.append(torch.stack([list_ * tokens + begins[tile], holds[rank, tile]]))
    kept, runs[rank] = runs[rank], runs[rank][:, :0]
    return Runs.of(*kept), Runs.of(*torch.cat(runs, dim=1)), tuple(int(lengths.sum()) for _, lengths in runs)


def _places_to_fill(needed: torch.Tensor, holds: torch.Tensor, rank: int, length: int) -> tuple[Runs, tuple[int, ...]]:
    """Where what this process needs stands in the tiles that are needed, and how many rows of it come from each.

    Args:
        needed: bool (S H, T), of this process.
        holds: (P, T), how many tokens of a tile a process has.
        rank: this process, whose own rows come first.
        length: L.
    """
    tile = needed.nonzero()[:, 1]
    lengths = holds[:, tile]
    places = torch.arange(len(tile), device=tile.device) * length + (holds.cumsum(dim=0) - holds)[:, tile]
    order = [rank, *(process for process in range(len(holds)) if process != rank)]
    received = lengths.sum(dim=1).tolist()
    received[rank] = 0
    return Runs.of(places[order].flatten(), lengths[order].flatten()), tuple(received)


def _needed(held: torch.Tensor, query_tile: torch.Tensor, target: torch.Tensor, lists: int) -> torch.Tensor:
    """Bool (P, S H, T): which key tiles every process's lists hold, of every head.

    Args:
        held: (P, T), whether a process has tokens of a tile.
        query_tile: (pairs,), whose list a pair is of.
        target: (pairs,), the key tile of a pair, counted over heads.
        lists: S H.
    """
    needed = torch.zeros(len(held), lists * held.shape[1], dtype=torch.bool, device=held.device)
    for process, tiles in enumerate(held):
        needed[process, target[tiles[query_tile]]] = True
    return needed.view(len(held), lists, -1)
