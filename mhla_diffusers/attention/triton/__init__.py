"""Fused Triton kernels for MHLA, forward and backward. Importing this package does not import Triton."""
