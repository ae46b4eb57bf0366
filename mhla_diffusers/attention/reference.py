"""MHLA from its definition, token by token, in float64, which every backend is compared with.

Nothing here is fast: the N x N weights of the paper's Eq. 5 are formed one query-key pair at a time.
"""

import math

import torch

from .call import BlockLists, Call, ExtraTokens
from .feature_maps import get_feature_map
from .layout import block_index, layout_of
from .precision import LEAST_MASK, LEAST_MIXING, OUTPUT_NORM_EPS
from .rope import apply_rotary


def reference_weights(call: Call) -> torch.Tensor:
    """The effective attention matrix (paper, Eq. 5): float64 (B, H, N, N), row = query token.

    It belongs to the attention before output norm and gate; the value is not read. With extra tokens N
    counts them too, and rows and columns are those of the sequence. A sample of which the mask leaves no key has zeros.
    """
    phi = get_feature_map(call.feature_map)
    query, key = call.query.to(torch.float64, copy=True), call.key.to(torch.float64, copy=True)
    near_query, near_key = query.clone(), key.clone()
    rotary = call.rotary_of_tokens
    table = rotary.double() if rotary is not None else None
    if table is not None:
        near_query, near_key = apply_rotary(query, table), apply_rotary(key, table)
    if table is not None and call.rope == "before":
        query, key = apply_rotary(query, table), apply_rotary(key, table)
    query, key = phi(query, call.eps), phi(key, call.eps)
    mixing, mask = call.mixing.double(), call.key_mask
    beside_softmax = call.lists is not None or call.extra is not None
    if beside_softmax or call.causal is not None:
        mixing, mask = mixing + LEAST_MIXING, mask.double().clamp_min(LEAST_MASK) if mask is not None else None
    if mask is not None:
        key = key * mask[:, :, None, None]

    block_of = block_index(call.grid, call.blocks).to(query.device)[: query.shape[1]]
    coefficients = mixing[..., block_of[:, None], block_of[None, :]]
    plain = torch.einsum("bqhd,bkhd->bhqk", query, key)
    if table is not None and call.rope == "after":
        query, key = apply_rotary(query, table), apply_rotary(key, table)
    weights = coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key)
    normaliser = coefficients * plain
    if beside_softmax:
        weights, normaliser = _beside_softmax(call, weights, normaliser, near_query, near_key)
    if call.causal is not None:
        weights, normaliser = _causal(call, weights, normaliser, near_query, near_key, mask)
    has_none = _have_no_key(call)[:, None, None, None]
    if call.normalize:
        weights = weights / normaliser.sum(dim=-1, keepdim=True).masked_fill(has_none, 1)
    return weights.masked_fill(has_none, 0)


def _have_no_key(call: Call) -> torch.Tensor:
    """Of which samples the masks leave nothing to attend to: bool (B,)."""
    masks = [call.key_mask, call.extra.key_mask if call.extra is not None else None]
    taking_part = [mask != 0 for mask in masks if mask is not None]
    if not taking_part:
        return torch.zeros(len(call.query), dtype=torch.bool, device=call.query.device)
    return ~torch.cat(taking_part, dim=1).any(dim=1)


def _causal(
    call: Call,
    weights: torch.Tensor,
    normaliser: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and what they are divided by, of what a query sees (:mod:`mhla_diffusers.attention.causal`).

    Args:
        call: the call.
        weights: of MHLA throughout, (B, H, N, N).
        normaliser: likewise.
        query: after RoPE, (B, N, H, D).
        key: likewise.
        mask: (B, N).
    """
    frame_block = block_index(call.grid[:1], call.blocks[:1]).repeat_interleave(math.prod(call.grid[1:]))
    frame_block = frame_block[: query.shape[1]].to(query.device)
    place = torch.arange(query.shape[1], device=query.device) if call.causal == "token" else frame_block
    seen = place[:, None] >= place
    if call.linear_weight is None:
        return torch.where(seen, weights, 0.0), torch.where(seen, normaliser, 0.0)
    own = frame_block[:, None] == frame_block
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    largest = torch.where(own & seen, scores, -math.inf).amax(dim=-1, keepdim=True)
    # the linear branch's factor stays finite; without earlier frame blocks there is none, and own scores may all be low
    largest = torch.where(frame_block[:, None] > 0, largest.clamp_min(0), largest)
    softmax = (scores - largest).exp()
    if mask is not None:
        softmax = softmax * mask[:, None, None, :]
    earlier = (-largest.clamp_min(0)).exp() * _linear_weight(call)[:, None, None]
    found = (torch.where(own, softmax, earlier * x) for x in (weights, normaliser))
    weights, normaliser = (torch.where(seen, x, 0.0) for x in found)
    return weights, normaliser


def _beside_softmax(
    call: Call, weights: torch.Tensor, normaliser: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and what they are divided by, of the whole sequence, with those of softmax attention.

    Args:
        call: the call.
        weights: of the linear branch, among the grid's tokens: (B, H, N, N).
        normaliser: likewise.
        query: of the grid's tokens after RoPE, (B, N, H, D).
        key: likewise.
    """
    grid_query, grid_key, mask = query, key, call.key_mask
    rows = slice(0, query.shape[1])
    if call.extra is not None:
        rows = slice(call.extra.before, call.extra.before + query.shape[1])
        query, key = (_in_sequence(call.extra, *x) for x in ((query, call.extra.query), (key, call.extra.key)))
        if mask is not None and call.extra.key_mask is not None:
            mask = _in_sequence(call.extra, mask, call.extra.key_mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    # a common factor of numerator and denominator, which keeps large scores finite
    largest = scores.amax(dim=-1, keepdim=True).clamp_min(0)
    softmax = (scores - largest).exp()
    if mask is not None:
        softmax = softmax * mask[:, None, None, :]
    largest, among_grid = largest[:, :, rows], softmax[:, :, rows, rows]
    of_lists = torch.zeros_like(among_grid)
    if call.lists is not None:
        of_lists = _with_pooled_keys(call, call.lists, among_grid, grid_query, grid_key, largest)
    far = (-largest).exp() * _linear_weight(call)[:, None, None]
    softmax, sums = softmax.clone(), softmax.clone()
    softmax[:, :, rows, rows], sums[:, :, rows, rows] = (of_lists + far * x for x in (weights, normaliser))
    return softmax, sums


def _linear_weight(call: Call) -> torch.Tensor:
    """λ, (H,): 0 for a sparse branch alone, and 1 where extra tokens alone stand beside it."""
    if call.lists_everything:
        return torch.zeros_like(call.query[0, 0, :, 0], dtype=torch.float64)
    if call.linear_weight is not None:
        return call.linear_weight.double()
    return torch.full_like(call.query[0, 0, :, 0], 0.0 if call.lists is not None else 1.0, dtype=torch.float64)


def _in_sequence(others: ExtraTokens, of_grid: torch.Tensor, of_others: torch.Tensor) -> torch.Tensor:
    """(B, N, ...) in float64 in the order of the sequence: before the grid, of the grid, after it."""
    parts = of_others[:, : others.before], of_grid, of_others[:, others.before :]
    return torch.cat([part.double() for part in parts], dim=1)


def _with_pooled_keys(
    call: Call,
    lists: BlockLists,
    near: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    largest: torch.Tensor,
) -> torch.Tensor:
    """Softmax weights of listed blocks and pooled keys, like ``near``: (B, H, N, N).

    A mean of n tokens with n times the weight of one key gives every one of its tokens the weight of that key.
    """
    block_of = (layout_of(call.grid, lists.block_size).rows.long() // lists.block_size).to(query.device)
    is_listed = lists.mask()[:, :, block_of[:, None], block_of[None, :]]
    weights = torch.where(is_listed, near, 0.0)
    if call.pooled_bias is None:
        return weights
    taking_part = key.new_ones(key.shape[:2]) if call.key_mask is None else call.key_mask.double()
    member = torch.nn.functional.one_hot(block_of).double()
    count = taking_part @ member
    total = torch.einsum("bkhd,bk,kc->bchd", key, taking_part, member)
    mean = (total / count.clamp_min(1e-300)[:, :, None, None])[:, block_of]
    logits = torch.einsum("bqhd,bkhd->bhqk", query, mean) / query.shape[-1] ** 0.5
    logits = logits + call.pooled_bias.double()[..., None, None] - largest
    return weights + torch.where(is_listed, 0.0, logits.exp() * taking_part[:, None, None, :])


def reference_attention(call: Call) -> torch.Tensor:
    """MHLA in float64: (B, N, H, D); with extra tokens of the whole sequence."""
    value = call.value.double() if call.extra is None else _in_sequence(call.extra, call.value, call.extra.value)
    output = torch.einsum("bhqk,bkhd->bqhd", reference_weights(call), value)
    if call.extra is None:
        return _finished(call, output)
    before, end = call.extra.before, call.extra.before + call.query.shape[1]
    return torch.cat([output[:, :before], _finished(call, output[:, before:end]), output[:, end:]], dim=1)


def _finished(call: Call, output: torch.Tensor) -> torch.Tensor:
    """Output norm and gate."""
    if call.output_norm is not None:
        mean_square = output.square().mean(dim=-1, keepdim=True)
        output = output * torch.rsqrt(mean_square + OUTPUT_NORM_EPS) * call.output_norm.double()
    if call.output_gate is not None:
        output = output * torch.nn.functional.silu(call.output_gate.double())
    return output
