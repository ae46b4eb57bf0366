"""Block-sparse attention and Multi-Head Linear Attention of diffusion transformers, in PyTorch and Triton."""

from .attention import *  # noqa: F403
from .attention import __all__ as __all__
