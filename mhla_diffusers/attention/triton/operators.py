"""The forward and backward pass as PyTorch operators, for autograd, torch.compile and checkpointing.

Importing this file registers the operators without importing Triton, which the first call does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .call import Call


@torch.library.custom_op("mhla_diffusers::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    feature_map: str,
    rotary: torch.Tensor | None,
    rope_before: bool,
    normalize: bool,
    eps: float,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and summaries, float32 (B, H, M, D + normalize, D). Arguments: :class:`Call`."""
    from .passes import forward

    return forward(
        Call(
            query,
            key,
            value,
            mixing,
            tuple(grid),
            tuple(blocks),
            feature_map,
            rotary,
            rope_before,
            normalize,
            eps,
            key_mask,
            output_norm,
            output_gate,
        )
    )


@torch.library.custom_op("mhla_diffusers::attention_backward", mutates_args=())
def attention_backward(
    output_gradient: torch.Tensor,
    summary: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    feature_map: str,
    rotary: torch.Tensor | None,
    rope_before: bool,
    normalize: bool,
    eps: float,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value, mixing, output_norm and output_gate; an absent one's is empty."""
    from .passes import backward

    call = Call(
        query,
        key,
        value,
        mixing,
        tuple(grid),
        tuple(blocks),
        feature_map,
        rotary,
        rope_before,
        normalize,
        eps,
        key_mask,
        output_norm,
        output_gate,
    )
    gradients = backward(call, summary, output_gradient)
    absent = [query.new_empty(0) for _ in range(2)]
    return (
        gradients.query,
        gradients.key,
        gradients.value,
        gradients.mixing,
        gradients.output_norm if gradients.output_norm is not None else absent[0],
        gradients.output_gate if gradients.output_gate is not None else absent[1],
    )


@attention.register_fake
def _attention_shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*arguments)
    return call.query.new_empty(call.query.shape), call.query.new_empty(call.state_shape, dtype=torch.float32)


@attention_backward.register_fake
def _attention_backward_shapes(
    output_gradient: torch.Tensor, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    call = Call(*arguments)
    absent = call.query.new_empty(0)
    tensors = (call.query, call.key, call.value, call.mixing, call.output_norm, call.output_gate)
    return tuple((absent if x is None else x).new_empty(absent.shape if x is None else x.shape) for x in tensors)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    call, (_, summary) = Call(*inputs), output
    ctx.save_for_backward(
        summary,
        call.query,
        call.key,
        call.value,
        call.mixing,
        call.rotary,
        call.key_mask,
        call.output_norm,
        call.output_gate,
    )
    ctx.settings = (call.grid, call.blocks, call.feature_map, call.rope_before, call.normalize, call.eps)
    ctx.mark_non_differentiable(summary)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, output_gradient: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    if output_gradient is None:
        return (None,) * 14
    summary, query, key, value, mixing, rotary, key_mask, output_norm, output_gate = ctx.saved_tensors
    grid, blocks, feature_map, rope_before, normalize, eps = ctx.settings
    if output_gradient.stride(-1) != 1:
        output_gradient = output_gradient.contiguous()
    *always, of_norm, of_gate = attention_backward(
        output_gradient,
        summary,
        query,
        key,
        value,
        mixing,
        grid,
        blocks,
        feature_map,
        rotary,
        rope_before,
        normalize,
        eps,
        key_mask,
        output_norm,
        output_gate,
    )
    of_norm = of_norm if output_norm is not None else None
    of_gate = of_gate if output_gate is not None else None
    return (*always, *(None,) * 8, of_norm, of_gate)


attention.register_autograd(_differentiate, setup_context=_save)
