"""Rotary position embedding in the layout that diffusers' Wan uses."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (1 or B, N, 1, D): the angle of channel pair (2i, 2i + 1) stands at both channels."""


class SteadyRotary(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin) that stay as they are while this object lives, as during one call; their joined table is kept."""

    table: torch.Tensor | None = None


def steady(rotary: Rotary | None) -> Rotary | None:
    """Return tables as :class:`SteadyRotary`, but where the joined table takes gradients or belongs to a graph."""
    if rotary is None or isinstance(rotary, SteadyRotary):
        return rotary
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    is_traced = is_traced or (rotary[0].is_cuda and torch.cuda.is_current_stream_capturing())
    return rotary if is_traced or any(table.requires_grad for table in rotary) else SteadyRotary(rotary)


def rotary_table(rotary: Rotary | None) -> torch.Tensor | None:
    """Join (cos, sin) of every channel pair at the places of the pair: one table (1 or B, N, 1, D).

    Of :class:`SteadyRotary`, which a patched transformer hands to all layers of a forward, it is joined once.
    """
    if isinstance(rotary, SteadyRotary) and rotary.table is not None:
        return rotary.table
    if rotary is None:
        return None
    table = _joined(*rotary)
    if isinstance(rotary, SteadyRotary):
        rotary.table = table
    return table


def _joined(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)


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
