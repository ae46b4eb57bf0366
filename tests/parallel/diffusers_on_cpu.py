"""What diffusers' context parallelism lacks on a CPU.

The split, the ring and the exchange of heads are its own. Put in are the attention of one process to one chunk of keys
with its log-sum-exp, for which it calls kernels of a GPU, and gathering what differs in length, which gloo does not do;
and it divides by the number of devices, which is 0.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers.hooks import context_parallel
from diffusers.models import attention_dispatch

_FORWARD, _BACKWARD = attention_dispatch._native_attention_forward_op, attention_dispatch._native_attention_backward_op


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


def _forward(*args: Any, **kwargs: Any) -> Any:
    """Of one process to one chunk of keys: round a ring with the log-sum-exp, by heads as diffusers has it."""
    wants_log_sum = inspect.signature(_FORWARD).bind(*args, **kwargs).arguments["return_lse"]
    return (cpu_forward if wants_log_sum else _FORWARD)(*args, **kwargs)


def _backward(ctx: Any, gradient: torch.Tensor, *args: Any, **of_ring: Any) -> tuple[torch.Tensor, ...]:
    """Round a ring diffusers gives the chunk, by heads nothing."""
    return cpu_backward(ctx, gradient, **of_ring) if of_ring else _BACKWARD(ctx, gradient, *args)


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
