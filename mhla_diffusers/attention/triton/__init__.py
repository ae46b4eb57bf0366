"""Fused Triton kernels for MHLA, forward and backward. Importing this package does not import Triton."""

from .backend import TRITON_CAUSAL, triton_attention, why_not

__all__ = ["TRITON_CAUSAL", "triton_attention", "why_not"]
