"""The one entry to MHLA as a function: checks the arguments and picks a backend."""

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from .blocks import check_layout
from .eager import eager_attention
from .feature_maps import get_feature_map
from .near_field import near_field_attention
from .rotary import Rotary
from .triton import triton_attention, triton_near_field_attention, why_not

_BACKENDS: dict[str, Callable[..., torch.Tensor]] = {"eager": eager_attention, "triton": triton_attention}
_NEAR_FIELD_BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "eager": near_field_attention,
    "triton": triton_near_field_attention,
}


def backend_names() -> list[str]:
    """What ``backend`` of :func:`mhla_attention` may be."""
    return ["auto", *_BACKENDS]


def check_backend(name: str) -> None:
    """Raise unless ``name`` is a backend.

    Raises:
        ValueError: with the nearest names.
    """
    if name not in backend_names():
        near = get_close_matches(name, backend_names(), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown backend {name!r}; allowed: {', '.join(backend_names())}.{hint}")


def mhla_attention(
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
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (paper, Eq. 3-5).

    For a query q in block i, with φ the feature map, S_b = Σ φ(k_t) v_tᵀ and z_b = Σ φ(k_t) over the tokens t of
    block b::

        o = φ(q)ᵀ Σ_b m_ib S_b  /  φ(q)ᵀ Σ_b m_ib z_b

    The weights that a query gives to all tokens sum to 1, except with RoPE after the feature map, which turns the
    numerator alone. Differentiable in query, key, value, mixing, output_norm and output_gate.

    Shapes: B batch, N tokens, H heads, D head dim, M blocks.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        mixing: (M, M), or (H, M, M) for one matrix per head; row i belongs to query block i. Any float type.
        grid: token grid, 1 to 3 axes whose product is N.
        blocks: block count per axis of the grid; the product is M.
        feature_map: a name registered with :func:`register_feature_map`.
        rotary: (cos, sin), each (1 or B, N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        rope: "after": rotate φ(q) and φ(k), normaliser unrotated; "before": rotate q and k, then apply φ.
        normalize: divide by the normaliser. Without it the output grows with N and ``output_norm`` should fix it.
        eps: floor that the relu and elu+1 feature maps add.
        key_mask: (B, N), bool (True takes part) or a weight in [0, 1] on φ(k).
        output_norm: (D,) weight of an RMSNorm over each head's output.
        output_gate: (B, N, H, D); the output is multiplied with its SiLU.
        far_field_weight: λ, (H,), positive: a query attends to its own block with softmax attention and to the other
            blocks with MHLA, whose weights are multiplied with λ, under one denominator; see
            :mod:`mhla_diffusers.attention.near_field`. None for MHLA throughout.
        backend: one of :func:`backend_names`. "triton": fused kernels, for float32, bfloat16 and float16 on CUDA and
            ROCm devices, D up to 256 and the built-in feature maps. "eager": torch operations, for everything. "auto":
            triton on a CUDA or ROCm device if it can run the call, else eager.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid, blocks, feature map, rope or backend do not fit, or the backend
            asked for cannot run the call.
    """
    grid, blocks = check_layout(grid, blocks)
    get_feature_map(feature_map)
    check_backend(backend)
    _check_tensors(query, key, value)
    _check_grid(query, grid)
    _check_mixing(mixing, query.shape[2], math.prod(blocks))
    _check_options(query, rotary, rope, key_mask, output_norm, output_gate)
    if query.numel() == 0:
        return torch.empty_like(query)
    if backend == "auto":
        fused = query.device.type == "cuda" and why_not(query, feature_map, rotary) is None
        backend = "triton" if fused else "eager"
    settings: dict[str, Any] = {
        "feature_map": feature_map,
        "rotary": rotary,
        "rope": rope,
        "eps": eps,
        "key_mask": key_mask,
        "output_norm": output_norm,
        "output_gate": output_gate,
    }
    if far_field_weight is None:
        return _BACKENDS[backend](query, key, value, mixing, grid, blocks, normalize=normalize, **settings)
    _check_far_field(far_field_weight, query, feature_map, normalize, eps)
    return _NEAR_FIELD_BACKENDS[backend](query, key, value, mixing, grid, blocks, far_field_weight, **settings)


def _check_far_field(
    far_field_weight: torch.Tensor, query: torch.Tensor, feature_map: str, normalize: bool, eps: float
) -> None:
    if tuple(far_field_weight.shape) != (query.shape[2],):
        raise ValueError(f"far_field_weight must have shape ({query.shape[2]},), got {tuple(far_field_weight.shape)}.")
    if not normalize:
        raise ValueError("A near field shares one denominator with the far field; it needs normalize=True.")
    if feature_map == "relu" and not eps > 0:
        raise ValueError(f"eps={eps} lets a query of the relu feature map have no far field; it must be positive.")


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be (B, N, H, D), got shape {tuple(query.shape)}.")
    if not query.is_floating_point():
        raise ValueError(f"query must be floating point, got {query.dtype}.")
    for name, tensor in (("key", key), ("value", value)):
        for what in ("shape", "dtype", "device"):
            expected, found = getattr(query, what), getattr(tensor, what)
            if found != expected:
                raise ValueError(f"{name} has {what} {found}, but query has {expected}; they must be the same.")


def _check_grid(query: torch.Tensor, grid: tuple[int, ...]) -> None:
    if math.prod(grid) != query.shape[1]:
        raise ValueError(
            f"Token grid {grid} holds {math.prod(grid)} tokens, but query has N={query.shape[1]}; "
            "the product of the grid must be N."
        )


def _check_mixing(mixing: torch.Tensor, heads: int, blocks: int) -> None:
    if tuple(mixing.shape) not in ((blocks, blocks), (heads, blocks, blocks)):
        raise ValueError(
            f"mixing has shape {tuple(mixing.shape)}; for {blocks} blocks and {heads} heads it must be "
            f"({blocks}, {blocks}) or ({heads}, {blocks}, {blocks})."
        )


def _check_options(
    query: torch.Tensor,
    rotary: Rotary | None,
    rope: str,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> None:
    batch, tokens, _, head_dim = query.shape
    if rope not in ("after", "before"):
        raise ValueError(f"Unknown rope={rope!r}; allowed: 'after' or 'before' (the feature map).")
    for table in rotary or ():
        if table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (tokens, 1, head_dim):
            raise ValueError(
                f"rotary tables must be (1 or {batch}, {tokens}, 1, {head_dim}), got {tuple(table.shape)}."
            )
    expected = {"key_mask": (batch, tokens), "output_norm": (head_dim,), "output_gate": tuple(query.shape)}
    given = {"key_mask": key_mask, "output_norm": output_norm, "output_gate": output_gate}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} must have shape {expected[name]}, got {tuple(tensor.shape)}.")
