"""The one place where this backend allocates what its kernels write."""

import torch


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled contiguous tensor; the tests fill it with NaN, so that an element no kernel wrote shows."""
    return torch.empty(shape, dtype=dtype, device=device)
