"""Softmax attention inside a block and MHLA across blocks, under one denominator, as fused kernels.

Importing this package does not import Triton. The formula is that of :mod:`mhla_diffusers.attention.near_field`.
"""
