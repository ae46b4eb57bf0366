"""MHLA and sparse attention from their definitions, token by token, in float64, which every backend is compared with.

Nothing here is fast: the N x N weights of the paper's Eq. 5 are formed one query-key pair at a time.
"""

import math
from dataclasses import replace

import torch

from .call import BlockLists, ContentRule, MHLACall, SparseCall
from .feature_maps import get_feature_map
from .layout import block_index, layout_of
from .order import blocks_per_state
from .precision import LEAST, OUTPUT_NORM_EPS
from .rope import rotated
from .sparse import key_block_of_tokens, with_lists

_NUMBERS = 2**26
"""Weights that :func:`weight_held` forms at once."""


def reference_weights(call: MHLACall | SparseCall, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Form the effective attention matrix (paper, Eq. 5): float64 (B, H, N, N), row = query token.

    It belongs to the attention before output norm and gate; the value is not read, except where β and γ are left to the
    call. A query has zeros where the mask leaves no key that it sees, or that its row of the mixing matrix gives
    weight to.

    Args:
        call: the call.
        rows: (R,) int64, query tokens to form rows of, where N x N numbers are too many, of a call that is not causal
            and has no extra tokens; None for all.
    """
    query, key = (rotated(x.double(), call.rotary) for x in (call.query, call.key))
    mask = torch.ones(key.shape[:2], device=key.device) if call.key_mask is None else call.key_mask
    mask = mask.double()
    chosen = torch.arange(query.shape[1], device=query.device) if rows is None else rows
    scores = torch.einsum("bqhd,bkhd->bhqk", query[:, chosen], key) / query.shape[-1] ** 0.5
    has_none = ~mask.any(dim=1)[:, None, None, None]
    if isinstance(call, SparseCall):
        mask = mask.masked_fill(has_none[:, 0, 0], 1)  # 0 / 0 would spoil the gradients of what is replaced
        is_softmax = isinstance(call.sparse, ContentRule) and call.sparse.density == 1
        return _sparse(call if is_softmax else with_lists(call), scores, query, key, mask, chosen).masked_fill(
            has_none, 0
        )
    weights, normaliser = _linear(call, mask, rows)
    if call.causal is not None:
        weights, normaliser = _causal(call, weights, normaliser, scores)
    if call.normalize:
        total = normaliser.sum(dim=-1, keepdim=True)
        has_none = has_none | (total == 0)
        weights = weights / total.masked_fill(has_none, 1)
    return weights.masked_fill(has_none, 0)


def _linear(call: MHLACall, mask: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of MHLA and their normalisers: (B, H, N, N) each, or some rows of it."""
    phi, mixing, rotary = get_feature_map(call.feature_map), call.mixing.double(), call.rotary
    query, key = call.query.double(), call.key.double()
    if call.rope == "before":
        query, key, rotary = rotated(query, rotary), rotated(key, rotary), None
    query, key = phi(query.clone(), call.eps), phi(key.clone(), call.eps)
    if call.causal is not None:
        mixing = mixing + LEAST
    key = key * mask[:, :, None, None]
    block_of = block_index(call.grid, call.blocks).to(query.device)[: query.shape[1]]
    some = slice(None) if rows is None else rows
    coefficients = mixing[..., block_of[some][:, None], block_of[None, :]]
    normaliser = coefficients * torch.einsum("bqhd,bkhd->bhqk", query[:, some], key)
    query, key = rotated(query, rotary)[:, some], rotated(key, rotary)
    return coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key), normaliser


def _causal(
    call: MHLACall, weights: torch.Tensor, normaliser: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and normalisers of causal MHLA (:mod:`mhla_diffusers.attention.causal`).

    Made of weights and normalisers of MHLA and scores of softmax, (B, H, N, N) each.
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
    softmax = (scores - largest).exp()
    earlier = (-largest.clamp_min(0)).exp() * call.linear_weight.double()[:, None, None]
    weights, normaliser = (torch.where(own, softmax, earlier * x) for x in (weights, normaliser))
    return torch.where(seen, weights, 0.0), torch.where(seen, normaliser, 0.0)


def _sparse(
    call: SparseCall,
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Weights of sparse attention, of the whole sequence: (B, H, N, N).

    A mean of n tokens with n times the weight of one key gives every one of its tokens the weight of that key. The
    mixed states give a token t of stretch s, with the part w_t of its block's weight, γ m_as w_t q·(k_t − k̄) over
    the number of blocks of the stretch.

    Query and key (B, N, H, D) after RoPE and mask (B, N) are of all tokens, scores of the rows that are ``chosen``,
    which are all with extra tokens; the call has lists, β and γ.
    """
    lists = call.sparse
    largest = scores.amax(dim=-1, keepdim=True)
    softmax = (scores - largest).exp() * mask[:, None, None]
    if isinstance(lists, ContentRule) or bool(lists.mask().all()):
        return softmax / softmax.sum(dim=-1, keepdim=True)
    assert call.pooled_bias is not None
    columns = slice(call.extra[0], scores.shape[-1] - call.extra[1])
    rows = columns if any(call.extra) else slice(None)
    query, key, mask = (x[:, columns] for x in (query, key, mask))
    query = query / query.shape[-1] ** 0.5
    query_block = (layout_of(call.grid, lists.block_size).rows.long() // lists.block_size).to(query.device)
    of_blocks = torch.nn.functional.one_hot(query_block, lists.keys.shape[2]).double()
    mean_query = torch.einsum("bqhd,qa->bhad", query, of_blocks) / of_blocks.sum(dim=0)[:, None]
    if not any(call.extra):
        query, query_block, of_blocks = query[:, chosen], query_block[chosen], of_blocks[chosen]
    batch, _, heads, _ = query.shape
    key_block = key_block_of_tokens(call, lists).expand(batch, heads, -1)
    is_listed = lists.mask().expand(batch, -1, -1, -1)
    sees = is_listed[:, :, query_block].gather(-1, key_block[:, :, None].expand(-1, -1, len(query_block), -1))
    listed = torch.where(sees, softmax[:, :, rows, columns], 0.0)

    member = torch.nn.functional.one_hot(key_block, lists.key_blocks).double()
    total = torch.einsum("bk,bhkc->bhc", mask, member)
    mean = torch.einsum("bkhd,bk,bhkc->bhcd", key, mask, member) / total.clamp_min(1e-300)[..., None]
    own_mean = torch.einsum("bhcd,bhkc->bkhd", mean, member)
    logits = torch.einsum("bqhd,bkhd->bhqk", query, own_mean)
    biased = logits + call.pooled_bias.double()[..., None, None] - largest[:, :, rows]
    if call.far == "second-order":
        part = mask[:, None] / torch.einsum("bhc,bhkc->bhk", total, member).clamp_min(1e-300)
        variance = torch.einsum("bkhd,bhk,bhkc->bhcd", (key - own_mean).square(), part, member)
        variance = torch.einsum("bhad,bhcd->bhac", mean_query.square(), variance)
        limit = 2 * total.clamp_min(2).log()[:, :, None]
        gain = (limit * (limit + variance)).sqrt() - limit
        biased = biased + torch.einsum("bhac,qa,bhkc->bhqk", gain, of_blocks, member)
    pooled = torch.where(sees, 0.0, biased.exp() * mask[:, None, None])
    weights = softmax.clone()
    weights[:, :, rows, columns] = listed + pooled
    denominator = weights.sum(dim=-1, keepdim=True)
    if call.far == "second-order":
        assert call.state_weight is not None
        block_logits = torch.einsum("bhad,bhcd->bhac", mean_query, mean) + total.log()[:, :, None] + gain
        is_out = is_listed | (total == 0)[:, :, None]
        peak = block_logits.masked_fill(is_out, -math.inf).amax(dim=-1, keepdim=True).nan_to_num(0, 0, 0)
        mixing = torch.where(is_out, 0.0, (block_logits.masked_fill(is_out, 0) - peak).exp())
        mixing = mixing / mixing.sum(dim=-1, keepdim=True).clamp_min(1e-300)
        stretch = torch.arange(lists.key_blocks, device=query.device) // blocks_per_state(lists.key_block_size)
        stretch = torch.nn.functional.one_hot(stretch).double()
        blocks = torch.einsum("bhc,cs->bhs", (total > 0).double(), stretch).clamp_min(1)
        # of every query block and key block, what the mean state of the key block's stretch is mixed with
        mixed = torch.einsum("bhac,cs,bhs,es->bhae", mixing, stretch, 1 / blocks, stretch)
        apart = torch.einsum("bqhd,bkhd->bhqk", query, key - own_mean)
        of_states = torch.einsum("bhae,qa,bhke->bhqk", mixed, of_blocks, member) * part[:, :, None] * apart
        of_pooled = call.state_weight.double()[..., None, None] * pooled.sum(dim=-1, keepdim=True)
        weights = weights.clone()
        weights[:, :, rows, columns] += of_pooled * of_states
    return weights / denominator


def reference_attention(call: MHLACall | SparseCall) -> torch.Tensor:
    """MHLA or sparse attention in float64: (B, N, H, D)."""
    output = torch.einsum("bhqk,bkhd->bqhd", reference_weights(call), call.value.double())
    if isinstance(call, SparseCall):
        return output
    if call.output_norm is not None:
        mean_square = output.square().mean(dim=-1, keepdim=True)
        output = output * torch.rsqrt(mean_square + OUTPUT_NORM_EPS) * call.output_norm.double()
    if call.output_gate is not None:
        output = output * torch.nn.functional.silu(call.output_gate.double())
    return output


def weight_held(call: SparseCall, count: int, shift: int) -> torch.Tensor:
    """Share of softmax attention's weight on a call's listed blocks and extra tokens: float64 (), for an audit.

    The mean over samples, heads and ``count`` queries, evenly along the curve; another ``shift`` chooses others.
    """
    batch, tokens, heads, _ = call.query.shape
    lists, device = with_lists(call).sparse, call.query.device
    assert isinstance(lists, BlockLists)
    order = layout_of(call.grid, lists.block_size).order.long()
    order = order[order >= 0]
    count = min(count, len(order))
    places = (torch.arange(count) * len(order) // count + shift) % len(order)
    listed = lists.mask().expand(batch, -1, -1, -1)
    key_block = key_block_of_tokens(call, lists).expand(batch, heads, -1)[:, :, None]
    softmax = replace(call, sparse=ContentRule(lists.block_size, 1.0))
    of_grid = slice(call.extra[0], tokens - call.extra[1])
    held = torch.zeros((), dtype=torch.float64, device=device)
    for some in places.split(max(1, _NUMBERS // (batch * heads * tokens))):
        weights = reference_weights(softmax, (call.extra[0] + order[some]).to(device))
        blocks = (some // lists.block_size).to(device)
        sees = listed[:, :, blocks].gather(-1, key_block.expand(-1, -1, len(some), -1))
        held += weights.sum() - weights[..., of_grid].masked_fill(sees, 0).sum()
    return held / (batch * heads * count)
