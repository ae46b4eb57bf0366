"""What sums are kept in, and what keeps divisions finite."""

from contextlib import AbstractContextManager, nullcontext

import torch

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the output RMSNorm; the value of the paper's Wan code."""
LEAST_MIXING = 1e-12
"""Added to every weight of a linear branch beside softmax: a row that mixes nothing, as of the identity, still has
something to divide by, and a gradient to learn from."""
LEAST_MASK = 1e-12
"""Weight of a masked key in such a linear branch: where all keys are masked, there is still something to divide by."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; the meta device, for which shapes and costs are counted, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
