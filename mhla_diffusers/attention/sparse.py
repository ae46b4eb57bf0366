"""Sparse attention: softmax over listed key blocks; the others are approximated from means, spread and states.

For a query of head h in block a, q its scaled query q/√D after RoPE, R the tokens of its listed blocks and all extra
tokens, and for every other block c of n_c tokens the mean key k̄_c and value v̄_c::

    near = Σ_{t∈R} exp(q · k_t) v_t / (the same without v)
    far  = Σ_{c∉R} w_ac exp(q · k̄_c) v̄_c / (the same without v),   w_ac = n_c exp(g_ac)
    o    = (1 − σ) near + σ (far + γ_h q · M_a),   σ the far share of both denominators, far's times exp(β_h)

**To second order.** Keys and values of a block that spread like a Gaussian around their means sum up exactly::

    Σ_{t∈c} exp(q · k_t) v_t = n_c exp(q · k̄_c + ½ qᵀ Σ_c q) [ v̄_c + q · S_c ],   S_c = 1/n_c Σ (k_t − k̄_c)(v_t − v̄_c)ᵀ

For any other block that is right to second order in its distances from the means; terms of first order vanish. The
weight needs the variance of the block's scores. It is taken for the block's mean query q̄_a, channel by channel:
s_ac = Σ_d q̄_ad² σ²_cd. The gain g_ac is ½ s_ac where that is small (:func:`log_gain`). S_c (D x D) is a KV state as
MHLA keeps one per block, only centred. Weighing every S_c for every query would be too dear, but the weights may be
those of the mean query too, and blocks of keys that were sorted together (a *stretch* s of 256 keys, :mod:`.order`) may
share the mean S̄_s of their states, where blocks hold 16 and more::

    M_a = Σ_s m_as S̄_s,   m_as = Σ_{c∈s} softmax over c∉R of (q̄_a · k̄_c + log w_ac)

That is Multi-Head Mixing with a matrix that content gives at every call, per head and sample. PISA (arXiv 2602.01077)
published exact blocks beside block means and one centred state per head, weighed by the far share, before; mixing
states by content and the spread in the weights are added here.

**β and γ** are fitted within the call, per sample and head: for each β that is tried the best γ is a quotient of two
sums over some sampled queries. A head whose blocks the expansion does not suit gets γ = 0.

Extra tokens belong to no block and no state; they attend to everything with softmax.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .blocks import in_blocks, in_order
from .call import BlockLists, Call, ContentRule, Far, SparseCall, UniformBlocks, list_length, mask_of_lists
from .derivatives import is_transformed
from .layout import block_count, layout_of
from .merge import under_common_sum
from .order import blocks_per_state, content_order
from .precision import EMPTY, product, sum_dtype, without_autocast
from .rope import rotated

BIASES = (-3.0, 3.0, 25)
"""β that are tried: the first, the last and how many."""
MOST_STATE_WEIGHT = 1.5
"""Largest γ."""
FITTING_QUERIES = 256
"""Queries of a head that β and γ are fitted on; of fewer than 96 times as many tokens, one in 96 and at least 8."""
_LOGITS, _DEVICE_LOGITS = 2**19, 2**22
"""Logits that are formed at once on a CPU, whose cache then keeps what is gathered, and elsewhere."""
_KERNEL_ROWS = 32
"""Queries of a block from which on PyTorch's kernel for CPUs is as fast as products written out."""


def sparse(call: SparseCall) -> torch.Tensor:
    """Attend to listed blocks, and approximate the others from means, spread and states.

    A query that attends to nothing gets 0.

    Returns:
        (B, N, H, D) in the type of the query.
    """
    call, parts = _attend(call)
    lists = call.sparse
    assert call.pooled_bias is not None
    with without_autocast(call.query.device):
        far, bias = parts.far, call.pooled_bias.to(parts.far_lse.dtype)
        if parts.correction is not None:
            assert call.state_weight is not None
            far = far + call.state_weight.to(far.dtype)[..., None, None, None] * parts.correction
        log_far = parts.far_lse + bias[..., None, None]
        output = under_common_sum(parts.near, parts.near_lse[..., None], far, log_far[..., None])
        output = in_order(output, call.grid, lists.block_size).to(call.query.dtype)
    return call.in_sequence(torch.cat([output, extra_queries(call)], dim=1)) if any(call.extra) else output


def extra_queries(call: Call) -> torch.Tensor:
    """Attend with the extra tokens to everything: (B, extra tokens, H, D), those before the grid first."""
    dtype, tokens = sum_dtype(call.query.dtype), call.tokens
    with without_autocast(call.query.device):
        query, key = (call.extra_last(rotated(x.to(dtype), call.rotary)) for x in (call.query, call.key))
        mask = None if call.key_mask is None else call.extra_last(call.key_mask)
        output = attend_to_all(query[:, tokens:], key, call.extra_last(call.value.to(dtype)), mask)
        return output.to(call.query.dtype)


# Rows: tokens in the order of their blocks


class Rows(NamedTuple):
    """Tokens after RoPE in blocks of queries and of keys, those of extra tokens last, in the type of sums."""

    query: torch.Tensor
    """(B, H, T + E, L, D)."""
    key: torch.Tensor
    """(B, H, K + E', L', D)."""
    value: torch.Tensor
    weights: torch.Tensor
    """Weights of the keys, (1 or B, 1 or H, K + E', L'); 0 for padding."""


def uniform_rows(call: Call, blocks: UniformBlocks) -> Rows:
    """Order the tokens of a call by uniform blocks."""
    with without_autocast(call.query.device):
        dtype = sum_dtype(call.query.dtype)
        query = in_blocks(call.extra_last(rotated(call.query.to(dtype), call.rotary)), call.grid, blocks.block_size)
        key, weights, order = _key_rows(call, blocks)
        value = in_blocks(call.extra_last(call.value.to(dtype)), call.grid, blocks.key_block_size)
        return Rows(query, key, value if order is None else _in_order_of_content(value, order), weights)


def _key_rows(call: Call, blocks: UniformBlocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and weights of :class:`Rows`, and the rows along the curve that they were, (B, H, K L'), if sorted."""
    dtype, place = sum_dtype(call.query.dtype), (call.grid, blocks.key_block_size)
    key = in_blocks(call.extra_last(rotated(call.key.to(dtype), call.rotary)), *place)
    mask = key.new_ones(1, call.key.shape[1]) if call.key_mask is None else call.extra_last(call.key_mask.to(dtype))
    weights = in_blocks(mask[..., None, None], *place)[..., 0]
    if blocks.order == "curve":
        return key, weights, None
    on_grid = block_count(*place)
    exists = weights[:, 0, :on_grid].flatten(1) > 0
    order = content_order(key[:, :, :on_grid].flatten(2, 3), exists, blocks.key_block_size)
    if call.key_mask is None:  # padding stays behind all keys
        return _in_order_of_content(key, order), weights, order
    weights = weights[..., None].expand(*key.shape[:4], 1)
    return _in_order_of_content(key, order), _in_order_of_content(weights, order)[..., 0], order


def _in_order_of_content(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Sort rows (B, H, K + E', L', C) of the grid."""
    on_grid = order.shape[-1] // x.shape[3]
    rows = x[:, :, :on_grid].flatten(2, 3)
    rows = rows.gather(2, order[..., None].expand(*order.shape, x.shape[-1])).unflatten(2, (on_grid, -1))
    return torch.cat([rows, x[:, :, on_grid:]], dim=2) if on_grid < x.shape[2] else rows


def key_block_of_tokens(call: Call, blocks: UniformBlocks) -> torch.Tensor:
    """Return the number of the key block that every token of the grid is in: int64 (1 or B, 1 or H, N)."""
    size = blocks.key_block_size
    rows = layout_of(call.grid, size, 0, str(call.query.device)).rows.long()[None, None]
    if blocks.order == "content":
        order = _key_rows(call, blocks)[2]
        assert order is not None
        rows = order.argsort(dim=-1).gather(-1, rows.expand(*order.shape[:2], -1))
    return rows // size


# Means and states of the grid's blocks


class Pooled(NamedTuple):
    """Means, spread and weights that represent the grid's blocks."""

    query: torch.Tensor
    """Mean of the scaled queries of every block, (B, H, T, D), regardless of the mask of keys."""
    key: torch.Tensor
    """Mean of the keys by their weights, (B, H, K, D); 0 where there is no weight."""
    value: torch.Tensor
    apart: torch.Tensor
    """Keys less their block's mean, (B, H, K, L', D)."""
    share: torch.Tensor
    """Share of every key in its block's weight, (1 or B, 1 or H, K, L')."""
    log_weight: torch.Tensor
    """Log of a block's weight, (1 or B, 1 or H, K), at least ``EMPTY``."""
    logits: torch.Tensor
    """Scores of mean queries with mean keys, (B, H, T, K)."""
    variance: torch.Tensor
    """Variance of the scores of every block's keys with the mean queries, s_ac: (B, H, T, K)."""
    gain: torch.Tensor
    """:func:`log_gain` of it, g_ac."""


def pool(call: Call, blocks: UniformBlocks, rows: Rows) -> Pooled:
    """Take the means of the grid's blocks."""
    count, key_count = (block_count(call.grid, size) for size in blocks.sizes)
    key, value, weights = (x[:, :, :key_count] for x in rows[1:])
    exists = in_blocks(rows.query.new_ones(1, call.tokens, 1, 1), call.grid, blocks.block_size)[..., 0]
    (mean_query,) = _block_means(exists / exists.sum(dim=-1, keepdim=True), rows.query[:, :, :count])
    mean_query = mean_query * call.query.shape[-1] ** -0.5
    total = weights.sum(dim=-1, keepdim=True)
    # a token alone in its block has the share 1 exactly, so that its key is not apart from the mean
    share = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    mean_key, mean_value = _block_means(share, key, value)
    apart = key - mean_key[:, :, :, None]
    (variance,) = _block_means(share, apart.square())
    log_weight = total[..., 0].log().clamp_min(EMPTY)
    logits, variance = product(mean_query, mean_key.mT), product(mean_query.square(), variance.mT)
    gain = log_gain(variance, log_weight[:, :, None])
    return Pooled(mean_query, mean_key, mean_value, apart, share, log_weight, logits, variance, gain)


def log_gain(variance: torch.Tensor, log_count: torch.Tensor) -> torch.Tensor:
    """Log of a block's softmax weight relative to n exp(q̄ · k̄), for n keys whose scores have variance s.

    The mean of exponentials of Gaussian scores is exp(½ s), but that of n scores cannot exceed the largest of them,
    which grows with √(2 s log n). So s / (1 + √(1 + s / t)) with t = 2 log n, which is ½ s where s is small and √(t s)
    where it is large.

    Args:
        variance: s.
        log_count: log n, of 2 where it is less.
    """
    limit = 2 * log_count.clamp_min(math.log(2))
    return variance / (1 + (1 + variance / limit).sqrt())


def _block_means(share: torch.Tensor, *some: torch.Tensor) -> list[torch.Tensor]:
    """Means (B, H, T, D) of (B, H, T, L, D) with shares (1 or B, 1 or H, T, L)."""
    # no product of matrices, whose backward pass autocast would lower where backward() is called under it
    return [(share[..., None] * x).sum(dim=-2) for x in some]


def stretch_states(pooled: Pooled, value: torch.Tensor, per_stretch: int) -> torch.Tensor:
    """Mean state S̄ of every stretch: (B, H, stretches, D, D), keys' channels first.

    Args:
        pooled: of the blocks.
        value: their values, (B, H, K, L', D); around their means or not is the same, since keys' deviations sum to 0.
        per_stretch: blocks.
    """
    batch, heads, count, length, head_dim = pooled.apart.shape
    padding = -count % per_stretch
    has_weight = torch.nn.functional.pad((pooled.log_weight > EMPTY / 2).to(value.dtype), (0, padding))
    blocks = has_weight.unflatten(-1, (-1, per_stretch)).sum(dim=-1).clamp_min(1)
    share = pooled.share / blocks.repeat_interleave(per_stretch, dim=-1)[..., :count, None]

    def by_stretch(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
        return padded.reshape(batch, heads, -1, per_stretch * length, head_dim)

    return product(by_stretch(share[..., None] * pooled.apart).mT, by_stretch(value))


def content_mixing(logits: torch.Tensor, lists: torch.Tensor, per_stretch: int) -> torch.Tensor:
    """Mixing matrix of states by content, m_as: (B, H, T, stretches).

    Args:
        logits: (B, H, T, K), of mean queries and blocks, q̄_a · k̄_c + log w_ac; below ``EMPTY`` / 2 without a key.
        lists: (1 or B, H, T, n), key blocks that have no part.
        per_stretch: blocks of a stretch.
    """
    count = logits.shape[-1]
    left_out = mask_of_lists(lists, count) | (logits < EMPTY / 2)
    weights = logits.masked_fill(left_out, EMPTY).softmax(dim=-1)
    weights = torch.nn.functional.pad(weights.masked_fill(left_out, 0), (0, -count % per_stretch))
    return weights.unflatten(-1, (-1, per_stretch)).sum(dim=-1)


# Lists, β and γ


def with_lists(call: SparseCall) -> SparseCall:
    """Compute the parts of a call that depend on queries and keys: lists, β and γ."""
    with torch.no_grad():
        return _attend(call)[0]


class _Parts(NamedTuple):
    """What is merged: outputs (B, H, T, L, D) and LSE (B, H, T, L)."""

    near: torch.Tensor
    near_lse: torch.Tensor
    far: torch.Tensor
    far_lse: torch.Tensor
    """Without β."""
    correction: torch.Tensor | None
    """What is read from mixed states, q · M_a; None where blocks take part by their means alone."""


def _attend(call: SparseCall) -> tuple[SparseCall, _Parts]:
    """Attend to each part: the call with lists, β and γ, and what is to be merged."""
    rule = call.sparse
    with without_autocast(call.query.device):
        rows = uniform_rows(call, rule)
        pooled = pool(call, rule, rows)
        if isinstance(rule, ContentRule):
            with torch.no_grad():
                keys = choose_by_content(rule, pooled, call.far)
            count = block_count(call.grid, rule.key_block_size)
            call = replace(
                call,
                sparse=BlockLists(
                    rule.block_size, keys, keys.numel(), count, key_block_size=rule.key_block_size, order=rule.order
                ),
            )
        lists = call.sparse
        assert isinstance(lists, BlockLists)
        bias, query = rows.weights.log(), rows.query[:, :, : lists.blocks] * call.query.shape[-1] ** -0.5
        near, near_lse = attend_to_lists(query, rows.key, rows.value, bias, lists)
        log_weight, correction = pooled.log_weight[:, :, None], None
        if call.far == "second-order":
            log_weight = log_weight + pooled.gain
            per_stretch = blocks_per_state(lists.key_block_size)
            states = stretch_states(pooled, rows.value[:, :, : lists.key_blocks], per_stretch)
            mixing = content_mixing(pooled.logits + log_weight, lists.keys, per_stretch)
            correction = read_mixed(query, mixing, states)
        far, far_lse = attend_to_pooled(query, pooled, log_weight, lists)
        parts = _Parts(near, near_lse, far, far_lse, correction)
        if call.pooled_bias is None:
            with torch.no_grad():
                call = _fitted(call, query, rows, bias, parts)
        return call, parts


def choose_by_content(rule: ContentRule, pooled: Pooled, far: Far) -> torch.Tensor:
    """Choose, for every query block, the key blocks that means, spread and states approximate worst.

    A block's error is its weight times the terms that its approximation omits. Means omit the terms of first order,
    which grow with the root of the variance of the scores, so the score of key block c is q̄_a · k̄_c + ½ log s_ac.
    Second order omits those of third order, so the score is q̄_a · k̄_c + g_ac + 3/2 log s_ac. A block without keys comes
    last.

    Returns:
        int64 (B, H, T, list length), ascending within a list; at least one key block for every query block.
    """
    log_variance = pooled.variance.clamp_min(torch.finfo(torch.float32).tiny).log()
    if far == "second-order":
        scores = pooled.logits + pooled.gain + 1.5 * log_variance
    else:
        scores = pooled.logits + 0.5 * log_variance
    scores = scores.masked_fill((pooled.log_weight < EMPTY / 2)[:, :, None], torch.finfo(scores.dtype).min)
    length = list_length(rule.density, scores.shape[-1])
    return scores.topk(length, dim=-1, sorted=False).indices.sort(dim=-1).values


def _fitted(call: SparseCall, query: torch.Tensor, rows: Rows, bias: torch.Tensor, parts: _Parts) -> SparseCall:
    """Return the call with β and γ fitted on some of its queries, against softmax over all keys.

    Args:
        call: the call.
        query: as :func:`attend_to_lists` takes it.
        rows: of the call.
        bias: logs of the weights of all keys.
        parts: of all queries.
    """
    some = fitting_rows(math.prod(call.grid), query.device)
    # constants in forward mode too, which no_grad does not switch off
    query, rows, bias = query.detach(), Rows(*(x.detach() for x in rows)), bias.detach()
    parts = _Parts(*(None if x is None else x.detach() for x in parts))  # type: ignore[arg-type]
    near, near_lse, far, far_lse = (x.flatten(2, 3)[:, :, some] for x in parts[:4])
    correction = None if parts.correction is None else parts.correction.flatten(2, 3)[:, :, some]
    mask = bias.flatten(2)[:, :, None].expand(len(query), -1, -1, -1)
    truth = scaled_dot_product(
        query.flatten(2, 3)[:, :, some], rows.key.flatten(2, 3), rows.value.flatten(2, 3), mask, scale=1.0
    )
    pooled_bias, state_weight = best_weights(truth, near, near_lse, far, far_lse, correction)
    return replace(call, pooled_bias=pooled_bias, state_weight=None if parts.correction is None else state_weight)


def best_weights(
    truth: torch.Tensor,
    near: torch.Tensor,
    near_lse: torch.Tensor,
    far: torch.Tensor,
    far_lse: torch.Tensor,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """β of those tried, and its γ, with the least squared error of the output: (...) each.

    With σ the far share, r = (1 − σ) near + σ far − truth and c the correction, the error Σ (r + γ σ c)² is least at
    γ = −Σ σ c·r / Σ σ² c·c, here held within 0 and 1.5.

    Args:
        truth: softmax attention's output, (..., queries, D).
        near: of the listed blocks.
        near_lse: (..., queries).
        far: of the pooled keys without β.
        far_lse: (..., queries).
        correction: what is read from mixed states, like ``near``; None for nothing, whose γ is 0.
    """
    candidates = torch.linspace(*BIASES, device=truth.device, dtype=truth.dtype)
    share = torch.sigmoid(far_lse[..., None] + candidates - near_lse[..., None])

    def inner(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left * right).sum(dim=-1, keepdim=True)

    near, far = near - truth, far - truth
    rest = 1 - share
    errors = rest.square() * inner(near, near) + 2 * share * rest * inner(near, far) + share.square() * inner(far, far)
    errors = errors.sum(dim=-2)
    weights = torch.zeros_like(errors)
    if correction is not None:
        pull = (share * (rest * inner(correction, near) + share * inner(correction, far))).sum(dim=-2)
        size = (share.square() * inner(correction, correction)).sum(dim=-2)
        weights = (-pull / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp(0, MOST_STATE_WEIGHT)
        errors = errors + 2 * weights * pull + weights.square() * size
    best = errors.argmin(dim=-1)
    return candidates[best], weights.gather(-1, best[..., None])[..., 0]


def fitting_rows(count: int, device: torch.device) -> torch.Tensor:
    """Rows of the queries that β and γ are fitted on, evenly spread along the blocks of N = ``count`` tokens: int64."""
    number = min(FITTING_QUERIES, max(8, count // 96), count)
    # the rows of the grid's tokens follow each other, and the padding comes behind
    return ((torch.arange(number, device=device) + 0.5) * count / number).long()


# Attending, some blocks at a time


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention of (B, Q, H, D) to all of (B, K, H, D), with weights of the keys (B, K)."""
    bias = None if mask is None else mask.to(query.dtype).log()[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product(query, key, value, bias).transpose(1, 2)


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with every derivative that is asked for.

    PyTorch's fused kernels have neither forward nor second derivatives, so these come from its plain operations.
    """
    if is_transformed():
        return _unfused(query, key, value, bias, scale)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    if not output.requires_grad or torch.compiler.is_compiling():
        return output
    found: torch.Tensor = _TwiceDifferentiable.apply(output, query, key, value, bias, scale)  # type: ignore[no-untyped-call]
    return found


def _unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


class _TwiceDifferentiable(torch.autograd.Function):
    """The output of a fused kernel, whose gradient is the kernel's unless that is to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: Any) -> torch.Tensor:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        return output.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return gradients[0], *(None,) * 5
        # views: one input may be computed from another, and these gradients must not flow that way
        inputs: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        with without_autocast(inputs[0].device):
            output = _unfused(inputs[0], inputs[1], inputs[2], inputs[3], ctx.scale)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradients[0].to(output.dtype), create_graph=True))
        return None, *(next(found) if x is not None and x.requires_grad else None for x in inputs), None


def softmax_attention(call: SparseCall) -> torch.Tensor:
    """Attend to everything by :func:`torch.nn.functional.scaled_dot_product_attention`: (B, N, H, D)."""
    query, key = (rotated(x, call.rotary) for x in (call.query, call.key))
    return attend_to_all(query, key, call.value, call.key_mask).to(call.query.dtype)


def attend_to_lists(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, lists: BlockLists
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of listed blocks and of all extra blocks.

    Args:
        query: (B, H, T, L, D), scaled.
        key: (B, H, K + E, L', D).
        value: like ``key``.
        bias: (1 or B, 1 or H, K + E, L'), log of a key's weight, −∞ where there is no token.
        lists: of T query blocks and K key blocks.

    Returns:
        Output (B, H, T, L, D) and LSE (B, H, T, L); 0 and ``EMPTY`` where there is nothing to attend to.
    """
    batch, heads, _, length, _ = query.shape
    extra = torch.arange(lists.key_blocks, key.shape[2], device=query.device)
    entries = torch.cat([lists.keys, extra.expand(*lists.keys.shape[:-1], -1)], dim=-1)
    if not entries.shape[-1]:  # a softmax over nothing is not defined
        entries = torch.nn.functional.pad(entries, (0, 1), value=-1)
    by_head = key, value, bias.expand(batch, heads, -1, -1)
    output, lse = _in_parts(_listed, query, entries, by_head, length * entries.shape[-1] * key.shape[3])
    return output, lse


def attend_to_pooled(
    query: torch.Tensor, pooled: Pooled, log_weight: torch.Tensor, lists: BlockLists
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the means of all blocks that are not listed, without β.

    Args:
        query: as :func:`attend_to_lists` takes it.
        pooled: of the blocks.
        log_weight: (1 or B, 1 or H, 1 or T, K), added to the logits, log w_ac.
        lists: blocks that are left out.

    Returns:
        As :func:`attend_to_lists`.
    """
    bias = log_weight.expand(*query.shape[:3], -1).masked_fill(mask_of_lists(lists.keys, lists.key_blocks), EMPTY)
    by_head = pooled.key, pooled.value
    output, lse = _in_parts(_pooled, query, bias, by_head, query.shape[3] * lists.key_blocks)
    return output, lse


def read_mixed(query: torch.Tensor, mixing: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Mix the states and read them by the queries of every block: like ``query``.

    Args:
        query: (B, H, T, L, D), scaled.
        mixing: (B, H, T, stretches).
        states: (B, H, stretches, D, D).
    """
    (output,) = _in_parts(_mixed, query, mixing, (states,), states.shape[-1] ** 2)
    return output


def _in_parts(
    attend: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    by_block: torch.Tensor,
    by_head: Sequence[torch.Tensor],
    of_block: int,
) -> list[torch.Tensor]:
    """Attend some query blocks of some heads at a time, so that few logits are formed at once.

    In the backward pass these are formed again, so that none are kept.
    """
    batch, blocks = len(query), query.shape[2]
    logits = _LOGITS if query.device.type == "cpu" else _DEVICE_LOGITS
    groups_at_once = max(1, logits // max(1, of_block * blocks))
    at_once = max(1, min(blocks, logits // max(1, of_block)))
    groups = (x.flatten(0, 1).split(groups_at_once) for x in (query, by_block.expand(batch, -1, -1, -1), *by_head))
    found: list[tuple[torch.Tensor, ...]] = []
    for q, here, *keys in zip(*groups, strict=True):
        for part in zip(q.split(at_once, dim=1), here.split(at_once, dim=1), strict=True):
            if torch.is_grad_enabled() and not is_transformed():  # transforms know no checkpoints
                results = checkpoint(attend, *part, *keys, use_reentrant=False, preserve_rng_state=False)
            else:
                results = attend(*part, *keys)
            found.append(tuple(x.flatten(0, 1) for x in results))
    shape = query.shape[:3]
    return [torch.cat(x).unflatten(0, shape) for x in zip(*found, strict=True)]


def _listed(
    query: torch.Tensor, lists: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for query blocks (g, q, L, D), their lists (g, q, n) and all keys of their heads (g, K + E, L', D)."""
    groups, count, rows, _ = key.shape
    listed = (lists.clamp_min(0) + torch.arange(groups, device=lists.device)[:, None, None] * count).flatten()
    key, value, bias = (
        x.flatten(0, 1).index_select(0, listed).view(*lists.shape, *x.shape[2:]).flatten(2, 3)
        for x in (key, value, bias)
    )
    bias = bias.masked_fill((lists < 0).repeat_interleave(rows, dim=-1), EMPTY).clamp_min(EMPTY)
    return _softmax(query, key, value, bias)


def _pooled(
    query: torch.Tensor, bias: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the means of their heads (g, K, D), with what is added to logits, (g, q, K)."""
    return _softmax(query, key[:, None], value[:, None], bias)


def _mixed(query: torch.Tensor, mixing: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor]:
    """Read (g, q, L, D) from states (g, s, D, D) that are mixed by (g, q, s)."""
    mixed = product(mixing, states.flatten(2)).unflatten(2, states.shape[2:])
    return (product(query, mixed),)


def _softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with blocks (g, q, L, D) to keys (g, q or 1, n, D), with what is added to logits, (g, q, n).

    On a CPU, without gradients, large blocks have the kernel of scaled_dot_product_attention, which keeps no logits.
    """
    is_plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed())
    if query.device.type == "cpu" and is_plain and query.shape[2] >= _KERNEL_ROWS:
        shape = query.shape[:2]
        by_block = [x.expand(*shape, -1, -1).flatten(0, 1)[:, None] for x in (query, key, value)]
        mask = None
        if bool(bias.any()):  # else the kernel is faster without one
            mask = bias[:, :, None].expand(-1, -1, query.shape[2], -1).flatten(0, 1)[:, None]
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_block, attn_mask=mask, scale=1.0)
        output, lse = output.view(query.shape), lse.view(query.shape[:-1])
    else:
        if key.shape[1] == 1:  # one product of all blocks, since a broadcast one would copy the means for each
            logits = product(query.flatten(1, 2)[:, None], key.mT).view(*query.shape[:-1], -1) + bias[:, :, None]
        else:
            logits = product(query, key.mT) + bias[:, :, None]
        lse, weights = logits.logsumexp(dim=-1), logits.softmax(dim=-1)
        if key.shape[1] == 1:
            output = product(weights.flatten(1, 2)[:, None], value).view_as(query)
        else:
            output = product(weights, value)
    is_empty = lse < EMPTY / 2
    return output.masked_fill(is_empty[..., None], 0), lse.masked_fill(is_empty, EMPTY)
