"""Query, key and value of an attention, and what comes after its heads."""

from typing import Any

import torch

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of all tokens, normed where the model norms them: each (B, N, H, D)."""

_FLOAT16_MAX = 65504.0


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Query, key and value (B, N, H, D) by ``to_q``, ``to_k``, ``to_v`` or ``to_qkv``."""
    if attn.fused_projections:
        projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    return _in_heads(attn, projected, attn.norm_q, attn.norm_k)


def project_context(attn: Any, context: torch.Tensor) -> Projected:
    """The same by the projections that a context has of its own."""
    if attn.fused_projections:
        projected = attn.to_added_qkv(context).chunk(3, dim=-1)
    else:
        projected = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
    return _in_heads(attn, projected, attn.norm_added_q, attn.norm_added_k)


def _in_heads(attn: Any, projected: tuple[torch.Tensor, ...], norm_query: Any, norm_key: Any) -> Projected:
    query, key, value = projected
    return (
        _normed_heads(query, norm_query, attn.heads),
        _normed_heads(key, norm_key, attn.heads),
        value.unflatten(-1, (attn.heads, -1)),
    )


def lowered(projected: Projected) -> Projected:
    """Query, key and value in the type of autocast, where it is on."""
    query, key, value = projected
    device = value.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        return query.to(lower), key.to(lower), value.to(lower)
    return query, key, value


def finite(output: torch.Tensor) -> torch.Tensor:
    """In float16 clipped to what it can hold, as diffusers' own linear attention is: infinity would spread."""
    return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output


def _normed_heads(x: torch.Tensor, norm: Any, heads: int) -> torch.Tensor:
    """(B, N, H * D) to (B, N, H, D); a norm across heads acts before the split, another one after it."""
    if norm is None:
        return x.unflatten(-1, (heads, -1))
    if _is_across_heads(norm, x.shape[-1]):
        x = norm(x)
        return x.unflatten(-1, (heads, -1))
    x = norm(x.unflatten(-1, (heads, -1)))
    return x


def _is_across_heads(norm: Any, inner_dim: int) -> bool:
    """Whether a query or key norm has a weight for every channel of all heads."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.numel() == inner_dim
