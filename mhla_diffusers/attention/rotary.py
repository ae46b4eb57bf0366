"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""


def rotary_table(rotary: Rotary) -> torch.Tensor:
    """(cos, sin) of every channel pair at the places of the pair: one table (1 or B, N, 1, D)."""
    cos, sin = rotary
    return torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channel pairs (2i, 2i + 1) of ``x``.

    Args:
        x: (..., D).
        table: from :func:`rotary_table`, broadcastable to (..., D).
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotated(x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """(B, N, H, D) after RoPE, if any, computed in float32 (float64 for float64), in the type of ``x``."""
    if table is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rotary(x.to(dtype), table.to(dtype)).to(x.dtype)
