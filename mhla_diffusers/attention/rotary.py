"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channel pairs (2i, 2i + 1) of ``x``.

    Args:
        x: (..., D).
        cos: broadcastable to (..., D / 2), one value per pair.
        sin: like ``cos``.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def pair_tables(rotary: Rotary) -> Rotary:
    """(cos, sin) with one value per channel pair: each (..., D) becomes (..., D / 2)."""
    cos, sin = rotary
    return cos[..., 0::2], sin[..., 1::2]
