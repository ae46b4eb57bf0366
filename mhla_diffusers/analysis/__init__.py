"""What happened to the attention: the N x N matrices that a patched or unpatched model uses."""

from .attention_matrix import attention_matrices, each_attention_matrix, entropy, mean_entropy, mean_rank, rank
from .layers import LayerAnalysis, analyze_layers, rank_bound

__all__ = [
    "LayerAnalysis",
    "analyze_layers",
    "attention_matrices",
    "each_attention_matrix",
    "entropy",
    "mean_entropy",
    "mean_rank",
    "rank",
    "rank_bound",
]
