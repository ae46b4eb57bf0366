"""What happened to the attention: the N x N matrices that a patched or unpatched model uses."""

from .matrices import (
    LayerAnalysis,
    analyze_layers,
    attention_matrices,
    each_attention_matrix,
    entropy,
    mean_entropy,
    mean_rank,
    rank,
    rank_bound,
)

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
