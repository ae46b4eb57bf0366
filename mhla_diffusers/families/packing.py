"""Latents as transformers take them: of unit scale, and for some as sequences of tokens."""

from collections.abc import Sequence
from typing import Any

import torch


def of_unit_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """What an autoencoder gives, (B, C, ...), by its own factors of the scale that transformers are trained on.

    They are a mean and a deviation of every channel, among its buffers or in its configuration, or one shift for all,
    and a ``scaling_factor``; those that it lacks change nothing.
    """
    buffers, config = dict(vae.named_buffers(recurse=False)), vae.config
    mean, deviation = (
        _of_channels(buffers.get(name, config.get(name)), latents) for name in ("latents_mean", "latents_std")
    )
    shift = mean if mean is not None else config.get("shift_factor") or 0.0
    scaled = (latents - shift) * (config.get("scaling_factor") or 1.0)
    return scaled if deviation is None else scaled / deviation


def _of_channels(values: Any, latents: torch.Tensor) -> torch.Tensor | None:
    """(C,) so that it can be combined with latents (B, C, ...); None for none."""
    return None if values is None else torch.as_tensor(values).to(latents).view(-1, *[1] * (latents.ndim - 2))


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
