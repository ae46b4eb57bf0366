"""What travels from :func:`mhla_attention` to the last kernel: one :class:`Call`.

Block lists say which uniform blocks of keys (:mod:`.layout`, T of them on the grid) every head of every query block
attends to with softmax: they are given, or found by a rule. Extra tokens (text in one sequence with an image, class and
register tokens) have no place on the token grid, so they are in no block of it. They are few, so every query attends to
them with softmax, and they attend to everything with softmax: to the sparse branch they are further blocks that every
list holds.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .layout import Extra, Shape, block_count, blocks_of_range
from .parallel.place import Parallel
from .rope import Rotary


def check_block_size(block_size: Any) -> int:
    """Return ``block_size``, if it is a positive number."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive number of tokens, such as 64.")
    return block_size


def list_length(density: float, blocks: int) -> int:
    """Key blocks of every query block where all get as many: a part of T, and at least one."""
    return max(1, round(density * blocks))


@dataclass(frozen=True)
class ContentRule:
    """Lists are chosen by query and key at every call (:func:`mhla_diffusers.attention.sparse.choose_by_content`)."""

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
            begin, end = int(self.offsets[0]), int(self.offsets[-1])
            if begin or end != len(self.keys) or bool((self.offsets.diff() < 0).any()):
                raise ValueError(
                    f"offsets must ascend from 0 to {len(self.keys)}, the number of pairs; they go from {begin} to "
                    f"{end}. BlockLists.from_mask() makes them."
                )
            if end and not 0 <= int(self.keys.min()) <= int(self.keys.max()) < self.blocks:
                raise ValueError(f"keys must be from 0 to {self.blocks - 1}, the blocks of the grid.")
        if self.longest < 0:
            object.__setattr__(self, "longest", int(self.offsets.diff().max()))

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


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`mhla_diffusers.attention.mhla_attention`, which describes them.

    N tokens of the sequence, those of the grid in raster order between ``extra[0]`` tokens before and ``extra[1]``
    after them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    grid: Shape
    blocks: Shape
    feature_map: str = "relu"
    rotary: Rotary | None = None
    rope: str = "after"
    normalize: bool = True
    eps: float = 1e-6
    key_mask: torch.Tensor | None = None
    output_norm: torch.Tensor | None = None
    output_gate: torch.Tensor | None = None
    linear_weight: torch.Tensor | None = None
    sparse: BlockLists | ContentRule | None = None
    pooled_bias: torch.Tensor | None = None
    """β, (H,), or (B, H) where it was fitted."""
    extra: Extra = (0, 0)
    parallel: Parallel | None = None
    causal: str | None = None
    first: int = 0
    """Place on the grid of the first grid token, which a share of the tokens or a part of a sequence begins with."""

    @property
    def tokens(self) -> int:
        """Grid tokens of the call."""
        return self.query.shape[1] - sum(self.extra)

    @property
    def group(self) -> str | None:
        """Name of the ring of processes whose calls hold the grid's tokens between them; None for all in this call."""
        return None if self.parallel is None or self.parallel.ring.size == 1 else self.parallel.ring.name

    @property
    def lists_everything(self) -> bool:
        """Whether every query attends to every key with softmax, so that nothing is left to another branch."""
        if isinstance(self.sparse, ContentRule):
            blocks = block_count(self.grid, self.sparse.block_size)
            return list_length(self.sparse.density, blocks) == blocks
        return self.sparse is not None and self.sparse.density == 1

    @property
    def own_blocks(self) -> slice:
        """Numbers of the MHLA blocks that the call's tokens may lie in: the rows of the mixing matrix that it needs."""
        if self.first == 0 and self.tokens == math.prod(self.grid):
            return slice(0, math.prod(self.blocks))
        return blocks_of_range(self.grid, self.blocks, self.first, self.tokens)

    def on_grid(self, x: torch.Tensor) -> torch.Tensor:
        """Take the grid's tokens out of a sequence (B, N, ...)."""
        return x[:, self.extra[0] : x.shape[1] - self.extra[1]] if any(self.extra) else x

    def extra_last(self, x: torch.Tensor) -> torch.Tensor:
        """Move the extra tokens of a sequence (B, N, ...) behind the grid's, those before it first."""
        before, end = self.extra[0], x.shape[1] - self.extra[1]
        return torch.cat([x[:, before:end], x[:, :before], x[:, end:]], dim=1) if before else x

    def in_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`extra_last`."""
        before, end = self.extra[0], x.shape[1] - sum(self.extra)
        parts = x[:, end : end + before], x[:, :end], x[:, end + before :]
        return torch.cat(parts, dim=1) if before else x


class Backend(Protocol):
    """The functions of a backend, a module: :mod:`.eager` or :mod:`.triton.backend`."""

    def linear(self, call: Call) -> torch.Tensor:
        """MHLA alone: (B, N, H, D); over a ring of processes the states are summed."""

    def states(self, call: Call) -> torch.Tensor:
        """KV states, and to normalise key sums as a last row, of the call's tokens: (B, H, M, D + normalize, D)."""

    def read(self, call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Output (B, N, H, D) and, to normalise, normaliser (B, N, H, 1), from the states of all tokens."""

    def sparse(self, call: Call) -> torch.Tensor:
        """The sparse branch, to extra tokens too, merged with MHLA where there is λ: (B, N, H, D)."""

    def own_block(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention within the own frame block: output (B, N, H, D) and LSE (B, N, H, 1), in sum types."""
