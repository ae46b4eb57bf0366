"""Merge two attentions under one denominator, given the logs of theirs.

With LSE the logarithm of one sum and λ · normaliser the other, w = σ(LSE − log(λ · normaliser)) is the part of the
first, and the merged output is w · first + (1 − w) · second.
"""

import torch

from .precision import LEAST_MIXING, sum_dtype


def under_common_sum(
    near: torch.Tensor, log_near: torch.Tensor, far: torch.Tensor, log_far: torch.Tensor
) -> torch.Tensor:
    """Merge two outputs (..., D) under the sum of their denominators, whose logs are (..., 1)."""
    return torch.sigmoid(log_near - log_far) * near + torch.sigmoid(log_far - log_near) * far


def least_mixing(mixing: torch.Tensor) -> torch.Tensor:
    """Return the mixing matrix in the type of sums, without an entry of 0."""
    return mixing.to(sum_dtype(mixing.dtype)) + LEAST_MIXING
