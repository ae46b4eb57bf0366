"""One call of the backend: its tensors and settings."""

import math
from dataclasses import dataclass

import torch

from ..blocks import Shape


@dataclass(frozen=True)
class Call:
    """The arguments of both operators, in their order; see :func:`mhla_diffusers.attention.mhla_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    grid: Shape
    blocks: Shape
    feature_map: str
    rotary: torch.Tensor | None
    """(1 or B, N, D) float32 contiguous: (cos, sin) at the places of each channel pair."""
    rope_before: bool
    normalize: bool
    eps: float
    key_mask: torch.Tensor | None
    """(B, N) float32 contiguous."""
    output_norm: torch.Tensor | None
    output_gate: torch.Tensor | None

    @property
    def state_shape(self) -> Shape:
        """(B, H, M, D, D), or (B, H, M, D + 1, D) where the key sum follows the KV summary."""
        batch, _, heads, head_dim = self.query.shape
        return batch, heads, math.prod(self.blocks), head_dim + self.normalize, head_dim
