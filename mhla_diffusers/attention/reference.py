"""MHLA from its definition, token by token, in float64, which every backend is compared with.

Nothing here is fast: the N x N weights of the paper's Eq. 5 are formed one query-key pair at a time.
"""

import math

import torch

from .call import BlockLists, Call
from .feature_maps import get_feature_map
from .layout import block_index, layout_of
from .precision import LEAST_MASK, LEAST_MIXING, OUTPUT_NORM_EPS
from .rope import rotated
from .sparse import key_block_of_tokens, with_lists


def reference_weights(call: Call) -> torch.Tensor:
    """Form the effective attention matrix (paper, Eq. 5): float64 (B, H, N, N), row = query token.

    It belongs to the attention before output norm and gate; the value is not read. A sample of which the mask leaves no
    key has zeros.
    """
    query, key = call.query.double(), call.key.double()
    near_query, near_key = rotated(query, call.rotary), rotated(key, call.rotary)
    mask = torch.ones(key.shape[:2], device=key.device) if call.key_mask is None else call.key_mask
    mask = mask.double()
    weights, normaliser = _linear(call, mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", near_query, near_key) / query.shape[-1] ** 0.5
    if call.causal is not None:
        weights, normaliser = _causal(call, weights, normaliser, scores, mask)
    elif call.sparse is not None or any(call.extra):
        weights, normaliser = _beside_softmax(with_lists(call), weights, normaliser, scores, near_query, near_key, mask)
    has_none = ~mask.any(dim=1)[:, None, None, None]
    if call.normalize:
        weights = weights / normaliser.sum(dim=-1, keepdim=True).masked_fill(has_none, 1)
    return weights.masked_fill(has_none, 0)


def _linear(call: Call, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights among the grid's tokens, and what they are divided by: (B, H, N, N) each."""
    phi, mixing = get_feature_map(call.feature_map), call.mixing.double()
    query, key, mask = (call.on_grid(x) for x in (call.query.double(), call.key.double(), mask))
    rotary = None if call.rotary is None else (call.on_grid(call.rotary[0]), call.on_grid(call.rotary[1]))
    if call.rope == "before":
        query, key, rotary = rotated(query, rotary), rotated(key, rotary), None
    query, key = phi(query.clone(), call.eps), phi(key.clone(), call.eps)
    if call.sparse is not None or any(call.extra) or call.causal is not None:
        mixing, mask = mixing + LEAST_MIXING, mask.clamp_min(LEAST_MASK)
    key = key * mask[:, :, None, None]
    block_of = block_index(call.grid, call.blocks).to(query.device)[: query.shape[1]]
    coefficients = mixing[..., block_of[:, None], block_of[None, :]]
    normaliser = coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key)
    query, key = rotated(query, rotary), rotated(key, rotary)
    return coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key), normaliser


def _causal(
    call: Call, weights: torch.Tensor, normaliser: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and what they are divided by, of what a query sees (:mod:`mhla_diffusers.attention.causal`).

    Args:
        call: the call.
        weights: of MHLA throughout, (B, H, N, N).
        normaliser: likewise.
        scores: of softmax, likewise.
        mask: (B, N).
    """
    frame_block = block_index(call.grid[:1], call.blocks[:1]).repeat_interleave(math.prod(call.grid[1:]))
    frame_block = frame_block[: scores.shape[-1]].to(scores.device)
    place = torch.arange(len(frame_block), device=scores.device) if call.causal == "token" else frame_block
    seen = place[:, None] >= place
    if call.linear_weight is None:
        return torch.where(seen, weights, 0.0), torch.where(seen, normaliser, 0.0)
    own = frame_block[:, None] == frame_block
    largest = torch.where(own & seen, scores, -math.inf).amax(dim=-1, keepdim=True)
    # the linear branch's factor stays finite; without earlier frame blocks there is none, and own scores may all be low
    largest = torch.where(frame_block[:, None] > 0, largest.clamp_min(0), largest)
    softmax = (scores - largest).exp() * mask.clamp_min(LEAST_MASK)[:, None, None]
    earlier = (-largest.clamp_min(0)).exp() * call.linear_weight.double()[:, None, None]
    weights, normaliser = (torch.where(own, softmax, earlier * x) for x in (weights, normaliser))
    return torch.where(seen, weights, 0.0), torch.where(seen, normaliser, 0.0)


def _beside_softmax(
    call: Call,
    weights: torch.Tensor,
    normaliser: torch.Tensor,
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and what they are divided by, of the whole sequence, with those of softmax attention.

    A mean of n tokens with n times the weight of one key gives every one of its tokens the weight of that key.

    Args:
        call: with lists.
        weights: of the linear branch, among the grid's tokens.
        normaliser: likewise.
        scores: of softmax, among all tokens: (B, H, N, N).
        query: after RoPE, (B, N, H, D).
        key: likewise.
        mask: (B, N).
    """
    lists = call.sparse
    assert isinstance(lists, BlockLists)
    # a common factor of numerator and denominator, which keeps large scores finite
    largest = scores.amax(dim=-1, keepdim=True).clamp_min(0)
    softmax = (scores - largest).exp() * mask[:, None, None]
    rows = slice(call.extra[0], scores.shape[-1] - call.extra[1])
    largest, near = largest[:, :, rows], softmax[:, :, rows, rows]
    query_block = (layout_of(call.grid, lists.block_size).rows.long() // lists.block_size).to(query.device)
    batch, _, heads, _ = query.shape
    key_block = key_block_of_tokens(call, lists).expand(batch, heads, -1)
    of_queries = lists.mask()[:, :, query_block].expand(batch, -1, -1, -1)
    is_listed = of_queries.gather(-1, key_block[:, :, None].expand(-1, -1, len(query_block), -1))
    near = torch.where(is_listed, near, 0.0)
    if call.pooled_bias is not None and not call.lists_everything:
        query, key, mask = (call.on_grid(x) for x in (query, key, mask))
        member = torch.nn.functional.one_hot(key_block, lists.key_blocks).double()
        total = torch.einsum("bkhd,bk,bhkc->bhcd", key, mask, member)
        mean = total / torch.einsum("bk,bhkc->bhc", mask, member).clamp_min(1e-300)[..., None]
        mean = torch.einsum("bhcd,bhkc->bhkd", mean, member)  # of every key its block's
        logits = torch.einsum("bqhd,bhkd->bhqk", query, mean) / query.shape[-1] ** 0.5
        logits = logits + call.pooled_bias.double()[..., None, None] - largest
        near = near + torch.where(is_listed, 0.0, logits.exp() * mask[:, None, None])
    softmax, sums = softmax.clone(), softmax.clone()
    softmax[:, :, rows, rows] = sums[:, :, rows, rows] = near
    if call.linear_weight is not None and not call.lists_everything:
        factor = (-largest).exp() * call.linear_weight.double()[:, None, None]
        softmax[:, :, rows, rows] += factor * weights
        sums[:, :, rows, rows] += factor * normaliser
    return softmax, sums


def reference_attention(call: Call) -> torch.Tensor:
    """MHLA in float64: (B, N, H, D)."""
    output = torch.einsum("bhqk,bkhd->bqhd", reference_weights(call), call.value.double())
    end = output.shape[1] - call.extra[1]
    on_grid = output[:, call.extra[0] : end]
    if call.output_norm is not None:
        mean_square = on_grid.square().mean(dim=-1, keepdim=True)
        on_grid = on_grid * torch.rsqrt(mean_square + OUTPUT_NORM_EPS) * call.output_norm.double()
    if call.output_gate is not None:
        on_grid = on_grid * torch.nn.functional.silu(call.output_gate.double())
    return torch.cat([output[:, : call.extra[0]], on_grid, output[:, end:]], dim=1)
