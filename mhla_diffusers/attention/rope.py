"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""


def rotary_table(rotary: Rotary | None) -> torch.Tensor | None:
    """Interleave (cos, sin) by channel pair into one table (1 or B, N, 1, D)."""
    if rotary is None:
        return None
    cos, sin = rotary
    return torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)


def rotary_of_complex(numbers: torch.Tensor) -> Rotary:
    """Convert complex RoPE frequencies, (N, D / 2) or (B, N, D / 2), into (cos, sin) tables."""
    by_sample = numbers if numbers.ndim == 3 else numbers[None]
    cos, sin = (part.repeat_interleave(2, dim=-1)[:, :, None] for part in (by_sample.real, by_sample.imag))
    return cos, sin


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channel pairs (2i, 2i + 1) of (..., D) by a :func:`rotary_table` that broadcasts to it."""
    x, table = x.unflatten(-1, (-1, 2)), table.unflatten(-1, (-1, 2))
    is_plain = x.device.type == "cpu" and x.dtype == table.dtype and not torch.compiler.is_compiling()
    if is_plain and _are_complex(x) and _are_complex(table):
        # one pass, a seventh of the time; compilers make one of the other form, and know no complex numbers
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(table)).flatten(-2)
    (even, odd), (cos, sin) = x.unbind(-1), table.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _are_complex(pairs: torch.Tensor) -> bool:
    """Whether PyTorch can view pairs (..., 2) as complex numbers, which begin at even places of the memory."""
    *strides, last = pairs.stride()
    return last == 1 and pairs.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in strides)


def rotated(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Apply RoPE, if any, to (B, N, H, D): computed in float32 (float64 for float64), in the type of ``x``."""
    table = rotary_table(rotary)
    if table is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rotary(x.to(dtype), table.to(dtype)).to(x.dtype)
