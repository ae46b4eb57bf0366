"""What happened to the attention: the N x N matrices of a patched or unpatched model, and pictures of an audit."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

__all__ = [
    "LayerAnalysis",
    "analyze_layers",
    "attention_matrices",
    "draw_audit",
    "each_attention_matrix",
    "entropy",
    "mean_entropy",
    "mean_rank",
    "rank",
    "rank_bound",
    "write_audit",
]

if TYPE_CHECKING:
    from .audit import draw_audit, write_audit
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
else:
    # mhla analyze lies in this folder as well
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".matrices", ".audit"))
