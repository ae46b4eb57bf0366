"""MHLA from its definition, token by token, in float64: the truth that every backend is held to.

Nothing here is fast: the N x N weights of the paper's Eq. 5 are formed one query-key pair at a time.
"""

from collections.abc import Sequence

import torch

from .blocks import block_index
from .feature_maps import get_feature_map
from .rotary import Rotary, apply_rotary, pair_tables

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the output RMSNorm; the value of the paper's Wan code."""


def reference_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    *,
    feature_map: str = "relu",
    rotary: Rotary | None = None,
    rope: str = "after",
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: torch.Tensor | None = None,
    far_field_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The effective attention matrix (paper, Eq. 5): float64 (B, H, N, N), row = query token.

    Arguments are those of :func:`mhla_diffusers.attention.mhla_attention`.
    """
    phi = get_feature_map(feature_map)
    query, key = query.to(torch.float64, copy=True), key.to(torch.float64, copy=True)
    mixing = mixing.double()
    near_query, near_key = query.clone(), key.clone()
    tables = pair_tables((rotary[0].double(), rotary[1].double())) if rotary is not None else None
    if tables is not None:
        near_query, near_key = apply_rotary(query, *tables), apply_rotary(key, *tables)
    if tables is not None and rope == "before":
        query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
    query, key = phi(query, eps), phi(key, eps)
    if key_mask is not None:
        key = key * key_mask[:, :, None, None]

    block_of = block_index(grid, blocks).to(query.device)
    coefficients = mixing[..., block_of[:, None], block_of[None, :]]
    plain = torch.einsum("bqhd,bkhd->bhqk", query, key)
    if tables is not None and rope == "after":
        query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
    weights = coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key)
    normaliser = coefficients * plain
    if far_field_weight is not None:
        scores = torch.einsum("bqhd,bkhd->bhqk", near_query, near_key) / near_query.shape[-1] ** 0.5
        # a common factor of numerator and denominator, which keeps large scores finite
        largest = scores.amax(dim=-1, keepdim=True).clamp_min(0)
        near = (scores - largest).exp()
        if key_mask is not None:
            near = near * key_mask[:, None, None, :]
        far = far_field_weight.double()[:, None, None] * (-largest).exp()
        same_block = block_of[:, None] == block_of[None, :]
        weights, normaliser = (torch.where(same_block, near, far * x) for x in (weights, normaliser))
    if normalize:
        weights = weights / normaliser.sum(dim=-1, keepdim=True)
    return weights


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    *,
    feature_map: str = "relu",
    rotary: Rotary | None = None,
    rope: str = "after",
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: torch.Tensor | None = None,
    output_norm: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None,
    far_field_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """MHLA in float64: (B, N, H, D). Arguments are those of :func:`mhla_diffusers.attention.mhla_attention`."""
    weights = reference_weights(
        query,
        key,
        mixing,
        grid,
        blocks,
        feature_map=feature_map,
        rotary=rotary,
        rope=rope,
        normalize=normalize,
        eps=eps,
        key_mask=key_mask,
        far_field_weight=far_field_weight,
    )
    output = torch.einsum("bhqk,bkhd->bqhd", weights, value.double())
    if output_norm is not None:
        mean_square = output.square().mean(dim=-1, keepdim=True)
        output = output * torch.rsqrt(mean_square + OUTPUT_NORM_EPS) * output_norm.double()
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.double())
    return output
