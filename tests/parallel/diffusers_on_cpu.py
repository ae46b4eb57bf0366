"""What diffusers' context parallelism lacks on a CPU.

The split, the ring and the exchange of heads are its own. Written out here are the attention of one process to one
chunk of keys with its log-sum-exp, for which it calls kernels of a GPU, and gathering what differs in length, which
gloo does not do; and it divides by the number of devices, which is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers.hooks import context_parallel
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


def _gather(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    size = torch.distributed.get_world_size(group)
    lengths = context_parallel.gather_size_by_comm(tensor.shape[dim], group)
    rows = tensor.movedim(dim, 0)
    padded = torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, max(lengths) - len(rows))).contiguous()
    found = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(found, padded, group=group)
    return torch.cat([x[:length] for x, length in zip(found, lengths, strict=True)]).movedim(0, dim)


@contextmanager
def diffusers_on_cpu() -> Iterator[None]:
    """Within the context diffusers' context parallelism runs on a CPU."""
    with (
        patch.object(torch.accelerator, "device_count", lambda: 1),
        patch.object(context_parallel, "_all_gather_anything", _gather),
        patch.object(attention_dispatch, "_native_attention_forward_op", _forward),
        patch.object(attention_dispatch, "_native_attention_backward_op", _backward),
    ):
        yield
