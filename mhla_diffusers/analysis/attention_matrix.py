"""Attention matrices of a transformer, softmax or MHLA, and what their rank and entropy are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention.reference import reference_weights
from ..attention.rotary import Rotary, apply_rotary, pair_tables
from ..families import get_family
from ..processor import MHLAProcessor, project
from ..training.diffusion import NoisedBatch

_RANK_TOLERANCE = 1e-4


@torch.no_grad()
def attention_matrices(transformer: nn.Module, batch: NoisedBatch) -> dict[str, torch.Tensor]:
    """Attention matrix of every self-attention on one batch: name → float64 (B, H, N, N), rows are queries."""
    family = get_family(transformer)
    grid = family.token_grid(transformer, batch.hidden_states)
    inputs: dict[str, tuple[torch.Tensor, Rotary | None]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotary = kwargs.get("rotary_emb", args[3] if len(args) > 3 else None)
            inputs[name] = (args[0] if args else kwargs["hidden_states"], rotary)

        return note

    attentions: dict[str, Any] = family.self_attentions(transformer)
    handles = [a.register_forward_pre_hook(watch(name), with_kwargs=True) for name, a in attentions.items()]
    try:
        batch.predict(transformer)
    finally:
        for handle in handles:
            handle.remove()
    return {name: _weights(attentions[name], *inputs[name], grid, family.name) for name in attentions}


def _weights(
    attn: Any, hidden_states: torch.Tensor, rotary: Rotary | None, grid: tuple[int, ...], family: str
) -> torch.Tensor:
    query, key, _ = project(attn, hidden_states)
    if isinstance(attn.processor, MHLAProcessor):
        config = attn.mhla.config
        return reference_weights(
            query,
            key,
            attn.mhla.mixing,
            grid,
            config.blocks,
            feature_map=config.feature_map,
            rotary=rotary,
            rope=config.rope,
            normalize=config.normalize,
            eps=config.eps,
        )
    if family == "sana":
        one = torch.ones(1, 1, device=query.device)
        return reference_weights(query, key, one, grid, (1,) * len(grid), eps=1e-15)
    query, key = query.double(), key.double()
    if rotary is not None:
        cos, sin = pair_tables(rotary)
        query, key = (apply_rotary(x, cos.double(), sin.double()) for x in (query, key))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    return scores.softmax(dim=-1)


def mean_rank(matrices: dict[str, torch.Tensor]) -> float:
    """Singular values above 1/10000 of the largest, averaged over layers, samples and heads."""
    ranks = [torch.linalg.matrix_rank(m, rtol=_RANK_TOLERANCE).double().mean() for m in matrices.values()]
    return float(torch.stack(ranks).mean())


def mean_entropy(matrices: dict[str, torch.Tensor]) -> float:
    """Entropy of a query's weights in nats, averaged over everything; with RoPE weights can be negative, so of |w|."""
    entropies = []
    for matrix in matrices.values():
        weights = matrix.abs() / matrix.abs().sum(dim=-1, keepdim=True)
        entropies.append(torch.special.entr(weights).sum(dim=-1).mean())
    return float(torch.stack(entropies).mean())
