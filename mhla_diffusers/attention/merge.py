"""The sparse and the linear branch under one denominator.

The sparse branch gives an output and the logarithm of its sum of weights (LSE), MHLA over all blocks an output and its
normaliser. With w the part of the sparse branch in the common sum of weights, w = σ(LSE − log(λ · normaliser)), the two
outputs add up to o = w · sparse + (1 − w) · linear. Every backend brings its own two branches. Extra tokens attend to
everything with softmax, and leave nothing to the linear branch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .call import Call
from .linear import finish
from .parallel.collectives import finished_sum, started_sum, summed
from .precision import LEAST_MASK, LEAST_MIXING, sum_dtype

SparseAttention = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]
"""Gives output (B, N + n, H, D), of n extra tokens last, and LSE (B, N, H, 1) of a call with lists;
:func:`mhla_diffusers.attention.sparse.sparse_attention`."""


@dataclass(frozen=True)
class LinearAttention:
    """A backend's MHLA throughout, in the two steps between which processes add up what each knows."""

    states: Callable[[Call], torch.Tensor]
    """Of the tokens of a call, (B, H, M, D + normalize, D), float32 (float64 for float64 inputs);
    :func:`mhla_diffusers.attention.linear.block_states`."""
    read: Callable[[Call, torch.Tensor], tuple[torch.Tensor, ...]]
    """Output (B, N, H, D) and, with ``normalize``, normaliser (B, N, H, 1), given the states of all tokens."""

    def __call__(self, call: Call) -> torch.Tensor:
        """The output (B, N, H, D)."""
        states = self.states(call)
        return self.read(call, states if call.group is None else summed(states, call.group))[0]


def merged_attention(call: Call, sparse: SparseAttention, linear: LinearAttention) -> torch.Tensor:
    """The sparse branch and, where the call has a ``linear_weight``, MHLA over all blocks.

    Args:
        call: with lists.
        sparse: the backend's sparse branch.
        linear: the backend's MHLA.

    Returns:
        (B, N, H, D) like the query; with extra tokens, which norm and gate leave as they are, (B, N + n, H, D) in the
        order of the sequence.
    """
    all_else = linear_branch(call) if call.linear_weight is not None else None
    # begun before the sparse branch, which needs no sum, so that it is on its way meanwhile
    states = None if all_else is None else started_sum(linear.states(all_else), call.group)
    output, lse = sparse(call)
    tokens = call.query.shape[1]
    of_grid = output[:, :tokens]
    if all_else is not None and states is not None and call.linear_weight is not None:
        far, normaliser = linear.read(all_else, finished_sum(states, call.group))
        log_far = (call.linear_weight.to(normaliser.dtype)[:, None] * normaliser).log()
        of_grid = under_common_sum(of_grid, lse, far, log_far)
    of_grid = finish(of_grid, call.output_norm, call.output_gate).to(call.query.dtype)
    if call.extra is None:
        return of_grid
    return call.extra.around(of_grid, output[:, tokens:].to(of_grid.dtype))


def linear_branch(call: Call) -> Call:
    """MHLA over all blocks alone, without norm and gate."""
    return replace(
        with_least_mask(call),
        mixing=least_mixing(call.mixing),
        output_norm=None,
        output_gate=None,
        linear_weight=None,
        lists=None,
        pooled_bias=None,
        extra=None,
    )


def under_common_sum(
    near: torch.Tensor, log_near: torch.Tensor, far: torch.Tensor, log_far: torch.Tensor
) -> torch.Tensor:
    """Two outputs (B, N, H, D) under the sum of their denominators, whose logs are (B, N, H, 1)."""
    return torch.sigmoid(log_near - log_far) * near + torch.sigmoid(log_far - log_near) * far


def least_mixing(mixing: torch.Tensor) -> torch.Tensor:
    """A mixing matrix of which no entry is 0, in the type of sums."""
    return mixing.to(sum_dtype(mixing.dtype)) + LEAST_MIXING


def with_least_mask(call: Call) -> Call:
    """A call whose masked keys still weigh something."""
    if call.key_mask is None:
        return call
    return replace(call, key_mask=call.key_mask.to(sum_dtype(call.query.dtype)).clamp_min(LEAST_MASK))
