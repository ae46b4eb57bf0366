"""Exact tiles: which tiles of keys every head of every query tile attends to with softmax.

Tiles cut the token grid in one of two ways, their *cut*. Counts per axis cut it as token blocks do
(:mod:`mhla_diffusers.attention.blocks`), raster order. One number cuts the tokens along a Hilbert curve into tiles of
that many (:mod:`mhla_diffusers.attention.layout`), of which only the last is shorter. T is the number of tiles; a tile
of queries and a tile of keys are the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .blocks import Shape, block_index, block_lengths, check_blocks
from .layout import layout_of

Cut = Shape | int
"""Tile counts per axis, or the tokens of every tile along the curve."""


def check_cut(cut: Any, name: str = "block_size") -> Cut:
    """Return a cut after checking it alone.

    Raises:
        ValueError: it is neither counts per axis nor a positive number of tokens; with ``name``.
    """
    if isinstance(cut, int) and not isinstance(cut, bool):
        if cut < 1:
            raise ValueError(f"{name}={cut} must be a positive number of tokens, such as 64.")
        return cut
    return check_blocks(cut, name)


def tile_count(grid: Shape, cut: Cut) -> int:
    """T."""
    return -(-math.prod(grid) // cut) if isinstance(cut, int) else math.prod(cut)


def tile_index(grid: Shape, cut: Cut) -> torch.Tensor:
    """Tile of every token: int64 (N,), tokens in raster order."""
    if isinstance(cut, int):
        return layout_of(grid, cut).rows.long() // cut
    return block_index(grid, cut)


@dataclass(frozen=True)
class BlockLists:
    """A list of key tiles for every head and query tile, of differing lengths: compressed rows.

    Lists hold for all samples of a batch (S = 1) or for each its own (S = B).

    Raises:
        ValueError: the lists do not fit each other or name a tile that is not there; on a device, where looking would
            wait for it, only shapes are checked.
    """

    counts: Cut
    """Tile counts per axis of the token grid, or one number, the tokens of every tile along the curve."""
    heads: int
    """H."""
    offsets: torch.Tensor
    """int64 (S H T + 1,): the list of sample s, head h and query tile a begins at ``offsets[(s H + h) T + a]``."""
    keys: torch.Tensor
    """int64 (pairs,): key tiles, ascending within a list."""
    tiles: int = 0
    """T; left out, the product of the counts of the cut."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What processes worked out of these lists, :func:`mhla_diffusers.attention.parallel.tiles.fetch_plan`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", check_cut(self.counts))
        if not isinstance(self.counts, int):
            object.__setattr__(self, "tiles", math.prod(self.counts))
        rows, tiles = len(self.offsets) - 1, self.tiles
        if tiles < 1 or rows < 1 or rows % (tiles * self.heads):
            raise ValueError(
                f"{rows} lists do not fit {self.heads} heads with {tiles} query tiles each; BlockLists.from_mask() "
                "makes them."
            )
        if self.keys.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_lists(tiles)

    def _check_lists(self, tiles: int) -> None:
        if int(self.offsets[0]) or int(self.offsets[-1]) != len(self.keys) or bool((self.offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets must ascend from 0 to {len(self.keys)}, the number of pairs; they go from "
                f"{int(self.offsets[0])} to {int(self.offsets[-1])}. BlockLists.from_mask() makes them."
            )
        if len(self.keys) and not 0 <= int(self.keys.min()) <= int(self.keys.max()) < tiles:
            raise ValueError(f"keys must be from 0 to {tiles - 1}, the tiles of {self.counts}.")

    @classmethod
    def from_mask(cls, cut: Cut, mask: torch.Tensor) -> "BlockLists":
        """From bool (H, T, T) or (B, H, T, T): whether a head's query tile (row) attends to a key tile exactly.

        Raises:
            ValueError: the mask has another shape.
        """
        tiles = mask.shape[-1] if isinstance(cut, int) else math.prod(cut)
        if mask.ndim not in (3, 4) or tuple(mask.shape[-2:]) != (tiles, tiles):
            raise ValueError(
                f"mask must be (H, {tiles}, {tiles}) or (B, H, {tiles}, {tiles}) for tiles {cut}, got "
                f"{tuple(mask.shape)}."
            )
        rows = mask.bool().flatten(0, -2)
        offsets = torch.cat([rows.new_zeros(1, dtype=torch.int64), rows.sum(dim=1).cumsum(dim=0)])
        return cls(cut, mask.shape[-3], offsets, rows.nonzero()[:, 1], tiles)

    @property
    def samples(self) -> int:
        """S, 1 or B."""
        return (len(self.offsets) - 1) // (self.heads * self.tiles)

    @property
    def share(self) -> float:
        """Part of all pairs of tiles that is exact."""
        return len(self.keys) / ((len(self.offsets) - 1) * self.tiles)

    def mask(self) -> torch.Tensor:
        """The inverse of :meth:`from_mask`: bool (S, H, T, T)."""
        return mask_of_lists(self.offsets, self.keys, self.tiles).view(-1, self.heads, self.tiles, self.tiles)


@dataclass(frozen=True)
class ContentRule:
    """The rule by which lists are chosen at every call (:func:`mhla_diffusers.attention.by_content.with_chosen_tiles`).

    Raises:
        ValueError: the share is not in (0, 1], or the size of a tile is no positive number.
    """

    counts: Cut
    """Tile counts per axis of the token grid, or one number, the tokens of every tile along the curve."""
    share: float
    """Part of all pairs of tiles; every query tile gets at least one key tile."""
    fit_pooled_bias: bool = False
    """Whether β is fitted within the call, :func:`mhla_diffusers.attention.by_content.fit_pooled_bias`; of tiles along
    the curve."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", check_cut(self.counts))
        if self.fit_pooled_bias and not isinstance(self.counts, int):
            raise ValueError(
                f"fit_pooled_bias=True needs tiles along the curve, one number of tokens such as 64, got {self.counts}."
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} of exact tiles must be more than 0 and at most 1.")


def size_along_curve(rule: ContentRule | None) -> int | None:
    """Tokens of a tile of a rule whose tiles stand along the curve; None without one."""
    return rule.counts if rule is not None and isinstance(rule.counts, int) else None


def square_tiles(grid: Sequence[int]) -> Shape:
    """Tile counts of about 64 tokens with equal sides, 8 x 8 of an image.

    As many as fill one block of a matrix product: smaller tiles would be padded to it, and larger ones choose less
    finely what is exact.
    """
    side = 64 ** (1 / len(grid))
    return tuple(max(1, math.ceil(size / side)) for size in grid)


def without_lists(grid: Shape, heads: int, device: torch.device) -> BlockLists:
    """Empty lists, for an attention of which only extra tokens are attended to exactly."""
    counts = square_tiles(grid)
    offsets = torch.zeros(heads * math.prod(counts) + 1, dtype=torch.int64, device=device)
    return BlockLists(counts, heads, offsets, offsets[:0])


def lists_with_extra(tiles: BlockLists, others: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists over T + E tiles, E of them of extra tokens, which every list holds and whose lists hold all.

    Nothing waits for a device, on which the lists may be.

    Args:
        tiles: S H lists of each of T query tiles.
        others: E.

    Returns:
        ``offsets``, int64 (S H (T + E) + 1,), and ``keys`` as those of :class:`BlockLists`.
    """
    count = tiles.tiles
    everything = torch.arange(count + others, device=tiles.keys.device)
    own_lengths = tiles.offsets.diff()
    lengths = torch.nn.functional.pad(own_lengths.view(-1, count) + others, (0, others), value=len(everything))
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(dim=0), (1, 0))
    begins, ends = (x.view(-1, len(everything)) for x in (offsets[:-1], offsets[1:]))
    keys = everything.new_empty(len(tiles.keys) + len(begins) * others * (2 * count + others))
    moved = (begins[:, :count].flatten() - tiles.offsets[:-1]).index_select(0, row_of_pair(tiles.offsets, tiles.keys))
    keys[torch.arange(len(moved), device=moved.device) + moved] = tiles.keys
    keys[ends[:, :count, None] - others + everything[:others]] = everything[count:]
    keys[begins[:, count:, None] + everything] = everything
    return offsets, keys


def row_of_pair(offsets: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 (pairs,): which list a pair stands in, for ``offsets`` and ``keys`` of :class:`BlockLists`."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    # the size is given, since a device would have to be waited for to learn it
    return torch.repeat_interleave(rows, offsets.diff(), output_size=len(keys))


def mask_of_lists(offsets: torch.Tensor, keys: torch.Tensor, tiles: int) -> torch.Tensor:
    """Bool (lists, T): which key tiles are in a list, for ``offsets`` and ``keys`` of :class:`BlockLists`."""
    mask = torch.zeros(len(offsets) - 1, tiles, dtype=torch.bool, device=keys.device)
    # a plain True would be copied to the device, which no CUDA graph records
    mask[row_of_pair(offsets, keys), keys] = mask.new_ones(())
    return mask


def longest_tile(grid: Shape, cut: Cut) -> int:
    """L, tokens of the longest tile."""
    if isinstance(cut, int):
        return cut
    # a list, since torch.compile knows no product of what a generator gives
    return math.prod([-(-size // count) for size, count in zip(grid, cut, strict=True)])


def blocks_of_extra(grid: Shape, cut: Cut, extra: int) -> int:
    """E, how many tiles the extra tokens are cut into: as few as are no longer than the grid's."""
    return -(-extra // longest_tile(grid, cut))


def tokens_of_tiles(grid: Shape, cut: Cut, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of every tile, those of shorter tiles filled up with token 0.

    Args:
        grid: token grid.
        cut: of the tiles.
        outside: extra tokens, which stand after it, in E tiles after the grid's.

    Returns:
        int64 (T + E, L), L the length of the longest tile, and bool of the same shape: whether a place holds a token.
    """
    if isinstance(cut, int):
        order = layout_of(grid, cut, (0, extra)).order.long().view(-1, cut)
        return order.clamp_min(0), order >= 0
    tokens, exists = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    for size, count in zip(grid, cut, strict=True):
        lengths = block_lengths(size, count)
        starts = [sum(lengths[:tile]) for tile in range(count)]
        along = torch.tensor(starts)[:, None] + torch.arange(max(lengths))
        here = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tokens = (tokens[:, None, :, None] * size + along[None, :, None, :]).flatten(0, 1).flatten(1)
        exists = (exists[:, None, :, None] & here[None, :, None, :]).flatten(0, 1).flatten(1)
    if extra:
        more = torch.arange(blocks_of_extra(grid, cut, extra) * tokens.shape[1]).view(-1, tokens.shape[1])
        tokens = torch.cat([tokens, math.prod(grid) + more])
        exists = torch.cat([exists, more < extra])
    return tokens.where(exists, 0), exists


def in_tiles(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) tile by tile, for tokens (T, L) of :func:`tokens_of_tiles`: (B, H, T, L, D)."""
    return x.index_select(1, tokens.flatten()).unflatten(1, tokens.shape).permute(0, 3, 1, 2, 4)


def places_of_tokens(grid: Shape, cut: Cut, extra: int = 0) -> torch.Tensor:
    """int64 (N + n,): where every token stands in the first result of :func:`tokens_of_tiles`, read row by row."""
    if isinstance(cut, int):
        return layout_of(grid, cut, (0, extra)).rows.long()
    tile, within, length = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1
    for size, count in zip(grid, cut, strict=True):
        lengths = block_lengths(size, count)
        tiles = torch.tensor([tile for tile, tokens in enumerate(lengths) for _ in range(tokens)])
        offsets = torch.tensor([offset for tokens in lengths for offset in range(tokens)])
        tile = (tile[:, None] * count + tiles).flatten()
        within = (within[:, None] * max(lengths) + offsets).flatten()
        length *= max(lengths)
    places = tile * length + within
    return torch.cat([places, math.prod(cut) * length + torch.arange(extra)]) if extra else places


def tile_means(
    key: torch.Tensor, value: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean key and value (B, H, T, D) of every tile, and the log of its number of tokens (1 or B, 1, T).

    Args:
        key: (B, H, T, L, D).
        value: (B, H, T, L, D).
        weight: (1 or B, T, L), of every token in its tile.
    """
    count = weight.sum(dim=-1)
    shares = (weight / count.clamp_min(torch.finfo(weight.dtype).tiny)[..., None])[:, None, :, :, None]
    return (shares * key).sum(dim=3), (shares * value).sum(dim=3), count.log()[:, None]
