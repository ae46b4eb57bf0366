"""N x N attention matrices of a transformer, patched or not, their rank and entropy."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from mhla_diffusers.attention import SparseCall, reference_weights
from mhla_diffusers.attention.rope import rotated
from mhla_diffusers.auditing import TransformerCall
from mhla_diffusers.config import SparseConfig
from mhla_diffusers.errors import check_names
from mhla_diffusers.families import AttentionInputs, get_family, named_arguments
from mhla_diffusers.patching import find_patched

RANK_TOLERANCE = 1e-4
"""Singular values above this fraction of the largest count."""


@torch.no_grad()
def each_attention_matrix(
    transformer: nn.Module, batch: TransformerCall, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and float64 (B, H, N, N) of every self-attention, or of some, one layer in memory at a time.

    Rows are queries. A matrix times the value is the input of the output projection, before a norm, gate or convolution
    of the patch. It covers the grid's tokens only: rows lack the weight that goes to extra tokens.
    """
    family = get_family(transformer)
    attentions: dict[str, Any] = family.self_attentions(transformer)
    chosen = list(attentions) if names is None else list(names)
    check_names(chosen, list(attentions), "self-attention")
    if family.mhla is None:
        raise ValueError(f"{family.name!r} has no explicit attention matrix here; use SANA, DiT or Wan.")
    inputs: dict[str, dict[str, Any]] = {}
    with ExitStack() as hooks:
        for name in chosen:

            def note(attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                inputs[name] = named_arguments(attn, args, kwargs)

            hooks.enter_context(attentions[name].register_forward_pre_hook(note, with_kwargs=True))
        batch.predict(transformer)
    grid = batch.grid(transformer)
    for name in chosen:
        given = family.mhla.read(attentions[name], inputs[name], grid)
        yield name, _matrix(attentions[name], given, transformer, name)


def _matrix(attn: Any, given: AttentionInputs, transformer: nn.Module, name: str) -> torch.Tensor:
    """Return the attention matrix: float64 (B, H, N, N)."""
    family, layer = get_family(transformer), getattr(attn, "mhla", None)
    if layer is not None:
        weights: torch.Tensor = layer.weights(given)
        return weights
    patched = find_patched(transformer).get("transformer")
    if patched is not None and name in patched.chosen:
        assert isinstance(patched.config, SparseConfig)
        query, key = (rotated(x, given.rotary) for x in (given.query, given.key))
        rule = patched.config.rule_on(given.grid)
        tensors: dict[str, Any] = {"query": query, "key": key, "value": given.value, "key_mask": given.key_mask}
        return reference_weights(SparseCall(**tensors, grid=given.grid, sparse=rule, far=patched.config.far))
    if family.computes == "linear":
        query, key = given.query.double().relu(), given.key.double().relu()
        normaliser = torch.einsum("bqhd,bkhd->bhqk", query, key).sum(dim=-1, keepdim=True)
        query, key = (rotated(x, given.rotary) for x in (query, key))  # RoPE rotates only the numerator
        return torch.einsum("bqhd,bkhd->bhqk", query, key) / (normaliser + family.eps)
    query, key = (rotated(x, given.rotary).double() for x in (given.query, given.key))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if given.key_mask is not None:
        scores = scores + given.key_mask.double().log()[:, None, None, :]
    return scores.softmax(dim=-1)


def rank(matrix: torch.Tensor) -> float:
    """Count singular values above 1e-4 of the largest, averaged over samples and heads of (B, H, N, N)."""
    return float(torch.linalg.matrix_rank(matrix, rtol=RANK_TOLERANCE).double().mean())


def entropy(matrix: torch.Tensor) -> float:
    """Return the entropy of a query's weights |w| in nats, averaged over (B, H, N); with RoPE w can be negative."""
    total = matrix.abs().sum(dim=-1, keepdim=True)
    # linear attention gives every key 0 where all channels of a query are negative
    weights = matrix.abs() / total.clamp_min(torch.finfo(total.dtype).tiny)
    return float(torch.special.entr(weights).sum(dim=-1).mean())
