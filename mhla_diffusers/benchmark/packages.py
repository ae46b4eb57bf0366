"""Attentions of other packages, where these are installed."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

FLASH = "flash-attn"
FLASH3 = "FlashAttention-3"
CHUNKED = "flash-linear-attention"
_MODULES = {FLASH: ("flash_attn",), FLASH3: ("fa3_fwd_interface", "flash_attn_interface"), CHUNKED: ("fla",)}
"""Of which the first that is there is taken: FlashAttention-3 is in fa3-fwd and in flash-attn-3."""
_INSTALL = {FLASH3: " (fa3-fwd or flash-attn-3)"}


def why_no_package(name: str, device: torch.device) -> str | None:
    """Why a package is not to be tried; None if it is, which does not mean that it can run the call.

    Args:
        name: a key of ``PACKAGES``.
        device: where.
    """
    if device.type == "cpu":
        return f"{name} runs on GPUs only"
    is_there = any(find_spec(module) is not None for module in _MODULES[name])
    return None if is_there else f"{name}{_INSTALL.get(name, '')} is not installed"


def _flash(name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """Softmax attention of (B, N, H, D) tensors; some versions return the log-sum-exp too."""
    module = next(module for module in _MODULES[name] if find_spec(module) is not None)
    output: Any = import_module(module).flash_attn_func(*inputs)
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _chunked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal linear attention of (B, N, H, D) tensors, φ = ReLU, without a normaliser.

    The nearest to plain linear attention that flash-linear-attention has: a query sees the keys before it.
    """
    linear: Any = import_module("fla.ops.linear_attn")
    output: torch.Tensor = linear.chunk_linear_attn(query.relu(), key.relu(), value, normalize=False)[0]
    return output


PACKAGES: dict[str, Callable[..., torch.Tensor]] = {
    FLASH: lambda *inputs: _flash(FLASH, *inputs),
    FLASH3: lambda *inputs: _flash(FLASH3, *inputs),
    CHUNKED: _chunked,
}
"""Name → attention of query, key and value, each (B, N, H, D)."""
