"""The lists of exact tiles as the kernels walk them: from the queries' side, from the keys' side, and as a bitmap."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..blocks import Shape, block_index
from ..tiles import longest_tile, mask_of_lists, row_of_pair, blocks_of_extra, tokens_of_tiles
from .arguments import Lists, disguised


@dataclass(frozen=True)
class ExactCall:
    """One call of the operator; S, H and T as in :class:`mhla_diffusers.attention.tiles.BlockLists`.

    Extra tokens count among the N, after those of the grid, and their tiles among the T; to the kernels they
    are tokens and tiles as all others are. Lists are those of
    :func:`mhla_diffusers.attention.tiles.lists_with_extra` then.
    """

    query: torch.Tensor
    """(B, N, H, D) after RoPE."""
    key: torch.Tensor
    """Like ``query``."""
    value: torch.Tensor
    """(B, N, H, D)."""
    pooled_bias: torch.Tensor | None
    """(H,) float32 contiguous."""
    key_mask: torch.Tensor | None
    """(B, N) float32 contiguous."""
    offsets: torch.Tensor
    """int64 (S H T + 1,)."""
    tiles: torch.Tensor
    """int64 (pairs,)."""
    grid: Shape
    counts: Shape
    extra: int = 0
    """Extra tokens."""

    @property
    def number_of_tiles(self) -> int:
        """T."""
        return math.prod(self.counts) + blocks_of_extra(self.grid, self.counts, self.extra)

    @property
    def longest_tile(self) -> int:
        """Tokens in the longest tile."""
        return longest_tile(self.grid, self.counts)

    @property
    def sample_stride(self) -> int:
        """Lists from one sample to the next: H T, 0 if all samples share them."""
        of_one = self.query.shape[2] * self.number_of_tiles
        return of_one if len(self.offsets) - 1 > of_one else 0


def lists_of_keys(call: ExactCall) -> Lists:
    """The key tiles of every tile of queries."""
    return _lists(call, call.offsets, call.tiles)


def lists_of_queries(call: ExactCall) -> Lists:
    """The query tiles that meet every tile of keys exactly, ascending."""
    tiles, lists = call.number_of_tiles, len(call.offsets) - 1
    row = row_of_pair(call.offsets, call.tiles)
    target = row - row % tiles + call.tiles
    order = target.argsort(stable=True)
    first = torch.arange(lists + 1, device=target.device)
    return _lists(call, torch.searchsorted(target[order], first), (row % tiles)[order])


def _lists(call: ExactCall, offsets: torch.Tensor, tiles: torch.Tensor) -> Lists:
    tokens = _tables(call.grid, call.counts, call.extra, call.query.device)[0]
    return Lists(offsets, tiles, tokens, disguised(call.sample_stride), disguised(call.longest_tile))


def bitmap(call: ExactCall) -> torch.Tensor:
    """uint8 (S H T, T): 1 where a tile of queries (row) meets a tile of keys (column) exactly."""
    return mask_of_lists(call.offsets, call.tiles, call.number_of_tiles).view(torch.uint8)


def tile_of_token(call: ExactCall) -> torch.Tensor:
    """int32 (N,)."""
    return _tables(call.grid, call.counts, call.extra, call.query.device)[1]


@lru_cache(maxsize=64)
def _tables(grid: Shape, counts: Shape, extra: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of every tile, int32 (T, longest tile) filled up with -1, and the tile of every token, int32 (N,).

    Kept, since every layer and step of a model asks for the same ones. The tokens of several tiles are taken at once,
    and finding them by division would cost a kernel more than reading four bytes for each.
    """
    tokens, exists = tokens_of_tiles(grid, counts, extra)
    filled = tokens.masked_fill(~exists, -1)
    more = math.prod(counts) + torch.arange(extra) // tokens.shape[1]
    tile_of = torch.cat([block_index(grid, counts), more])
    return filled.to(device, torch.int32), tile_of.to(device, torch.int32)
