"""Fused Triton kernels for MHLA, forward and backward. Importing this package does not import Triton."""

from .backend import triton_attention, why_not

__all__ = ["triton_attention", "why_not"]
