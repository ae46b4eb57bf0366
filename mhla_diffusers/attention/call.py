"""One call of the operator: everything that travels from :func:`mhla_attention` to the last kernel."""

import math
from dataclasses import dataclass, replace

import torch

from .block_lists import BlockLists, ContentRule
from .blocks import Shape, blocks_of_range
from .extra import Extra, ExtraTokens, of_grid
from .parallel.place import Share
from .rope import Rotary, axial_table, rotary_table, table_of_tokens


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
    def process_group(self) -> str:
        """:attr:`group`, where there is one.

        Raises:
            ValueError: there is none.
        """
        if self.group is None:
            raise ValueError(
                "This call is of one process; only where mhla_attention(parallel=...) is told, it has a group."
            )
        return self.group

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
    """Take the extra tokens out of query, key, value and key mask of a whole sequence.

    Args:
        call: without RoPE, of the sequence: (B, before + N + after, H, D), mask (B, before + N + after).
        rotary: (cos, sin), each (1 or B, before + N + after, 1, D).
        extra: how many tokens stand before and after those of the grid, not both 0.

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
    """A call with RoPE.

    Args:
        call: without it.
        rotary: (cos, sin), each (1 or B, N, 1, D).
        axes: channels that turn with each axis of the grid; None for angles of any kind.
    """
    if axes is None:
        return replace(call, rotary=rotary_table(rotary))
    missing = (0,) * (3 - len(axes))
    return replace(call, rotary=axial_table(rotary, call.grid_3d), rotary_axes=missing + axes)
