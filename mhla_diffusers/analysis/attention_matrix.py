"""Attention matrices of a transformer, softmax or MHLA, and what their rank and entropy are."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..attention.reference import reference_weights
from ..attention.rotary import Rotary, apply_rotary, pair_tables
from ..families import get_family
from ..patching.processor import MHLAProcessor, project

RANK_TOLERANCE = 1e-4
"""Singular values above this part of the largest count."""


class TransformerInput(Protocol):
    """What a transformer runs on: a ``NoisedBatch`` of training, or a ``TransformerCall`` that was recorded."""

    @property
    def hidden_states(self) -> torch.Tensor:
        """The latents (B, C, ...)."""

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Run the transformer."""


def attention_matrices(transformer: nn.Module, batch: TransformerInput) -> dict[str, torch.Tensor]:
    """Attention matrix of every self-attention on one batch: name → float64 (B, H, N, N), rows are queries."""
    return dict(each_attention_matrix(transformer, batch))


@torch.no_grad()
def each_attention_matrix(
    transformer: nn.Module, batch: TransformerInput, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same one layer at a time, so that no more than one layer's matrices are held.

    Args:
        transformer: patched or not.
        batch: what it runs on.
        names: of the self-attentions; None for all.

    Raises:
        ValueError: a name that is no self-attention.
    """
    family = get_family(transformer)
    attentions: dict[str, Any] = family.self_attentions(transformer)
    chosen = list(attentions) if names is None else list(names)
    unknown = [name for name in chosen if name not in attentions]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no self-attention; allowed: {', '.join(attentions)}.")
    grid = family.token_grid(transformer, batch.hidden_states)
    inputs = _attention_inputs(transformer, {name: attentions[name] for name in chosen}, batch)
    for name in chosen:
        yield name, _weights(attentions[name], *inputs[name], grid, family.name)


def _attention_inputs(
    transformer: nn.Module, attentions: dict[str, Any], batch: TransformerInput
) -> dict[str, tuple[torch.Tensor, Rotary | None]]:
    """Name → hidden states (B, N, channels) and rotary tables that each attention gets."""
    inputs: dict[str, tuple[torch.Tensor, Rotary | None]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotary = kwargs.get("rotary_emb", args[3] if len(args) > 3 else None)
            inputs[name] = (args[0] if args else kwargs["hidden_states"], rotary)

        return note

    handles = [a.register_forward_pre_hook(watch(name), with_kwargs=True) for name, a in attentions.items()]
    try:
        batch.predict(transformer)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


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
    """:func:`rank`, averaged over layers."""
    return sum(map(rank, matrices.values())) / len(matrices)


def mean_entropy(matrices: dict[str, torch.Tensor]) -> float:
    """:func:`entropy`, averaged over layers."""
    return sum(map(entropy, matrices.values())) / len(matrices)


def rank(matrix: torch.Tensor, tolerance: float = RANK_TOLERANCE) -> float:
    """Singular values above ``tolerance`` times the largest, averaged over samples and heads of (B, H, N, N)."""
    return float(torch.linalg.matrix_rank(matrix, rtol=tolerance).double().mean())


def entropy(matrix: torch.Tensor) -> float:
    """Entropy of a query's weights in nats, averaged over (B, H, N); with RoPE weights can be negative, so of |w|."""
    weights = matrix.abs() / matrix.abs().sum(dim=-1, keepdim=True)
    return float(torch.special.entr(weights).sum(dim=-1).mean())
