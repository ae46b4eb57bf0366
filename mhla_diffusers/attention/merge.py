"""Exact tiles and the far field under one denominator.

The exact part gives an output and the logarithm of its sum of weights, MHLA over all blocks an output and its
normaliser. With w the share of the exact part in the common sum of weights, w = σ(log-sum − log(λ · normaliser)), the
two outputs add up to o = w · exact + (1 − w) · far. Every backend brings its own two parts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from .call import Call
from .eager import finish, sum_dtype
from .reference import LEAST_MASK, LEAST_MIXING
from .tiles import ExactTiles

ExactAttention = Callable[[Call, ExactTiles], tuple[torch.Tensor, torch.Tensor]]
"""Gives output (B, N, H, D) and log of the sum of weights (B, N, H, 1); :mod:`mhla_diffusers.attention.exact`."""
LinearAttention = Callable[[Call], tuple[torch.Tensor, ...]]
"""Gives output (B, N, H, D) and normaliser (B, N, H, 1); :mod:`mhla_diffusers.attention.eager`."""


def merged_attention(call: Call, tiles: ExactTiles, exact: ExactAttention, linear: LinearAttention) -> torch.Tensor:
    """Exact tiles and, where the call has a ``far_field_weight``, MHLA over all blocks: (B, N, H, D) like the query.

    Args:
        call: the call.
        tiles: its exact tiles.
        exact: the backend's attention over exact tiles.
        linear: the backend's MHLA.
    """
    output, log_sum = exact(call, tiles)
    if call.far_field_weight is not None:
        far, normaliser = linear(far_field(call))
        log_far = (call.far_field_weight.to(normaliser.dtype)[:, None] * normaliser).log()
        share, rest = torch.sigmoid(log_sum - log_far), torch.sigmoid(log_far - log_sum)
        output = share * output + rest * far
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def far_field(call: Call) -> Call:
    """MHLA over all blocks: what a call leaves to the summaries, without λ, exact tiles, norm and gate."""
    mask = call.key_mask
    return replace(
        call,
        mixing=call.mixing.to(sum_dtype(call.mixing.dtype)) + LEAST_MIXING,
        key_mask=mask.to(sum_dtype(call.query.dtype)).clamp_min(LEAST_MASK) if mask is not None else None,
        output_norm=None,
        output_gate=None,
        far_field_weight=None,
        exact=None,
        mean_bias=None,
    )
