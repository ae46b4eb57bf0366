"""Attention matrices of a patched or unpatched model, audits, and pictures of them."""

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
    )
else:
    # mhla analyze is in this folder too
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".matrices", ".audit"))
