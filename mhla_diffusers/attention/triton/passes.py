"""Forward and backward pass: the kernels of this backend with the mixing between them."""

from dataclasses import dataclass

import torch

from .call import Call
from .launches import (
    key_value_gradient_launch,
    output_launch,
    query_gradient_launch,
    summary_gradient_launch,
    summary_launch,
)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D), and the summaries before mixing, float32 (B, H, M, D + normalize, D)."""
    launch, parts = summary_launch(call)
    launch.run()
    summary = sum_parts(parts)
    launch, output = output_launch(call, mix(call.mixing, summary))
    launch.run()
    return output, summary


@dataclass(frozen=True)
class Gradients:
    """Of each differentiable argument, in its shape and type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    output_norm: torch.Tensor | None
    output_gate: torch.Tensor | None


def backward(call: Call, summary: torch.Tensor, output_gradient: torch.Tensor) -> Gradients:
    """Gradients of a call, given what :func:`forward` returned as summaries."""
    mixed = mix(call.mixing, summary)
    launch, of_query = query_gradient_launch(call, mixed, output_gradient)
    launch.run()
    launch, parts = summary_gradient_launch(call, mixed, output_gradient, of_query.token_numbers)
    launch.run()
    mixed_gradient = sum_parts(parts)
    launch, (key_gradient, value_gradient) = key_value_gradient_launch(call, mix(call.mixing.mT, mixed_gradient))
    launch.run()
    norm_gradient = None
    if call.output_norm is not None and of_query.norm is not None:
        norm_gradient = of_query.norm.sum(dim=0).to(call.output_norm.dtype)
    of_mixing = mixing_gradient(call.mixing, summary, mixed_gradient)
    return Gradients(of_query.query, key_gradient, value_gradient, of_mixing, norm_gradient, of_query.gate)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """(B, H, M, parts, ...) to (B, H, M, ...), always added in the same order."""
    return parts.squeeze(3) if parts.shape[3] == 1 else parts.sum(dim=3)


def mix(mixing: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Multi-Head Mixing: float32 (B, H, M, ...), what each query block sees, in torch's float32 matmul precision."""
    with torch.autocast(summary.device.type, enabled=False):
        return (mixing.float() @ summary.flatten(3)).view(summary.shape)


def mixing_gradient(mixing: torch.Tensor, summary: torch.Tensor, mixed_gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of the mixing matrix, in its shape and type."""
    with torch.autocast(summary.device.type, enabled=False):
        per_head = (mixed_gradient.flatten(3) @ summary.flatten(3).mT).sum(dim=0)
    return (per_head if mixing.ndim == 3 else per_head.sum(dim=0)).to(mixing.dtype)
