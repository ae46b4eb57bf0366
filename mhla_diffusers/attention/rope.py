"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""
_KEPT = "_mhla_table"


def rotary_table(rotary: Rotary | None) -> torch.Tensor | None:
    """Join (cos, sin) of every channel pair at the places of the pair: one table (1 or B, N, 1, D).

    All layers of a forward are handed the same two tensors, so the table is kept on the first of them until one of them
    changes; not where that cannot be known (inference mode), nor while a graph is compiled or captured.
    """
    if rotary is None:
        return None
    cos, sin = rotary
    is_traced = torch.compiler.is_compiling() or (cos.is_cuda and torch.cuda.is_current_stream_capturing())
    if is_traced or cos.is_inference() or sin.is_inference() or cos.requires_grad or sin.requires_grad:
        return torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)
    kept = getattr(cos, _KEPT, None)
    if kept is None or kept[0] is not sin or kept[1] != (cos._version, sin._version):
        with torch.inference_mode(False):
            table = torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)
        kept = sin, (cos._version, sin._version), table
        setattr(cos, _KEPT, kept)
    found: torch.Tensor = kept[2]
    return found


def rotary_of_complex(numbers: torch.Tensor) -> Rotary:
    """RoPE that a model hands over as complex numbers, one for every channel pair.

    Args:
        numbers: (N, D / 2), or (B, N, D / 2) where it differs between samples.
    """
    by_sample = numbers if numbers.ndim == 3 else numbers[None]
    cos, sin = (part.repeat_interleave(2, dim=-1)[:, :, None] for part in (by_sample.real, by_sample.imag))
    return cos, sin


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


def rotated(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Apply RoPE, if any, to (B, N, H, D): computed in float32 (float64 for float64), in the type of ``x``."""
    table = rotary_table(rotary)
    if table is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rotary(x.to(dtype), table.to(dtype)).to(x.dtype)
