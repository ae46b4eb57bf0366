"""Latents as tokens: patches in raster order, channels slowest, as transformers with packed latents take them."""

from collections.abc import Sequence

from torch import Tensor


def pack(latents: Tensor, patch: Sequence[int]) -> Tensor:
    """Return the patches of latents (B, C, ...) in raster order, each a token: (B, N, C patch), channels slowest."""
    for axis, size in enumerate(patch):
        latents = latents.unflatten(2 + 2 * axis, (-1, size))
    axes = range(len(patch))
    order = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
    return latents.permute(order).flatten(1, len(patch)).flatten(2)


def unpack(tokens: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Undo :func:`pack`: (B, C, ...)."""
    latents = tokens.unflatten(2, (-1, *patch)).unflatten(1, tuple(grid)).movedim(1 + len(grid), 1)
    for axis in range(len(grid)):
        # the axes of the patch that are left come after those of the grid
        latents = latents.movedim(2 + len(grid), 3 + axis).flatten(2 + axis, 3 + axis)
    return latents
