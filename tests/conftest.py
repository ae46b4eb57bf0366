"""Triton's kernels run through its interpreter in these tests where there is no GPU.

The variable must stand before anything imports Triton, diffusers included: whether a kernel is made for the interpreter
or for a GPU is settled when it is decorated.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
