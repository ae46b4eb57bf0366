"""MHLA with tokens split over processes: one all-reduce of the block states.

Each process holds consecutive tokens, as diffusers' context parallelism gives them, and adds what they contribute to
the KV states and key sums of all blocks. The sums are those of one process, so each can mix and read them by itself::

    S_b = Σ_p Σ_{t in block b of process p} φ(k_t) v_tᵀ        z_b likewise

Shares need not end where blocks do. What is sent does not grow with the sequence: M D (D + 1) float32 numbers per head.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from .api import backend_for, check_call
from .call import MHLACall
from .precision import without_autocast


def share_of(tokens: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the first token of this process and how many it has, as ``torch.Tensor.tensor_split`` cuts."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    least, longer = tokens // size, tokens % size  # torch.compile knows no divmod
    return rank * least + min(rank, longer), least + (rank < longer)


def attend_split(call: MHLACall, group: dist.ProcessGroup, backend: str = "auto") -> torch.Tensor:
    """Attend from this process's tokens to those of all processes: (B, N, H, D) in the type of ``query``.

    Differentiable; the gradients that the processes get add up to that of one process.

    Args:
        call: with the own N tokens and the grid of all.
        group: the processes, in the order of their tokens.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.

    Raises:
        ValueError: causal attention or a mask; another number of tokens than the process's share; or what
            :func:`mhla_diffusers.attention.mhla_attention` refuses.
    """
    check_call(call)
    is_given = {"causal": call.causal is not None, "key_mask": call.key_mask is not None}
    if refused := [name for name, given in is_given.items() if given]:
        raise ValueError(
            f"MHLA with tokens split over processes does not support {' or '.join(refused)}; run it in one process."
        )
    (first, count), tokens = share_of(math.prod(call.grid), group), call.query.shape[1]
    if tokens != count:
        raise ValueError(
            f"This process's share of the token grid {call.grid} is {count} tokens, but query has N={tokens}; split "
            "the tokens as torch.Tensor.tensor_split does."
        )
    call = replace(call, first=first)
    chosen = backend_for(call, backend)
    with without_autocast(call.query.device):
        states: torch.Tensor = _Sum.apply(chosen.states(call), group)  # type: ignore[no-untyped-call]
        return chosen.read(call, states)[0]


class _Sum(torch.autograd.Function):
    """All-reduce, whose gradient is the sum of what the processes send back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", ctx.group)), None
