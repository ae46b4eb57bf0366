"""What sums are kept in."""

from contextlib import AbstractContextManager, nullcontext

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; the meta device, for which shapes and costs are counted, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
