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

from mhla_diffusers.benchmark.parallel.attentions import cpu_backward, cpu_forward

_FORWARD, _BACKWARD = attention_dispatch._native_attention_forward_op, attention_dispatch._native_attention_backward_op


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
