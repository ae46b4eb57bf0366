"""What travels from :func:`mhla_attention` to the last kernel: one :class:`Call`, with block lists and extra tokens.

Block lists say which uniform blocks of keys (:mod:`.layout`, T of them on the grid) every head of every query block
attends to with softmax: they are given, or found by a rule. Extra tokens (text in one sequence with an image, class and
register tokens) have no place on the token grid, so they are in no block of it. They are few, so every query attends to
them with softmax, and they attend to everything with softmax: to the sparse branch they are further blocks that every
list holds.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .layout import Extra, Shape, blocks_of_range
from .parallel.place import Share
from .rope import Rotary, axial_table, rotary_table, rotated, table_of_tokens


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
class ExtraTokens:
    """What extra tokens bring to an attention: n of them, those before the grid first."""

    query: torch.Tensor
    """(B, n, H, D) after RoPE, float32 (float64 for float64 inputs)."""
    key: torch.Tensor
    """Like ``query``."""
    value: torch.Tensor
    """(B, n, H, D) in the type of the input."""
    key_mask: torch.Tensor | None
    """(B, n), where the tokens of the grid have one."""
    before: int
    """How many of the own ones stand before the grid in the sequence."""
    counts: tuple[int, ...] = ()
    """How many are of every process of the call's group; empty where all are own ones."""
    rank: int = 0
    """Which of these processes is this one."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        key_mask: torch.Tensor | None,
        extra: Extra,
    ) -> "ExtraTokens":
        """Out of a whole sequence: query, key and value (B, N, H, D), RoPE (1 or B, N, 1, D), mask (B, N)."""
        table = None if rotary is None else rotary_table((of_extra(rotary[0], extra), of_extra(rotary[1], extra)))
        dtype = torch.promote_types(query.dtype, torch.float32)
        near_query, near_key = (rotated(of_extra(x, extra).to(dtype), table) for x in (query, key))
        mask = None if key_mask is None else of_extra(key_mask, extra)
        return cls(near_query, near_key, of_extra(value, extra), mask, extra[0])

    @property
    def count(self) -> int:
        """N."""
        return self.query.shape[1]

    @property
    def own(self) -> slice:
        """Those of this process, which follow each other."""
        if not self.counts:
            return slice(None)
        return slice(sum(self.counts[: self.rank]), sum(self.counts[: self.rank + 1]))

    def after(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The grid's tokens (B, N, H, D), after RoPE, with these after them, in the types of the grid's."""
        pairs = ((query, self.query), (key, self.key), (value, self.value))
        query, key, value = (torch.cat([x, own.to(x.dtype)], dim=1) for x, own in pairs)
        if key_mask is not None and self.key_mask is not None:
            key_mask = torch.cat([key_mask, self.key_mask.to(key_mask.dtype)], dim=1)
        return query, key, value, key_mask

    def around(self, grid: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The whole sequence, (B, N + n, ...), of the grid's tokens (B, N, ...) and these (B, n, ...)."""
        return torch.cat([own[:, : self.before], grid, own[:, self.before :]], dim=1)


def of_grid(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    """The tokens of the grid of a whole sequence (B, N, ...)."""
    before, after = extra
    return x[:, before : x.shape[1] - after]


def of_extra(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    """The extra tokens of a whole sequence (B, N, ...), side by side: (B, n, ...)."""
    before, after = extra
    return torch.cat([x[:, :before], x[:, x.shape[1] - after :]], dim=1)


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`mhla_diffusers.attention.mhla_attention`, which has checked them and describes them.

    Shapes: B batch, N tokens of the grid, H heads, D head dim, M blocks. What extra tokens bring is
    :attr:`extra` alone.
    """

    query: torch.Tensor
    """(B, N, H, D)."""
    key: torch.Tensor
    """Like ``query``."""
    value: torch.Tensor
    """Like ``query``."""
    mixing: torch.Tensor
    """(M, M) or (H, M, M)."""
    grid: Shape
    blocks: Shape
    feature_map: str = "relu"
    rotary: torch.Tensor | None = None
    """What :func:`mhla_diffusers.attention.rope.rotary_table` makes of (cos, sin), (1 or B, N, 1, D); with
    ``rotary_axes`` what :func:`mhla_diffusers.attention.rope.axial_table` makes of them."""
    rope: str = "after"
    normalize: bool = True
    eps: float = 1e-6
    key_mask: torch.Tensor | None = None
    """(B, N)."""
    output_norm: torch.Tensor | None = None
    """(D,)."""
    output_gate: torch.Tensor | None = None
    """(B, N, H, D)."""
    linear_weight: torch.Tensor | None = None
    """λ, (H,); None for no sparse branch, or for one without a linear branch."""
    lists: BlockLists | None = None
    pooled_bias: torch.Tensor | None = None
    """β, (H,), or (B, H) where it was fitted; None without pooled keys."""
    rotary_axes: Shape | None = None
    """Channels that turn with each axis of :attr:`grid_3d`; None where RoPE is not that of a grid."""
    extra: ExtraTokens | None = None
    """None for no extra tokens. With them, ``sparse=None`` stands for empty lists and
    ``linear_weight=None`` for a λ of 1 then."""
    first: int = 0
    """Place on the grid, in raster order, of the first of the N tokens: they are all of the grid's, or the share of
    them that a process holds, which follow each other."""
    group: str | None = None
    """Name of the process group whose calls hold the tokens of the grid between them; None for all in this call."""
    shares: tuple[Share, ...] = ()
    """Of every process of :attr:`group`, in its order."""
    causal: str | None = None
    """"token", "block" or None; see :mod:`mhla_diffusers.attention.causal`. The tokens then begin with the grid and may
    end before it does."""
    rule: ContentRule | None = None
    """By which :attr:`lists` are chosen where they are not known yet."""

    @property
    def lists_everything(self) -> bool:
        """Whether every query attends to every key with softmax, so that nothing is left to another branch."""
        density = self.rule.density if self.rule is not None else self.lists.density if self.lists is not None else 0
        return density >= 1

    @property
    def rank(self) -> int:
        """Which process of :attr:`group` this one is."""
        return self.shares.index((self.first, self.query.shape[1]))

    @property
    def grid_3d(self) -> Shape:
        """The token grid with three axes; missing ones stand in front, of one token."""
        return (1,) * (3 - len(self.grid)) + self.grid

    @property
    def own_blocks(self) -> slice:
        """The blocks, by number, that the call's tokens may lie in, whose rows of the mixing matrix it needs."""
        if self.first == 0 and self.query.shape[1] == math.prod(self.grid):
            return slice(0, math.prod(self.blocks))
        return blocks_of_range(self.grid, self.blocks, self.first, self.query.shape[1])

    @property
    def rotary_of_tokens(self) -> torch.Tensor | None:
        """The table of every token, (1 or B, N, 1, D)."""
        if self.rotary is None or self.rotary_axes is None:
            return self.rotary
        return table_of_tokens(self.rotary, self.grid_3d, self.rotary_axes)


def split_call(call: Call, rotary: Rotary | None, extra: Extra) -> tuple[Call, Rotary | None]:
    """Take the extra tokens out of a call of a whole sequence, which has no RoPE yet.

    Returns:
        The call of the grid's tokens, with the extra ones, and RoPE of the grid's, for :func:`with_rotary`.
    """
    others = ExtraTokens.of(call.query, call.key, call.value, rotary, call.key_mask, extra)
    query, key, value = (of_grid(x, extra) for x in (call.query, call.key, call.value))
    mask = None if call.key_mask is None else of_grid(call.key_mask, extra)
    if rotary is not None:
        rotary = of_grid(rotary[0], extra), of_grid(rotary[1], extra)
    return replace(call, query=query, key=key, value=value, key_mask=mask, extra=others), rotary


def with_rotary(call: Call, rotary: Rotary, axes: Shape | None) -> Call:
    """A call with RoPE; ``axes`` are channels that turn with each axis of the grid, None for angles of any kind."""
    if axes is None:
        return replace(call, rotary=rotary_table(rotary))
    missing = (0,) * (3 - len(axes))
    return replace(call, rotary=axial_table(rotary, call.grid_3d), rotary_axes=missing + axes)
