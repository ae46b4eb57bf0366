"""The eager backend: PyTorch operations, for any device and dtype.

:mod:`.triton.branches` has the same functions, on kernels. Autocast is off where they run.
"""

from .causal import own_block
from .linear import linear, read, states
from .sparse import sparse

__all__ = ["linear", "own_block", "read", "sparse", "states"]
