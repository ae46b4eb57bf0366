"""Two attentions under one denominator: their outputs weighed by the sums of their weights, known by logarithms.

With LSE the logarithm of one sum and λ · normaliser the other, w = σ(LSE − log(λ · normaliser)) is the part of the
first, and the merged output is w · first + (1 − w) · second.
"""

from dataclasses import replace

import torch

from .call import MHLACall
from .precision import LEAST_MASK, LEAST_MIXING, sum_dtype


def under_common_sum(
    near: torch.Tensor, log_near: torch.Tensor, far: torch.Tensor, log_far: torch.Tensor
) -> torch.Tensor:
    """Merge two outputs (..., D) under the sum of their denominators, whose logs are (..., 1)."""
    return torch.sigmoid(log_near - log_far) * near + torch.sigmoid(log_far - log_near) * far


def linear_branch(call: MHLACall) -> MHLACall:
    """Return MHLA over all blocks as it stands beside softmax: without norm and gate, its normaliser above 0."""
    mask = call.key_mask
    if mask is not None:
        mask = mask.to(sum_dtype(call.query.dtype)).clamp_min(LEAST_MASK)
    return replace(call, key_mask=mask, mixing=least_mixing(call.mixing), output_norm=None, output_gate=None)


def least_mixing(mixing: torch.Tensor) -> torch.Tensor:
    """Return the mixing matrix in the type of sums, without an entry of 0."""
    return mixing.to(sum_dtype(mixing.dtype)) + LEAST_MIXING
