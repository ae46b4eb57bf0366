"""Latents as sequences of tokens, for transformers that take them so."""

from collections.abc import Sequence

import torch


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
