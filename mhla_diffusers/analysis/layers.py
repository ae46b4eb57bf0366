"""Rank and entropy of the attention, layer by layer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention.blocks import block_sizes
from ..families import get_family
from ..patching.processor import MHLAProcessor
from .attention_matrix import TransformerInput, each_attention_matrix, entropy, rank

LARGEST_GRID = 4096
"""Tokens up to which N x N matrices are formed."""


@dataclass(frozen=True)
class LayerAnalysis:
    """One self-attention on one input."""

    name: str
    attention: str
    """MHLA, linear or softmax."""
    tokens: int
    rank: float
    """See :func:`mhla_diffusers.analysis.rank`; averaged over samples and heads."""
    rank_bound: int
    """What the rank of this attention can be at most."""
    entropy: float
    """In nats; log(tokens) for uniform weights."""


def rank_bound(attn: Any, grid: tuple[int, ...], family: str) -> int:
    """The largest rank that the attention matrix can have.

    N for softmax, min(N, D) for plain linear attention, Σ_b min(n_b, D), at most N, for MHLA (paper, Sec. 4.3).

    Args:
        attn: the self-attention.
        grid: token grid.
        family: name of the model's family; SANA's own attention is linear.
    """
    tokens, head_dim = torch.Size(grid).numel(), int(attn.inner_dim) // int(attn.heads)
    kind = _kind(attn, family)
    if kind == "softmax":
        return tokens
    sizes = block_sizes(grid, attn.mhla.config.blocks) if kind == "MHLA" else [tokens]
    return sum(min(size, head_dim) for size in sizes)


def analyze_layers(
    transformer: nn.Module,
    batch: TransformerInput,
    names: Collection[str] | None = None,
    each: Callable[[str, torch.Tensor], None] | None = None,
) -> list[LayerAnalysis]:
    """Rank and entropy of self-attentions on one input.

    Args:
        transformer: patched or not.
        batch: what it runs on.
        names: of the self-attentions; None for all.
        each: called with name and attention matrix (B, H, N, N) of every layer, for pictures of it.

    Raises:
        ValueError: a name that is no self-attention, or too many tokens to form N x N matrices.
    """
    family = get_family(transformer)
    grid = tuple(family.token_grid(transformer, batch.hidden_states))
    tokens = torch.Size(grid).numel()
    if tokens > LARGEST_GRID:
        raise ValueError(
            f"The input has {tokens} tokens; {tokens} x {tokens} attention matrices are formed up to {LARGEST_GRID}. "
            "Give a smaller resolution or fewer frames."
        )
    attentions = family.self_attentions(transformer)
    layers = []
    for name, matrix in each_attention_matrix(transformer, batch, names):
        if each is not None:
            each(name, matrix)
        attn = attentions[name]
        bound = rank_bound(attn, grid, family.name)
        layers.append(LayerAnalysis(name, _kind(attn, family.name), tokens, rank(matrix), bound, entropy(matrix)))
    return layers


def _kind(attn: Any, family: str) -> str:
    if isinstance(attn.processor, MHLAProcessor):
        return "MHLA"
    return "linear" if family == "sana" else "softmax"
