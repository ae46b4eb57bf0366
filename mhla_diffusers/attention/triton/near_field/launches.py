"""What each kernel of the near field is launched with, and what it writes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import allocate, like, rotary_rows, rows, state_shape
from ..launches import KernelShape, Launch
from .backward_kernels import far_query_gradient_kernel, near_key_value_gradient_kernel, near_query_gradient_kernel
from .call import NearFieldCall
from .forward_kernel import near_field_kernel


def near_field_launch(
    call: NearFieldCall, mixed: torch.Tensor | None, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and, float32 (B, H, N), the logarithm of each query's sum of weights.

    Args:
        call: the call.
        mixed: mixed summaries of the other blocks, (B, H, M, D + 1, D); None where there is one block.
        architecture: to compile for; the device's own if None.
    """
    shape = KernelShape(call.far, "near_field", architecture)
    output, log_sums = like(call.far.query), _numbers(call)
    arguments = _inputs(call) | {
        "mixed": mixed,
        "far_field_weight": call.far_field_weight,
        "output": output,
        "log_sums": log_sums,
        "layout": shape.layout,
        "eps": call.far.eps,
    }
    return shape.launch(near_field_kernel, arguments, "BLOCK_C"), output, log_sums


@dataclass(frozen=True)
class OutputSide:
    """What the backward pass knows of the output."""

    output: torch.Tensor
    """(B, N, H, D)."""
    gradient: torch.Tensor
    """(B, N, H, D)."""
    log_sums: torch.Tensor
    """Float32 (B, H, N)."""


@dataclass(frozen=True)
class FarQueryGradients:
    """What :func:`far_query_gradient_launch` writes."""

    query: torch.Tensor
    """(B, N, H, D)."""
    weight: torch.Tensor
    """Shares of λ's gradient: float32 (B, M, parts, H)."""
    token_numbers: torch.Tensor
    """For :func:`summary_gradient_launch`: float32 (B, H, 3, N), the second of the three not filled."""


def far_query_gradient_launch(
    call: NearFieldCall, mixed: torch.Tensor, output: OutputSide, architecture: str | None = None
) -> tuple[Launch, FarQueryGradients]:
    """The far field's gradients of what belongs to the query's side."""
    shape = KernelShape(call.far, "far_query_gradient", architecture)
    batch, tokens, heads, _ = call.far.query.shape
    device = call.far.query.device
    gradients = FarQueryGradients(
        query=like(call.far.query),
        weight=allocate((batch, state_shape(call.far)[2], shape.layout.parts, heads), torch.float32, device),
        token_numbers=allocate((batch, heads, 3, tokens), torch.float32, device),
    )
    arguments = {
        "query": rows(call.far.query),
        "rotary": rotary_rows(call.far),
        "mixed": mixed,
        "far_field_weight": call.far_field_weight,
        "output": rows(output.output),
        "output_gradient": rows(output.gradient),
        "log_sums": output.log_sums,
        "query_gradient": gradients.query,
        "weight_gradients": gradients.weight,
        "token_numbers": gradients.token_numbers,
        "layout": shape.layout,
        "eps": call.far.eps,
    }
    return shape.launch(far_query_gradient_kernel, arguments, "BLOCK_C"), gradients


def near_query_gradient_launch(
    call: NearFieldCall, output: OutputSide, query_gradient: torch.Tensor, architecture: str | None = None
) -> tuple[Launch, torch.Tensor]:
    """Add to ``query_gradient`` (set it where there is one block), and P, float32 (B, H, N)."""
    shape = KernelShape(call.far, "near_query_gradient", architecture)
    output_products = _numbers(call)
    arguments = _inputs(call) | {
        "output": rows(output.output),
        "output_gradient": rows(output.gradient),
        "log_sums": output.log_sums,
        "query_gradient": query_gradient,
        "output_products": output_products,
        "layout": shape.layout,
    }
    return _with_far_field(shape.launch(near_query_gradient_kernel, arguments, "BLOCK_C"), call), output_products


def near_key_value_gradient_launch(
    call: NearFieldCall,
    output: OutputSide,
    output_products: torch.Tensor,
    key_gradient: torch.Tensor,
    value_gradient: torch.Tensor,
    architecture: str | None = None,
) -> Launch:
    """Add to ``key_gradient`` and ``value_gradient`` (set them where there is one block)."""
    shape = KernelShape(call.far, "near_key_value_gradient", architecture)
    arguments = _inputs(call) | {
        "output_gradient": rows(output.gradient),
        "log_sums": output.log_sums,
        "output_products": output_products,
        "key_gradient": key_gradient,
        "value_gradient": value_gradient,
        "layout": shape.layout,
    }
    return _with_far_field(shape.launch(near_key_value_gradient_kernel, arguments, "BLOCK_C"), call)


def _inputs(call: NearFieldCall) -> dict[str, Any]:
    """What every kernel that walks the keys of a block takes."""
    return {
        "query": rows(call.far.query),
        "key": rows(call.far.key),
        "value": rows(call.far.value),
        "rotary": rotary_rows(call.far),
        "key_mask": call.key_mask,
        "logit_scale": call.far.query.shape[3] ** -0.5,
    }


def _numbers(call: NearFieldCall) -> torch.Tensor:
    """One number per query: float32 (B, H, N), not filled."""
    batch, tokens, heads, _ = call.far.query.shape
    return allocate((batch, heads, tokens), torch.float32, call.far.query.device)


def _with_far_field(launch: Launch, call: NearFieldCall) -> Launch:
    return replace(launch, constants={**launch.constants, "FAR_FIELD": call.has_far_field})
