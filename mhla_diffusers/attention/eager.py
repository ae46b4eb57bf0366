"""The eager backend: PyTorch operations, for any device and dtype. :mod:`.triton.backend` has the same functions."""

from .causal import own_block
from .linear import linear, read, states
from .sparse import sparse

__all__ = ["linear", "own_block", "read", "sparse", "states"]
