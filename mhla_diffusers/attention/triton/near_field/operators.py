"""The near field as PyTorch operators, for autograd, torch.compile and checkpointing.

Importing this file registers the operators without importing Triton, which the first call does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .call import near_field_call


@torch.library.custom_op("mhla_diffusers::near_field_attention", mutates_args=())
def near_field_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    far_field_weight: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    feature_map: str,
    rotary: torch.Tensor | None,
    rope_before: bool,
    eps: float,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D), log of each query's sum of weights (B, H, N), summaries (B, H, M, D + 1, D) or empty.

    Arguments: :func:`near_field_call`. The last two are float32; with one block there are no summaries.
    """
    from .passes import forward

    arguments = (feature_map, rotary, rope_before, eps, key_mask)
    return forward(near_field_call(query, key, value, mixing, far_field_weight, tuple(grid), tuple(blocks), *arguments))


@torch.library.custom_op("mhla_diffusers::near_field_attention_backward", mutates_args=())
def near_field_attention_backward(
    output_gradient: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    summary: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    far_field_weight: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    feature_map: str,
    rotary: torch.Tensor | None,
    rope_before: bool,
    eps: float,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value, mixing and far_field_weight."""
    from .launches import OutputSide
    from .passes import backward

    arguments = (feature_map, rotary, rope_before, eps, key_mask)
    call = near_field_call(query, key, value, mixing, far_field_weight, tuple(grid), tuple(blocks), *arguments)
    gradients = backward(call, OutputSide(output, output_gradient, log_sums), summary)
    return gradients.query, gradients.key, gradients.value, gradients.mixing, gradients.far_field_weight


@near_field_attention.register_fake
def _shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = near_field_call(*arguments)
    query = call.far.query
    batch, tokens, heads, _ = query.shape
    log_sums = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    summary = log_sums.new_empty(call.far.state_shape if call.has_far_field else (0,))
    return query.new_empty(query.shape), log_sums, summary


@near_field_attention_backward.register_fake
def _backward_shapes(
    output_gradient: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    *tensors, grid, blocks, feature_map, rotary, rope_before, eps, key_mask = inputs
    ctx.save_for_backward(*output, *tensors, rotary, key_mask)
    ctx.settings = (grid, blocks, feature_map, rope_before, eps)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, output_gradient: torch.Tensor | None, *_: torch.Tensor | None) -> tuple[Any, ...]:
    if output_gradient is None:
        return (None,) * 12
    *tensors, rotary, key_mask = ctx.saved_tensors
    grid, blocks, feature_map, rope_before, eps = ctx.settings
    if output_gradient.stride(-1) != 1:
        output_gradient = output_gradient.contiguous()
    gradients = near_field_attention_backward(
        output_gradient, *tensors, grid, blocks, feature_map, rotary, rope_before, eps, key_mask
    )
    return (*gradients, *(None,) * 7)


near_field_attention.register_autograd(_differentiate, setup_context=_save)
