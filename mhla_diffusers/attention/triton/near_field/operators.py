"""The near field as PyTorch operators, for autograd, torch.compile and checkpointing.

Importing this file registers the operators without importing Triton, which the first call does.
"""

from typing import Any

import torch

from ..arguments import state_shape
from ..operators import ARGUMENTS, call_of, flat, one_per_argument, save_call, saved_call
from .call import near_field_call

_DIFFERENTIABLE = ("query", "key", "value", "mixing", "far_field_weight")
_SAVED = "Tensor output, Tensor log_sums, Tensor summary"


@torch.library.custom_op(
    "mhla_diffusers::near_field_attention", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
def near_field_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D), log of each query's sum of weights (B, H, N), summaries (B, H, M, D + 1, D) or empty.

    Arguments: :func:`near_field_call`. The last two are float32; with one block there are no summaries.
    """
    from .passes import forward

    return forward(near_field_call(call_of(arguments)))


@torch.library.custom_op(
    "mhla_diffusers::near_field_attention_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, {_SAVED}, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def near_field_attention_backward(
    output_gradient: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, mixing and far_field_weight."""
    from .launches import OutputSide
    from .passes import backward

    call = near_field_call(call_of(arguments))
    gradients = backward(call, OutputSide(output, output_gradient, log_sums), summary)
    return tuple(getattr(gradients, name) for name in _DIFFERENTIABLE)


@near_field_attention.register_fake
def _shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = near_field_call(call_of(arguments))
    query = call.far.query
    batch, tokens, heads, _ = query.shape
    log_sums = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    summary = log_sums.new_empty(state_shape(call.far) if call.has_far_field else (0,))
    return query.new_empty(query.shape), log_sums, summary


@near_field_attention_backward.register_fake
def _backward_shapes(
    output_gradient: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    call = call_of(arguments)
    return tuple(getattr(call, name).new_empty(getattr(call, name).shape) for name in _DIFFERENTIABLE)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    save_call(ctx, call_of(inputs), *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, output_gradient: torch.Tensor | None, *_: torch.Tensor | None) -> tuple[Any, ...]:
    if output_gradient is None:
        return one_per_argument({})
    call, saved = saved_call(ctx)
    if output_gradient.stride(-1) != 1:
        output_gradient = output_gradient.contiguous()
    gradients = near_field_attention_backward(output_gradient, *saved, *flat(call))
    return one_per_argument(dict(zip(_DIFFERENTIABLE, gradients, strict=True)))


near_field_attention.register_autograd(_differentiate, setup_context=_save)
