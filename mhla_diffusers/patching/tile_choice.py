"""Which tiles a patched attention attends to exactly: the part of an MHLA layer that knows."""

import math
from typing import Any

import torch
from torch import nn

from ..attention.blocks import check_layout
from ..attention.parallel.place import Parallel
from ..attention.parallel.tiles import fetch_plan
from ..attention.tile_scores import all_scores, heaviest_pairs, kept_pairs, list_length
from ..attention.tiles import ContentRule, Cut, BlockLists
from ..config import MHLAConfig


class TileChoice(nn.Module):
    """Lists of exact tiles by the rule of the configuration.

    Calibrated lists are kept as a place per pair, the heaviest pairs first with their scores (see
    :func:`mhla_diffusers.attention.tile_scores.heaviest_pairs`), and which of them are exact, so that another share or
    other tile counts need no new calibration.

    Args:
        config: settings with exact tiles.
        heads: H.
    """

    offsets: torch.Tensor
    keys: torch.Tensor
    pairs: torch.Tensor
    scores: torch.Tensor
    is_exact: torch.Tensor

    def __init__(self, config: MHLAConfig, heads: int) -> None:
        super().__init__()
        self.config, self.heads = config, heads
        tiles = 1 if config.block_size is not None else math.prod(config.tiles)
        if config.sparse == "calibrated":
            kept = kept_pairs(heads, tiles)
            self.register_buffer("pairs", torch.zeros(kept, dtype=torch.int32))
            self.register_buffer("scores", torch.zeros(kept, dtype=torch.float16))
            packed = math.ceil(heads * tiles**2 / 8)
            self.register_buffer("is_exact", torch.zeros(packed, dtype=torch.uint8))
        length = tiles if config.share == 1 else 1
        own = torch.arange(tiles)[:, None] if length == 1 else torch.arange(tiles).repeat(tiles, 1)
        self.register_buffer("offsets", torch.arange(heads * tiles + 1) * length, persistent=False)
        self.register_buffer("keys", own.repeat(heads, 1).flatten(), persistent=False)
        self._begins = tuple(length * tiles * head for head in range(heads + 1))
        """Where the lists of every head begin in :attr:`keys`, and the last ones end, on the host."""
        self._kept: dict[Any, BlockLists] = {}
        """Lists of the heads that a process attends with, which keep what was worked out of them."""
        self.is_ready = config.sparse != "calibrated" or config.share == 1
        """Whether there is something to attend to."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.make_lists()

    def forward(self, grid: tuple[int, ...], parallel: Parallel | None = None) -> BlockLists | ContentRule:
        """The lists for a call with a token grid, or the rule by which :func:`mhla_attention` chooses them.

        Args:
            grid: of all tokens.
            parallel: the processes; lists are of the heads that this one attends with.

        Raises:
            ValueError: lists that are yet to be calibrated.
        """
        if not self.is_ready:
            raise ValueError(
                "sparse='calibrated' does not know yet which tiles the heads need: calibrate_sparse(pipe, run), or "
                'apply_mhla(..., calibration=lambda: pipe("a cat", num_inference_steps=4)), or load_mhla() of a patch '
                "that was calibrated. sparse='content' needs no calibration."
            )
        counts = self.counts(grid)
        if isinstance(counts, int) or self.config.sparse == "content":
            return ContentRule(counts, self.config.share, self.config.fits_pooled_bias)
        if parallel is None:
            return BlockLists(counts, self.heads, self.offsets, self.keys)
        return self._own_lists(counts, parallel.heads(self.heads))

    def prepare(self, grid: tuple[int, ...], parallel: Parallel) -> None:
        """Work out for a token grid what needs the values of lists, which torch.compile does not see."""
        lists = self(grid, parallel) if self.is_ready else None
        if isinstance(lists, BlockLists) and parallel.ring.size > 1:
            fetch_plan(lists, grid, parallel.segments(math.prod(grid)), parallel.ring.rank)

    def _own_lists(self, counts: tuple[int, ...], heads: slice) -> BlockLists:
        """The lists of some heads, the same object at every call."""
        place = heads.start, heads.stop, self.keys.device
        if place not in self._kept:
            tiles = math.prod(counts)
            begin, end = self._begins[heads.start], self._begins[heads.stop]
            with torch.inference_mode(False):  # it outlives the call, and others may want gradients
                offsets = self.offsets[heads.start * tiles : heads.stop * tiles + 1] - begin
                self._kept[place] = BlockLists(counts, heads.stop - heads.start, offsets, self.keys[begin:end])
        return self._kept[place]

    def counts(self, grid: tuple[int, ...]) -> Cut:
        """Tile counts on a grid; of tiles along the curve the tokens of each.

        Raises:
            ValueError: lists of the configuration's tile counts, and an axis of the grid that has fewer tokens.
        """
        if self.config.block_size is not None:
            return self.config.block_size
        if self.config.sparse == "content":
            return tuple(min(count, size) for count, size in zip(self.config.tiles, grid, strict=True))
        return check_layout(grid, self.config.tiles, "exact_tiles")[1]

    @property
    def mask(self) -> torch.Tensor:
        """Which pairs are exact, of calibrated lists: bool (H, T, T)."""
        tiles = math.prod(self.config.tiles)
        bits = (self.is_exact[:, None] >> torch.arange(8, device=self.is_exact.device)) & 1
        return bits.flatten()[: self.heads * tiles**2].bool().view(self.heads, tiles, tiles)

    @property
    def share(self) -> float | None:
        """Part of all pairs of tiles that is exact; None for lists that are yet to be calibrated."""
        if not self.is_ready:
            return None
        if self.config.block_size is not None:
            return self.config.share
        tiles = math.prod(self.config.tiles)
        if self.config.sparse == "calibrated":
            return len(self.keys) / (self.heads * tiles**2)
        return list_length(self.config.share, tiles) / tiles

    def all_scores(self) -> torch.Tensor:
        """Scores of all pairs, float32 (H, T, T)."""
        return all_scores(self.pairs, self.scores, self.heads, math.prod(self.config.tiles))

    def keep_scores(self, scores: torch.Tensor) -> None:
        """Keep the heaviest of (H, T, T) scores, which are from 0 to 1."""
        for buffer, found in zip((self.pairs, self.scores), heaviest_pairs(scores), strict=True):
            buffer.copy_(found)

    def choose(self, mask: torch.Tensor) -> None:
        """Attend exactly to the pairs of a mask, bool (H, T, T)."""
        bits = nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
        self.is_exact.copy_((bits << torch.arange(8, device=bits.device)).sum(dim=1))
        self.make_lists()

    def make_lists(self) -> None:
        """Read the lists off the buffers that are saved; nothing to do for lists that do not come from there."""
        self._kept.clear()
        if self.config.sparse != "calibrated" or self.config.share == 1:
            return
        if self.is_exact.is_meta:  # without values, for counting: as long as the share says
            tiles = math.prod(self.config.tiles)
            count = max(round(self.config.share * self.heads * tiles**2), self.heads * tiles)
            self.keys, self.is_ready = torch.zeros(count, dtype=torch.int64, device="meta"), True
            self._begins = tuple(count * head // self.heads for head in range(self.heads + 1))
            return
        lists = BlockLists.from_mask(self.config.tiles, self.mask)
        self.offsets, self.keys, self.is_ready = lists.offsets, lists.keys, bool(len(lists.keys))
        self._begins = tuple(lists.offsets[:: math.prod(self.config.tiles)].tolist())
