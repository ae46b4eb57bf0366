"""What happened to the attention: the N x N matrices that a patched or unpatched model uses."""

from .attention_matrix import attention_matrices, mean_entropy, mean_rank

__all__ = ["attention_matrices", "mean_entropy", "mean_rank"]
