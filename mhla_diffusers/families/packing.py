"""Latents as sequences of tokens, for transformers that take them so."""

from collections.abc import Sequence
from typing import Any

import torch

from .base import Family
from .sizes import Clip

_PACKED = 2
"""Latents per token along height and width."""


def pack(latents: torch.Tensor, patch: Sequence[int]) -> torch.Tensor:
    """Patches of latents (B, C, ...) in raster order, each a token: (B, N, C patch), channels slowest.

    Args:
        latents: (B, C, ...).
        patch: latents per token along each axis, which divide them.
    """
    for axis, size in enumerate(patch):
        latents = latents.unflatten(2 + 2 * axis, (-1, size))
    axes = range(len(patch))
    order = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
    return latents.permute(order).flatten(1, len(patch)).flatten(2)


def unpack(tokens: torch.Tensor, grid: Sequence[int], patch: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`pack`: (B, C, ...).

    Args:
        tokens: (B, N, C patch).
        grid: token grid.
        patch: latents per token along each axis.
    """
    patches = tokens.unflatten(2, (-1, *patch)).unflatten(1, tuple(grid))
    order = [0, 1 + len(grid)]
    for axis in range(len(grid)):
        order += [1 + axis, 2 + len(grid) + axis]
    latents = patches.permute(order)
    for axis in range(len(grid)):
        latents = latents.flatten(2 + axis, 3 + axis)
    return latents


class PackedFamily(Family):
    """Images whose latents stand in the transformer's input as tokens, 2x2 to each."""

    def spatial_patch(self, transformer: Any) -> int:
        """2, by packing."""
        return _PACKED

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """(height, width) of packed latents."""
        return latents.shape[2] // _PACKED, latents.shape[3] // _PACKED

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, H, W) as the transformer takes them: (B, N, 4 C)."""
        return pack(latents, (_PACKED, _PACKED))

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """Unpacked."""
        return unpack(output, self.token_grid(transformer, latents), (_PACKED, _PACKED))

    def channels(self, transformer: Any) -> int:
        """Those of a token, without packing."""
        return int(transformer.in_channels) // _PACKED**2

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline hands to its autoencoder once it has unpacked it: (C, H, W)."""
        tokens = super().generate_latents(pipe, prompt, clip, steps, guidance, generator)
        return unpack(tokens[None], self.grid_of_clip(pipe, pipe.transformer, clip), (_PACKED, _PACKED))[0]
