"""The eager backend: PyTorch operations, for any device and dtype. :mod:`.triton.backend` has the same functions."""

from .causal import own_block
from .extra import beside_extra
from .linear import linear, read, states
from .sparse import sparse

__all__ = ["beside_extra", "linear", "own_block", "read", "sparse", "states"]
