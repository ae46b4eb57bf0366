"""Rotary position embedding in the layout that diffusers' Wan uses."""

from collections.abc import Sequence

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""


def rotary_table(rotary: Rotary) -> torch.Tensor:
    """(cos, sin) of every channel pair at the places of the pair: one table (1 or B, N, 1, D)."""
    cos, sin = rotary
    return torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)


def rotary_of_complex(numbers: torch.Tensor) -> Rotary:
    """RoPE that a model hands over as complex numbers, one for every channel pair.

    Args:
        numbers: (N, D / 2), or (B, N, D / 2) where it differs between samples.
    """
    by_sample = numbers if numbers.ndim == 3 else numbers[None]
    cos, sin = (part.repeat_interleave(2, dim=-1)[:, :, None] for part in (by_sample.real, by_sample.imag))
    return cos, sin


def axial_table(rotary: Rotary, grid: Sequence[int]) -> torch.Tensor:
    """Where every channel rotates with one axis of the grid alone: a row per place on each axis, the axes in order.

    Args:
        rotary: (cos, sin), each (1 or B, N, 1, D).
        grid: token grid of three axes, missing ones in front as 1.

    Returns:
        (1 or B, sum of the grid, 1, D), as :func:`rotary_table`. A row holds the channels of all axes, of which
        :func:`table_of_tokens` reads those of its own.
    """
    on_axes = []
    for table in rotary:
        places = table.unflatten(1, tuple(grid))
        on_axes.append(torch.cat([places[:, :, 0, 0], places[:, 0, :, 0], places[:, 0, 0]], dim=1))
    cos, sin = on_axes
    return rotary_table((cos, sin))


def table_of_tokens(table: torch.Tensor, grid: Sequence[int], axes: tuple[int, ...]) -> torch.Tensor:
    """(1 or B, N, 1, D) of an :func:`axial_table`; ``axes`` are the channels that turn with each axis."""
    batch = table.shape[0]
    channels = []
    rows, first = table.split(list(grid), dim=1), 0
    for axis, (on_axis, count) in enumerate(zip(rows, axes, strict=True)):
        size = [batch, 1, 1, 1, 1, count]
        size[1 + axis] = grid[axis]
        part = on_axis[..., first : first + count].reshape(size)
        channels.append(part.expand(batch, *grid, 1, count))
        first += count
    return torch.cat(channels, dim=-1).flatten(1, 3)


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channel pairs (2i, 2i + 1) of ``x``.

    Args:
        x: (..., D).
        table: from :func:`rotary_table`, broadcastable to (..., D).
    """
    x, table = x.unflatten(-1, (-1, 2)), table.unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and x.dtype == table.dtype and not torch.compiler.is_compiling():
        # one pass, a seventh of the time; compilers make one of the other form, and know no complex numbers
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(table)).flatten(-2)
    (even, odd), (cos, sin) = x.unbind(-1), table.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotated(x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """(B, N, H, D) after RoPE, if any, computed in float32 (float64 for float64), in the type of ``x``."""
    if table is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rotary(x.to(dtype), table.to(dtype)).to(x.dtype)
