"""Dtypes of sums, and constants that keep divisions finite."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .derivatives import is_forward_mode

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the output RMSNorm; the value of the paper's Wan code."""
LEAST_MIXING = 1e-12
"""Added to every weight of a linear branch beside softmax: a row that mixes nothing, as of the identity, still has
something to divide by, and a gradient to learn from."""
EMPTY = -1e30
"""LSE of a query that attends to nothing: finite, so that subtracting two gives 0, not NaN."""
LEAST_MASK = 1e-12
"""Weight of a masked key in such a linear branch: where all keys are masked, there is still something to divide by."""


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
    """(..., m, k) @ (..., k, n) in the type of the right one, regardless of autocast where backward() is called."""
    function = _ProductInForwardMode if is_forward_mode() else _Product
    found: torch.Tensor = function.apply(left, right)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with without_autocast(right.device):
            return torch.matmul(left.to(right.dtype), right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (upstream,), (left, right) = gradients, ctx.saved_tensors
        with without_autocast(right.device):
            of_left = torch.matmul(upstream, right.mT)
            return of_left.to(left.dtype), torch.matmul(left.to(right.dtype).mT, upstream)


class _ProductInForwardMode(_Product):
    """A class of its own, since torch.compile traces none with a ``jvp``."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor | None:
        left, right = ctx.saved_tensors
        of_left, of_right = tangents
        with without_autocast(right.device):
            parts = [] if of_left is None else [torch.matmul(of_left.to(right.dtype), right)]
            if of_right is not None:
                parts.append(torch.matmul(left.to(right.dtype), of_right))
            return sum(parts[1:], parts[0]) if parts else None
