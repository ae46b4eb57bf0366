"""One call of the operator: everything that travels from :func:`mhla_attention` to the last kernel."""

from dataclasses import dataclass

import torch

from .blocks import Shape
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
    """(1 or B, N, 1, D): what :func:`mhla_diffusers.attention.rotary.rotary_table` makes of (cos, sin)."""
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
