"""Softmax attention that gives its log-sum-exp, which diffusers' ring attention needs and has for GPUs alone.

The ring is diffusers' own; only the attention of one process to one chunk of keys, for which diffusers calls kernels of
a GPU, is written out here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers.models import attention_dispatch


def _logits(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    found = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    return found if mask is None else found + mask


def _forward(
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
) -> Any:
    logits = _logits(query, key, attn_mask)
    log_sum = logits.logsumexp(dim=-1)
    output = torch.einsum("bhqk,bkhd->bqhd", (logits - log_sum[..., None]).exp(), value)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, output, log_sum.transpose(1, 2))
        ctx.attn_mask = attn_mask
    return (output, log_sum.transpose(1, 2)) if return_lse else output


def _backward(
    ctx: Any,
    gradient: torch.Tensor,
    *_: Any,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = (query, key, value, out, lse)
    query, key, value, out, lse = (
        x if x is not None else saved for x, saved in zip(given, ctx.saved_tensors, strict=True)
    )
    weights = (_logits(query, key, ctx.attn_mask) - lse.transpose(1, 2)[..., None]).exp()
    shift = (gradient * out).sum(dim=-1).transpose(1, 2)[..., None]
    of_logits = weights * (torch.einsum("bqhd,bkhd->bhqk", gradient, value) - shift) * query.shape[-1] ** -0.5
    return (
        torch.einsum("bhqk,bkhd->bqhd", of_logits, key),
        torch.einsum("bhqk,bqhd->bkhd", of_logits, query),
        torch.einsum("bhqk,bqhd->bkhd", weights, gradient),
    )


@contextmanager
def softmax_on_cpu() -> Iterator[None]:
    """Within the context diffusers' context-parallel softmax attention runs on a CPU."""
    with (
        patch.object(attention_dispatch, "_native_attention_forward_op", _forward),
        patch.object(attention_dispatch, "_native_attention_backward_op", _backward),
    ):
        yield
