"""Exact tiles and the far field under one denominator.

The exact part gives an output and the logarithm of its sum of weights, MHLA over all blocks an output and its
normaliser. With w the share of the exact part in the common sum of weights, w = σ(log-sum − log(λ · normaliser)), the
two outputs add up to o = w · exact + (1 − w) · far. Every backend brings its own two parts. Queries outside the grid
attend to everything exactly, and leave nothing to a far field.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .call import Call
from .eager import finish, sum_dtype
from .parallel.collectives import finished_sum, started_sum, summed
from .parallel.exact import ring_exact_attention
from .reference import LEAST_MASK, LEAST_MIXING
from .tiles import BlockLists

ExactAttention = Callable[[Call, BlockLists], tuple[torch.Tensor, torch.Tensor]]
"""Gives output (B, N + n, H, D) and log of the sum of weights (B, N + n, H, 1), of n extra tokens last;
:mod:`mhla_diffusers.attention.exact`."""


@dataclass(frozen=True)
class LinearAttention:
    """A backend's MHLA throughout, in the two steps between which processes add up what each knows."""

    summaries: Callable[[Call], torch.Tensor]
    """Of the tokens of a call, (B, H, M, D + normalize, D), float32 (float64 for float64 inputs);
    :func:`mhla_diffusers.attention.eager.eager_summaries`."""
    read: Callable[[Call, torch.Tensor], tuple[torch.Tensor, ...]]
    """Output (B, N, H, D) and, with ``normalize``, normaliser (B, N, H, 1), given the summaries of all tokens."""

    def __call__(self, call: Call) -> torch.Tensor:
        """The output (B, N, H, D)."""
        return self.read(call, summed(self.summaries(call), call.group))[0]


def merged_attention(call: Call, tiles: BlockLists, exact: ExactAttention, linear: LinearAttention) -> torch.Tensor:
    """Exact tiles and, where the call has a ``linear_weight``, MHLA over all blocks.

    Args:
        call: the call.
        tiles: its exact tiles.
        exact: the backend's attention over exact tiles; over a ring of processes
            :func:`mhla_diffusers.attention.parallel.exact.ring_exact_attention` takes its place.
        linear: the backend's MHLA.

    Returns:
        (B, N, H, D) like the query; with extra tokens, which norm and gate leave as they are, (B, N + n, H,
        D) in the order of the sequence.
    """
    all_else = linear_branch(call) if call.linear_weight is not None else None
    # begun before the exact part, which needs no sum, so that it is on its way meanwhile
    summaries = None if all_else is None else started_sum(linear.summaries(all_else), call.group)
    output, log_sum = (exact if call.group is None else ring_exact_attention)(call, tiles)
    tokens = call.query.shape[1]
    far = None
    if all_else is not None and summaries is not None:
        far = linear.read(all_else, finished_sum(summaries, call.group))
    of_grid = _merged(call, output[:, :tokens], log_sum[:, :tokens], far)
    if call.extra is None:
        return of_grid
    return call.extra.around(of_grid, output[:, tokens:].to(of_grid.dtype))


def _merged(
    call: Call, output: torch.Tensor, log_sum: torch.Tensor, all_else: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """Of the grid's tokens, given the exact part's output and log of the sum of weights, and those of the far field."""
    if call.linear_weight is not None and all_else is not None:
        far, normaliser = all_else
        log_far = (call.linear_weight.to(normaliser.dtype)[:, None] * normaliser).log()
        output = under_common_sum(output, log_sum, far, log_far)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def linear_branch(call: Call) -> Call:
    """MHLA over all blocks: what a call leaves to the summaries, without all that softmax takes, norm and gate."""
    return replace(
        with_least_mask(call),
        mixing=least_mixing(call.mixing),
        output_norm=None,
        output_gate=None,
        linear_weight=None,
        sparse=None,
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
