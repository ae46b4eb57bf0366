"""Which exact tiles a process of the ring needs, and who sends it what of them.

All processes know all lists and who holds which tokens, so each knows for itself what every other lacks. P processes;
S, H, T as in :class:`mhla_diffusers.attention.tiles.ExactTiles`, L tokens of the longest tile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..blocks import Shape, block_index
from ..tiles import ExactTiles, longest_tile, places_of_tokens, row_of_pair, tokens_of_tiles
from .collectives import exchanged
from .place import Share


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
    def of(cls, grid: Shape, counts: Shape, share: Share, device: torch.device) -> "OwnTiles":
        """Of a share of the tokens of a grid that is cut into ``counts``."""
        first, count = share
        tokens, exists = tokens_of_tiles(grid, counts)
        exists = exists & (tokens >= first) & (tokens < first + count)
        tiles = exists.any(dim=1).nonzero().flatten()
        rows = torch.zeros(len(tokens), dtype=torch.int64)
        rows[tiles] = torch.arange(len(tiles))
        length = tokens.shape[1]
        places = places_of_tokens(grid, counts)[first : first + count]
        places = rows[places // length] * length + places % length
        exists = exists[tiles]
        found = tiles, (tokens[tiles] - first).where(exists, 0), exists, places
        return cls(*(x.to(device) for x in found))


@dataclass(frozen=True)
class FetchPlan:
    """How a process gets the keys and values of its lists, and its lists over what it got.

    A row is what one head's token, of one sample where samples have lists of their own, brings. K tiles are needed: a
    tile counts once for every head whose lists hold it.
    """

    own: OwnTiles
    """The query tiles."""
    rows: torch.Tensor
    """int64: rows, of (S, H, own tokens) read row by row, that this process needs itself, then those that it sends."""
    kept: int
    """How many of them it needs itself."""
    sent: tuple[int, ...]
    """How many of them it sends to every process."""
    received: tuple[int, ...]
    """How many rows every process sends to this one."""
    places: torch.Tensor
    """int64: where the rows that are kept, then those that are received, stand among (K, L) read row by row."""
    tiles: torch.Tensor
    """int64 (K,): s T + the tile, for every tile that is needed, of a head of sample s."""
    offsets: torch.Tensor
    """int64 (S H Q + 1,): as of :class:`ExactTiles`, for the query tiles alone."""
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
            (B / S, K, L, C), 0 where there is no token.
        """
        by_sample = x.unflatten(0, (samples, -1))  # S, B / S, N, H, C
        rows = by_sample.permute(0, 3, 2, 1, 4).flatten(0, 2).index_select(0, self.rows)
        others = exchanged(rows[self.kept :], self.sent, self.received, group)
        size = len(self.tiles), self.own.tokens.shape[1]
        found = rows.new_zeros(math.prod(size), *rows.shape[1:])
        found = found.index_copy(0, self.places, torch.cat([rows[: self.kept], others]))
        return found.unflatten(0, size).permute(2, 0, 1, 3)


def fetch_plan(tiles: ExactTiles, grid: Shape, shares: Sequence[Share], rank: int) -> FetchPlan:
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
        tiles.plans[place] = _plan(tiles, grid, shares, rank)
    plan: FetchPlan = tiles.plans[place]
    return plan


def _plan(tiles: ExactTiles, grid: Shape, shares: Sequence[Share], rank: int) -> FetchPlan:
    device, count, length = tiles.keys.device, math.prod(tiles.counts), longest_tile(grid, tiles.counts)
    tile_of = block_index(grid, tiles.counts).to(device)
    held = torch.zeros(len(shares), count, dtype=torch.bool, device=device)
    for process, share in enumerate(shares):
        held[process, _of(share, tile_of)] = True
    row = row_of_pair(tiles.offsets, tiles.keys)
    lists, query_tile = row // count, row % count
    target = lists * count + tiles.keys
    needed = _needed(held, query_tile, target, len(tiles.offsets) // count)
    rows = [_rows(of_process, _of(shares[rank], tile_of)) for of_process in needed]
    kept, rows[rank] = rows[rank], rows[rank][:0]
    own_count = shares[rank][1]

    # of the tiles that this process needs, the number of each
    numbers = needed[rank].flatten().cumsum(dim=0) - 1
    within = (places_of_tokens(grid, tiles.counts) % length).to(device)
    received, places = [], []
    for process, share in enumerate(shares):
        list_, token = (kept if process == rank else _rows(needed[rank], _of(share, tile_of))).unbind(dim=1)
        number = numbers[list_ * count + _of(share, tile_of)[token]]
        received.append(0 if process == rank else len(token))
        places.append(number * length + _of(share, within)[token])
    places.insert(0, places.pop(rank))

    own = OwnTiles.of(grid, tiles.counts, shares[rank], device)
    query_row = torch.zeros(count, dtype=torch.int64, device=device)
    query_row[own.tiles] = torch.arange(len(own.tiles), device=device)
    mine = held[rank][query_tile]
    row = lists[mine] * len(own.tiles) + query_row[query_tile[mine]]
    lengths = torch.bincount(row, minlength=len(needed[rank]) * len(own.tiles))
    list_, tile = needed[rank].nonzero().unbind(dim=1)
    return FetchPlan(
        own,
        torch.cat([some[:, 0] * own_count + some[:, 1] for some in (kept, *rows)]),
        len(kept),
        tuple(len(some) for some in rows),
        tuple(received),
        torch.cat(places),
        list_ // tiles.heads * count + tile,
        torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)),
        tiles.keys[mine],
        numbers[target[mine]],
    )


def _of(share: Share, x: torch.Tensor) -> torch.Tensor:
    return x[share[0] : sum(share)]


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


def _rows(needed: torch.Tensor, tile_of: torch.Tensor) -> torch.Tensor:
    """int64 (rows, 2): head, of S H, and token of those whose tiles (tokens,) are needed, bool (S H, T), in order."""
    return needed[:, tile_of].nonzero()
