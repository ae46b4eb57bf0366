"""Softmax attention through each backend that PyTorch has."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .memory import free_bytes

SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Of PyTorch's scaled_dot_product_attention."""


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's softmax attention of (B, N, H, D) tensors by one backend.

    Raises:
        RuntimeError: that backend cannot run the call.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return output.transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device, tokens: int, heads: int) -> str | None:
    """Why a backend is not to be tried; None if it is, which does not mean that it can run the call.

    Args:
        backend: key of ``SOFTMAX_BACKENDS``, or flex.
        device: where.
        tokens: N.
        heads: H, times the batch size.
    """
    if device.type != "cpu":
        return None
    if backend in ("cudnn", "efficient"):
        return "PyTorch has this backend on GPUs only"
    # Linux promises memory that it does not have and ends the process that takes it, so this must be told beforehand
    needed, free = 2 * 4 * heads * tokens**2, free_bytes(device)
    if backend in ("math", "flex") and needed > free:
        return f"its N x N weights need {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    return None
