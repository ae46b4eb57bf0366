"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""
_KEPT = "_mhla_table"


def rotary_table(rotary: Rotary | None) -> torch.Tensor | None:
    """Join (cos, sin) of every channel pair at the places of the pair: one table (1 or B, N, 1, D).

    Where all layers of a forward are handed the same two tensors, as by Wan and SkyReels, one table serves them: it is
    kept on the first of the two until PyTorch counts a change of either, which it does not of one through ``.data`` or
    NumPy. Models that make new tensors for every layer have a table for each. None is kept where changes are not
    counted (inference mode), nor while a graph is compiled or captured or a transform of ``torch.func`` is active.
    """
    if rotary is None:
        return None
    cos, sin = rotary
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    is_traced = is_traced or (cos.is_cuda and torch.cuda.is_current_stream_capturing())
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


def in_all_rows(rotary: Rotary | None, tokens: int) -> Rotary | None:
    """Tables of one row for all N tokens, which broadcast, as tables of N rows."""
    if rotary is None or tokens == 1 or (rotary[0].shape[1] != 1 and rotary[1].shape[1] != 1):
        return rotary
    cos, sin = (table.expand(-1, tokens, -1, -1) for table in rotary)
    return cos, sin


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
    is_plain = x.device.type == "cpu" and x.dtype == table.dtype and not torch.compiler.is_compiling()
    if is_plain and _are_complex(x) and _are_complex(table):
        # one pass, a seventh of the time; compilers make one of the other form, and know no complex numbers
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(table)).flatten(-2)
    (even, odd), (cos, sin) = x.unbind(-1), table.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _are_complex(pairs: torch.Tensor) -> bool:
    """Whether PyTorch can view pairs (..., 2) as complex numbers, which begin at even places of the memory."""
    if torch._C._functorch.is_batchedtensor(pairs):  # vmap's, which hides the stride of its own axis
        return False
    *strides, last = pairs.stride()
    return last == 1 and pairs.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in strides)


def rotated(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Apply RoPE, if any, to (B, N, H, D): computed in float32 (float64 for float64), in the type of ``x``."""
    table = rotary_table(rotary)
    if table is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rotary(x.to(dtype), table.to(dtype)).to(x.dtype)
