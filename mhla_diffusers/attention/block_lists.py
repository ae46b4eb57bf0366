"""Which blocks of keys every head of every query block attends to with softmax: given lists, or the rule for them.

Blocks are the uniform ones of :mod:`mhla_diffusers.attention.layout`, T of them on the grid; a block of queries and a
block of keys are the same tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch


def check_block_size(block_size: Any) -> int:
    """Return ``block_size`` after checking it alone.

    Raises:
        ValueError: it is no positive number.
    """
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive number of tokens, such as 64.")
    return block_size


def list_length(density: float, blocks: int) -> int:
    """Key blocks of every query block where all get as many: a part of T, and at least one."""
    return max(1, round(density * blocks))


@dataclass(frozen=True)
class ContentRule:
    """Lists are chosen by query and key at every call (:func:`mhla_diffusers.attention.sparse.choose_by_content`).

    Raises:
        ValueError: the density is not in (0, 1], or the block size is no positive number.
    """

    block_size: int
    """Tokens of a block."""
    density: float
    """Part of all pairs of blocks that is listed; every query block gets at least one key block."""
    fit_pooled_bias: bool = False
    """Whether β is fitted within the call, :func:`mhla_diffusers.attention.sparse.fit_pooled_bias`."""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be more than 0 and at most 1.")


@dataclass(frozen=True)
class BlockLists:
    """A list of key blocks for every head and query block, of differing lengths: compressed rows.

    Lists hold for all samples of a batch (S = 1) or for each its own (S = B).

    Raises:
        ValueError: the lists do not fit each other or name a block that is not there; on a device, where looking would
            wait for it, only shapes are checked.
    """

    block_size: int
    """Tokens of a block."""
    heads: int
    """H."""
    offsets: torch.Tensor
    """int64 (S H T + 1,): the list of sample s, head h and query block a begins at ``offsets[(s H + h) T + a]``."""
    keys: torch.Tensor
    """int64 (pairs,): key blocks, ascending within a list."""
    blocks: int
    """T."""
    longest: int = -1
    """Length of the longest list; left out, it is looked up, for which a device is waited for."""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        rows = len(self.offsets) - 1
        if self.blocks < 1 or rows < 1 or rows % (self.blocks * self.heads):
            raise ValueError(
                f"{rows} lists do not fit {self.heads} heads with {self.blocks} query blocks each; "
                "BlockLists.from_mask() makes them."
            )
        if self.keys.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_lists()
        if self.longest < 0:
            object.__setattr__(self, "longest", int(self.offsets.diff().max()))

    def _check_lists(self) -> None:
        if int(self.offsets[0]) or int(self.offsets[-1]) != len(self.keys) or bool((self.offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets must ascend from 0 to {len(self.keys)}, the number of pairs; they go from "
                f"{int(self.offsets[0])} to {int(self.offsets[-1])}. BlockLists.from_mask() makes them."
            )
        if len(self.keys) and not 0 <= int(self.keys.min()) <= int(self.keys.max()) < self.blocks:
            raise ValueError(f"keys must be from 0 to {self.blocks - 1}, the blocks of the grid.")

    @classmethod
    def from_mask(cls, block_size: int, mask: torch.Tensor) -> "BlockLists":
        """From bool (H, T, T) or (B, H, T, T): whether a head's query block (row) attends to a key block.

        Raises:
            ValueError: the mask has another shape.
        """
        if mask.ndim not in (3, 4) or mask.shape[-2] != mask.shape[-1]:
            raise ValueError(f"mask must be (H, T, T) or (B, H, T, T) for T blocks, got {tuple(mask.shape)}.")
        rows = mask.bool().flatten(0, -2)
        offsets = torch.cat([rows.new_zeros(1, dtype=torch.int64), rows.sum(dim=1).cumsum(dim=0)])
        return cls(block_size, mask.shape[-3], offsets, rows.nonzero()[:, 1], mask.shape[-1])

    @classmethod
    def from_choice(cls, block_size: int, keys: torch.Tensor) -> "BlockLists":
        """From int64 (S, H, T, n), lists that are all equally long; nothing is waited for."""
        _, heads, blocks, length = keys.shape
        offsets = torch.arange(keys.numel() // length + 1, device=keys.device) * length
        return cls(block_size, heads, offsets, keys.flatten(), blocks, length)

    @classmethod
    def empty(cls, block_size: int, heads: int, blocks: int, device: torch.device) -> "BlockLists":
        """Lists without an entry."""
        offsets = torch.zeros(heads * blocks + 1, dtype=torch.int64, device=device)
        return cls(block_size, heads, offsets, offsets[:0], blocks, 0)

    @property
    def samples(self) -> int:
        """S, 1 or B."""
        return (len(self.offsets) - 1) // (self.heads * self.blocks)

    @property
    def density(self) -> float:
        """Part of all pairs of blocks that is listed."""
        return len(self.keys) / ((len(self.offsets) - 1) * self.blocks)

    def padded(self) -> torch.Tensor:
        """All lists filled up with -1 to the longest: int64 (S, H, T, n). Nothing is waited for."""
        place = torch.arange(self.longest, device=self.keys.device)
        entries = self.keys[(self.offsets[:-1, None] + place).clamp_max(len(self.keys) - 1)]
        entries = entries.where(place < self.offsets.diff()[:, None], -1)
        return entries.view(self.samples, self.heads, self.blocks, self.longest)

    def mask(self) -> torch.Tensor:
        """The inverse of :meth:`from_mask`: bool (S, H, T, T)."""
        return mask_of_lists(self.padded(), self.blocks)


def mask_of_lists(lists: torch.Tensor, blocks: int) -> torch.Tensor:
    """Bool (..., T): which blocks are in lists (..., n), whose entries of -1 stand for none."""
    mask = torch.zeros(*lists.shape[:-1], blocks + 1, dtype=torch.bool, device=lists.device)
    # -1 is put behind the last block
    return mask.scatter_(-1, lists.where(lists >= 0, blocks), value=True)[..., :blocks]
