"""One call of the operator: everything that travels from :func:`mhla_attention` to the last kernel."""

from dataclasses import dataclass, replace

import torch

from .blocks import Shape
from .rotary import Rotary, axial_table, rotary_table, table_of_tokens
from .tiles import ExactTiles


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`mhla_diffusers.attention.mhla_attention`, which has checked them and describes them.

    Shapes: B batch, N tokens, H heads, D head dim, M blocks.
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
    """What :func:`mhla_diffusers.attention.rotary.rotary_table` makes of (cos, sin), (1 or B, N, 1, D); with
    ``rotary_axes`` what :func:`mhla_diffusers.attention.rotary.axial_table` makes of them."""
    rope: str = "after"
    normalize: bool = True
    eps: float = 1e-6
    key_mask: torch.Tensor | None = None
    """(B, N)."""
    output_norm: torch.Tensor | None = None
    """(D,)."""
    output_gate: torch.Tensor | None = None
    """(B, N, H, D)."""
    far_field_weight: torch.Tensor | None = None
    """(H,); None for no exact tiles, or for exact tiles without a far field."""
    exact: ExactTiles | None = None
    mean_bias: torch.Tensor | None = None
    """(H,)."""
    rotary_axes: Shape | None = None
    """Channels that turn with each axis of :attr:`grid_3d`; None where RoPE is not that of a grid."""

    @property
    def grid_3d(self) -> Shape:
        """The token grid with three axes; missing ones stand in front, of one token."""
        return (1,) * (3 - len(self.grid)) + self.grid

    @property
    def rotary_of_tokens(self) -> torch.Tensor | None:
        """The table of every token, (1 or B, N, 1, D)."""
        if self.rotary is None or self.rotary_axes is None:
            return self.rotary
        return table_of_tokens(self.rotary, self.grid_3d, self.rotary_axes)


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
