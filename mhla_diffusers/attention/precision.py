"""Dtypes of sums, constants that keep divisions finite, and products and merges that use them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the output RMSNorm; the value of the paper's Wan code."""
LEAST = 1e-12
"""Least mixing weight and least weight of a masked key where MHLA is merged with softmax or is causal: a row that mixes
nothing, as of the identity, still has something to divide by, and a gradient to learn from."""
EMPTY = -1e30
"""LSE of a query that attends to nothing: finite, so that subtracting two gives 0, not NaN."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; the meta device, for which shapes and costs are counted, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_type(x: torch.Tensor) -> torch.dtype | None:
    """Return the type that autocast gives a tensor's attention; None without autocast, as on the meta device."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(..., m, k) @ (..., k, n) in the type of the right one.

    Autocast is off where this runs; where ``backward()`` is called it may be on, and changes no gradient.
    """
    if not torch.is_grad_enabled():
        return left.to(right.dtype) @ right
    found: torch.Tensor = _Product.apply(left, right)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return left.to(right.dtype) @ right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (upstream,), (left, right) = gradients, ctx.saved_tensors
        with without_autocast(right.device):
            return (upstream @ right.mT).to(left.dtype), left.to(right.dtype).mT @ upstream


def under_common_sum(
    one: torch.Tensor, log_one: torch.Tensor, other: torch.Tensor, log_other: torch.Tensor
) -> torch.Tensor:
    """Merge two attentions (..., D) under the sum of their denominators, whose logs are (..., 1)."""
    return torch.sigmoid(log_one - log_other) * one + torch.sigmoid(log_other - log_one) * other


def finish(output: torch.Tensor, output_norm: torch.Tensor | None, output_gate: torch.Tensor | None) -> torch.Tensor:
    """Output RMSNorm per head, with (D,) weight, then × SiLU(gate) of the output's shape, where they are given."""
    if output_norm is not None:
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], output_norm.to(output.dtype), OUTPUT_NORM_EPS)
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.to(output.dtype))
    return output
