"""One self-attention of which every process holds a share: MHLA, and diffusers' own softmax over several processes."""

from dataclasses import dataclass
from typing import Any

import torch

from ...attention import initial_mixing, mhla_attention
from ..candidates import CONTENT
from ..problems import branch_weights, random_rotary, rule_of
from ..shapes import Shape
from .world import World

SOFTMAX, MHLA = "softmax", "MHLA"
ATTENTIONS = (SOFTMAX, MHLA, CONTENT)
"""Of which the last one sends what its lists hold, so that it cannot be counted without values."""


@dataclass(frozen=True)
class OwnShare:
    """What one process has of an attention."""

    shape: Shape
    world: World
    tensors: dict[str, torch.Tensor]
    """Query, key and value, each (1, own tokens, H, D), and the mixing matrices (H, M, M) float32."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    """(cos, sin), each (1, own tokens, 1, D), where the model has RoPE."""


def make_share(shape: Shape, world: World, device: torch.device, dtype: torch.dtype, backward: bool) -> OwnShare:
    """Random values of this process's tokens, a mixing matrix per head as patches have it, and RoPE.

    Args:
        shape: the whole attention.
        world: the processes, which divide its tokens.
        device: where; "meta" for shapes alone.
        dtype: of query, key and value.
        backward: whether they take gradients.

    Raises:
        ValueError: the processes do not divide the tokens, or the heads.
    """
    first, count = world.parallel.own_share(shape.tokens)
    world.parallel.head_counts(shape.heads)
    size = (1, count, shape.heads, shape.head_dim)
    tensors = {name: torch.randn(size, device=device, dtype=dtype) for name in ("query", "key", "value")}
    tensors["mixing"] = initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1)
    rotary = None
    if shape.rotary_axes is not None:
        cos, sin = random_rotary(shape, device)
        rotary = cos[:, first : first + count], sin[:, first : first + count]
    return OwnShare(shape, world, {name: x.requires_grad_(backward) for name, x in tensors.items()}, rotary)


def attend(attention: str, share: OwnShare) -> torch.Tensor:
    """The output of one of ``ATTENTIONS`` for this process's tokens, (1, own tokens, H, D)."""
    if attention == SOFTMAX:
        return _softmax(share)
    shape = share.shape
    given: dict[str, Any] = {**share.tensors, "grid": shape.grid, "blocks": shape.blocks}
    if attention == CONTENT:
        weights = branch_weights(shape.heads, share.tensors["query"].device)
        given |= {"sparse": rule_of(shape, fit_pooled_bias=True), "linear_weight": weights["linear_weight"]}
    if share.rotary is not None:
        given |= {"rotary": share.rotary, "rotary_axes": shape.rotary_axes}
    return mhla_attention(**given, parallel=share.world.parallel)


def _softmax(share: OwnShare) -> torch.Tensor:
    """By diffusers, whose processors turn query and key by RoPE beforehand, each process its own."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    query, key, value = (share.tensors[name] for name in ("query", "key", "value"))
    config, layout = share.world.config, share.world.layout
    if query.device.type != "cpu":
        # the backend with a log of the sum of weights, which a ring needs, that has shapes without a GPU
        return dispatch_attention_fn(query, key, value, backend="_native_flash", parallel_config=config)
    if layout.ring == 1:
        return dispatch_attention_fn(query, key, value, backend="native", parallel_config=config)
    return _on_cpu(query, key, value, config)


def _on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, config: Any) -> torch.Tensor:
    """The ring of diffusers with PyTorch's kernel for CPUs, since none of its own backends for rings runs there."""
    from diffusers.models import attention_dispatch

    return attention_dispatch._templated_context_parallel_attention(
        query, key, value, forward_op=cpu_forward, backward_op=cpu_backward, _parallel_config=config
    )


def cpu_forward(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and log of the sum of weights (B, N, H), as diffusers' ring asks its backends for them."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (query, key, value)), dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    output, log_sum = output.transpose(1, 2).contiguous(), log_sum.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, output, log_sum)
    return output, log_sum


def cpu_backward(
    ctx: Any, gradient: torch.Tensor, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **of_ring: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, given the output and log of the sum of weights of the whole ring."""
    output, log_sum = of_ring["out"], of_ring["lse"]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (gradient, query, key, value, output)), log_sum.transpose(1, 2), 0.0, False
    )
    return tuple(x.transpose(1, 2) for x in found)
