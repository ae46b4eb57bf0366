"""Attentions of other packages, where these are installed."""

from importlib.util import find_spec

import torch

FLASH = "flash-attn"
CHUNKED = "flash-linear-attention"
_MODULES = {FLASH: "flash_attn", CHUNKED: "fla"}


def why_no_package(name: str, device: torch.device) -> str | None:
    """Why a package is not to be tried; None if it is, which does not mean that it can run the call.

    Args:
        name: ``FLASH`` or ``CHUNKED``.
        device: where.
    """
    if device.type == "cpu":
        return f"{name} runs on GPUs only"
    return None if find_spec(_MODULES[name]) is not None else f"{name} is not installed"


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention of (B, N, H, D) tensors by flash-attn."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    output: torch.Tensor = flash_attn_func(query, key, value)
    return output


def chunked_linear_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal linear attention of (B, N, H, D) tensors by flash-linear-attention, φ = ReLU, without a normaliser.

    The nearest to plain linear attention that the package has: a query sees the keys before it.
    """
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    output: torch.Tensor = chunk_linear_attn(query.relu(), key.relu(), value, normalize=False)[0]
    return output
