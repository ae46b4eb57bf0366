"""Sparse attention: softmax over listed key blocks; the others are approximated from means, spread and states.

For a query of head h in block a, q its scaled query q/√D after RoPE, R the tokens of its listed blocks and all extra
tokens, and for every other block c of n_c tokens the mean key k̄_c and value v̄_c::

    listed = Σ_{t∈R} exp(q · k_t) v_t / (the same without v)
    pooled = Σ_{c∉R} w_ac exp(q · k̄_c) v̄_c / (the same without v),   w_ac = n_c exp(g_ac)
    o      = (1 − σ) listed + σ (pooled + γ_h q · M_a),   σ pooled's share of both denominators, its own times exp(β_h)

The gain g_ac is that of the variance s_ac = Σ_d q̄_ad² σ²_cd of the block's scores with the mean query
(:func:`log_gain`). M_a mixes centred KV states S̄_s, the means of S_c = 1/n_c Σ (k_t − k̄_c)(v_t − v̄_c)ᵀ over a *stretch*
s of keys that were sorted together (:mod:`.order`), with weights that content gives at every call::

    M_a = Σ_s m_as S̄_s,   m_as = Σ_{c∈s} softmax over c∉R of (q̄_a · k̄_c + log w_ac)

docs/inside.md derives this, the second order in the distances of keys and values from their means. PISA (arXiv
2602.01077) published exact blocks beside block means and one centred state per head before.

**β and γ** are fitted within the call, per sample and head: for each β that is tried the best γ is a quotient of two
sums over some sampled queries. A head whose blocks the expansion does not suit gets γ = 0.

Extra tokens belong to no block and no state; they attend to everything with softmax.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from .blocks import in_blocks, in_order, list_length, mask_of_lists
from .call import BlockLists, ContentRule, Far, SparseCall, UniformBlocks
from .layout import block_count, layout_of
from .order import blocks_per_state, content_order
from .precision import EMPTY, product, sum_dtype, under_common_sum, without_autocast
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
    """Attend to listed blocks, and approximate the others: (B, N, H, D) in the type of the query.

    A query that attends to nothing gets 0.
    """
    _, (listed, listed_lse, pooled, pooled_lse, *of_states), beta, gamma = _attend(call)
    if of_states and gamma is not None:
        pooled = pooled + gamma[..., None, None, None] * of_states[0]
    pooled_lse = pooled_lse + beta[..., None, None]
    output = under_common_sum(listed, listed_lse[..., None], pooled, pooled_lse[..., None])
    output = in_order(output, call.grid, call.sparse.block_size).to(call.query.dtype)
    if any(call.extra):
        output = call.in_sequence(torch.cat([output, softmax_attention(call, of_extra=True)], dim=1))
    return output


def with_lists(call: SparseCall) -> SparseCall:
    """Compute the parts of a call that depend on queries and keys: lists, β and γ."""
    with torch.no_grad(), without_autocast(call.query.device):
        rule, (keys, _, beta, gamma) = call.sparse, _attend(call)
        size, count = rule.key_block_size, block_count(call.grid, rule.key_block_size)
        lists = BlockLists(rule.block_size, keys, count, key_block_size=size, order=rule.order)
    return replace(call, sparse=lists, pooled_bias=beta, state_weight=gamma)


def _attend(call: SparseCall) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Order tokens by blocks, pool these, choose lists, attend to listed and pooled blocks and states, fit β and γ.

    Returns:
        Lists, int64 (1 or B, H, T, n); outputs (B, H, T, L, D) and LSE (B, H, T, L) of listed and of pooled blocks,
        without β, and of second order what is read from mixed states, q · M_a; β and γ, None without states.
    """
    rule, heads = call.sparse, call.query.shape[2]
    rows = uniform_rows(call, rule)
    pooled = pool(call, rows)
    lists = rule.keys if isinstance(rule, BlockLists) else choose_by_content(rule, pooled, call.far)
    query, bias = rows.query[:, :, : rows.blocks] * call.query.shape[-1] ** -0.5, rows.weights.log()

    # what is added to the logits of means: 0 as a weight where a block is listed
    log_weight, mixing, states = pooled.log_weight[:, :, None], None, None
    is_listed = mask_of_lists(lists, rows.key_blocks)
    if call.far == "second-order":
        log_weight, per_state = log_weight + pooled.gain, blocks_per_state(rule.key_block_size)
        states = stretch_states(pooled, rows.value[:, :, : rows.key_blocks], per_state)
        mixing = content_mixing(pooled.logits + log_weight, is_listed, per_state)
    log_weight = log_weight.expand(*query.shape[:3], -1).masked_fill(is_listed, EMPTY)

    # all query blocks attend to the extra tokens' blocks too
    extra = torch.arange(rows.key_blocks, rows.key.shape[2], device=query.device)
    entries = torch.cat([lists, extra.expand(*lists.shape[:-1], -1)], dim=-1).expand(len(query), -1, -1, -1)
    if not entries.shape[-1]:  # a softmax over nothing is not defined
        entries = torch.nn.functional.pad(entries, (0, 1), value=-1)
    listed_logits = entries.shape[-1] * rows.key.shape[3]
    by_head = rows.key, rows.value, bias.expand(len(query), heads, -1, -1), pooled.key, pooled.value, states
    found = in_parts(
        _attend_part,
        query,
        (entries, log_weight, mixing),
        by_head,
        max(query.shape[3] * max(listed_logits, rows.key_blocks), 0 if states is None else query.shape[-1] ** 2),
    )
    if call.pooled_bias is not None:
        return lists, found, call.pooled_bias, call.state_weight
    with torch.no_grad():
        some = fitting_rows(math.prod(call.grid), query.device)
        mask = bias.flatten(2)[:, :, None].expand(len(query), -1, -1, -1)
        truth = torch.nn.functional.scaled_dot_product_attention(
            query.flatten(2, 3)[:, :, some], rows.key.flatten(2, 3), rows.value.flatten(2, 3), mask, scale=1.0
        )
        beta, gamma = best_weights(truth, *(x.flatten(2, 3)[:, :, some] for x in found))
    return lists, found, beta, None if states is None else gamma


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
    blocks: int
    """T, blocks of the grid's queries."""
    key_blocks: int
    """K, likewise."""
    order: torch.Tensor | None
    """Rows along the curve that the grid's keys were before they were sorted, int64 (B, H, K L'); None if unsorted."""


def uniform_rows(call: SparseCall, blocks: UniformBlocks) -> Rows:
    """Order the tokens of a call by uniform blocks, and the keys of a stretch by content."""
    tokens, dtype, size = math.prod(call.grid), sum_dtype(call.query.dtype), blocks.key_block_size
    query, key, value = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
    mask = key.new_ones(1, key.shape[1]) if call.key_mask is None else call.key_mask.to(dtype)
    mask = mask[..., None, None]
    if call.rotary is not None:
        query, key = rotated(query, call.rotary), rotated(key, call.rotary)
    if any(call.extra):
        query, key, value, mask = (call.extra_last(x) for x in (query, key, value, mask))
    query = in_blocks(query, call.grid, blocks.block_size)
    key, value = in_blocks(key, call.grid, size), in_blocks(value, call.grid, size)
    weights, order = in_blocks(mask, call.grid, size), None
    counts = -(-tokens // blocks.block_size), -(-tokens // size)
    if blocks.order == "content":
        of_grid = slice(0, counts[1])
        order = content_order(key[:, :, of_grid].flatten(2, 3), weights[:, 0, of_grid].flatten(1) > 0, size)
        key, value = _in_order_of_content(key, order), _in_order_of_content(value, order)
        if call.key_mask is not None:  # padding stays behind all keys
            weights = _in_order_of_content(weights.expand(*key.shape[:4], 1), order)
    return Rows(query, key, value, weights[..., 0], *counts, order)


def _in_order_of_content(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Sort rows (B, H, K + E', L', C) of the grid."""
    batch, heads, count = order.shape
    on_grid = count // x.shape[3]
    # whole rows, which gather() would take number by number
    places = order + torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * count
    rows = x[:, :, :on_grid].reshape(-1, x.shape[-1]).index_select(0, places.flatten())
    rows = rows.view(batch, heads, on_grid, -1, x.shape[-1])
    return torch.cat([rows, x[:, :, on_grid:]], dim=2) if on_grid < x.shape[2] else rows


def key_block_of_tokens(call: SparseCall, blocks: UniformBlocks) -> torch.Tensor:
    """Return the number of the key block that every token of the grid is in: int64 (1 or B, 1 or H, N)."""
    size = blocks.key_block_size
    rows, order = layout_of(call.grid, size, 0, call.query.device).rows.long(), uniform_rows(call, blocks).order
    rows = rows[None, None]
    if order is not None:
        rows = order.argsort(dim=-1).gather(-1, rows.expand(*order.shape[:2], -1))
    return rows // size


# Means and states of the grid's blocks


class Pooled(NamedTuple):
    """Means, spread and weights that represent the grid's blocks."""

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


def pool(call: SparseCall, rows: Rows) -> Pooled:
    """Take the means of the grid's blocks; those of queries regardless of the mask of keys."""
    count = rows.key_blocks
    key, value, weights = rows.key[:, :, :count], rows.value[:, :, :count], rows.weights[:, :, :count]
    # no product of matrices, whose backward pass autocast would lower where backward() is called under it
    exists = in_blocks(rows.query.new_ones(1, math.prod(call.grid), 1, 1), call.grid, rows.query.shape[3])
    query = (exists / exists.sum(dim=3, keepdim=True) * rows.query[:, :, : rows.blocks]).sum(dim=-2)
    query = query * call.query.shape[-1] ** -0.5
    total = weights.sum(dim=-1, keepdim=True)
    # a token alone in its block has the share 1 exactly, so that its key is not apart from the mean
    share = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    mean_key, mean_value = (share[..., None] * key).sum(dim=-2), (share[..., None] * value).sum(dim=-2)
    apart = key - mean_key[:, :, :, None]
    variance = (share[..., None] * apart.square()).sum(dim=-2)
    log_weight = total[..., 0].log().clamp_min(EMPTY)
    logits, variance = product(query, mean_key.mT), product(query.square(), variance.mT)
    gain = log_gain(variance, log_weight[:, :, None])
    return Pooled(mean_key, mean_value, apart, share, log_weight, logits, variance, gain)


def log_gain(variance: torch.Tensor, log_count: torch.Tensor) -> torch.Tensor:
    """Log of a block's softmax weight relative to n exp(q̄ · k̄), for n keys whose scores have variance s.

    The mean of exponentials of Gaussian scores is exp(½ s), but that of n scores cannot exceed the largest of them,
    which grows with √(2 s log n). So s / (1 + √(1 + s / t)) with t = 2 log n (n at least 2), which is ½ s where s is
    small and √(t s) where it is large.
    """
    limit = 2 * log_count.clamp_min(math.log(2))
    return variance / (1 + (1 + variance / limit).sqrt())


def stretch_states(pooled: Pooled, value: torch.Tensor, per_stretch: int) -> torch.Tensor:
    """Mean state S̄ of every stretch of ``per_stretch`` blocks: (B, H, stretches, D, D), keys' channels first.

    Values (B, H, K, L', D) around their means or not give the same, since keys' deviations sum to 0.
    """
    batch, heads, count, length, head_dim = pooled.apart.shape
    padding = -count % per_stretch
    has_weight = torch.nn.functional.pad((pooled.log_weight > EMPTY / 2).to(value.dtype), (0, padding))
    blocks = has_weight.unflatten(-1, (-1, per_stretch)).sum(dim=-1).clamp_min(1)
    share = pooled.share / blocks.repeat_interleave(per_stretch, dim=-1)[..., :count, None]
    keys = share[..., None] * pooled.apart
    if padding:
        keys, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (keys, value))
    shape = batch, heads, -1, per_stretch * length, head_dim
    return product(keys.reshape(shape).mT, value.reshape(shape))


def content_mixing(logits: torch.Tensor, is_listed: torch.Tensor, per_stretch: int) -> torch.Tensor:
    """Mixing matrix of states by content, m_as: (B, H, T, stretches).

    Args:
        logits: (B, H, T, K), of mean queries and blocks, q̄_a · k̄_c + log w_ac; below ``EMPTY`` / 2 without a key.
        is_listed: bool (1 or B, H, T, K), key blocks that have no part.
        per_stretch: blocks of a stretch.
    """
    left_out = is_listed | (logits < EMPTY / 2)
    weights = logits.masked_fill(left_out, EMPTY).softmax(dim=-1)
    weights = torch.nn.functional.pad(weights.masked_fill(left_out, 0), (0, -logits.shape[-1] % per_stretch))
    return weights.unflatten(-1, (-1, per_stretch)).sum(dim=-1)


# Lists, β and γ


@torch.no_grad()
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


def best_weights(
    truth: torch.Tensor,
    listed: torch.Tensor,
    listed_lse: torch.Tensor,
    pooled: torch.Tensor,
    pooled_lse: torch.Tensor,
    of_states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """β of those tried, and its γ, with the least squared error of the output: (...) each.

    With σ the pooled share, r = (1 − σ) listed + σ pooled − truth and c what is read from states, the error
    Σ (r + γ σ c)² is least at γ = −Σ σ c·r / Σ σ² c·c, here held within 0 and 1.5. Outputs are (..., queries, D), LSE
    (..., queries), pooled without β; without states γ is 0.
    """
    candidates = torch.linspace(*BIASES, device=truth.device, dtype=truth.dtype)
    share = torch.sigmoid(pooled_lse[..., None] + candidates - listed_lse[..., None])
    rest = 1 - share
    parts = torch.stack([listed - truth, pooled - truth, *([] if of_states is None else [of_states])])
    inner = (parts[:, None] * parts).sum(dim=-1)[..., None]  # of every two parts: (..., queries, 1)
    errors = rest.square() * inner[0, 0] + 2 * share * rest * inner[0, 1] + share.square() * inner[1, 1]
    errors = errors.sum(dim=-2)
    weights = torch.zeros_like(errors)
    if of_states is not None:
        pull = (share * (rest * inner[2, 0] + share * inner[2, 1])).sum(dim=-2)
        size = (share.square() * inner[2, 2]).sum(dim=-2)
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


def in_parts(
    attend: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    by_block: Sequence[torch.Tensor | None],
    by_head: Sequence[torch.Tensor | None],
    of_block: int,
) -> list[torch.Tensor]:
    """Attend with some query blocks of some heads at a time, so that few logits are formed at once.

    In the backward pass these are formed again, so that none are kept.

    Args:
        attend: takes the parts of all tensors, with heads and samples as one axis.
        query: (B, H, T, L, D).
        by_block: (B, H, T, ...); None is handed on.
        by_head: (B, H, ...), likewise.
        of_block: logits of one query block, or numbers of its mixed state if that is more.
    """
    shape, by_block = query.shape[:3], (query, *by_block)
    logits = _LOGITS if query.device.type == "cpu" else _DEVICE_LOGITS
    groups_at_once = max(1, logits // max(1, of_block * shape[2]))
    at_once = max(1, min(shape[2], logits // max(1, of_block)))
    groups = [repeat(None) if x is None else x.flatten(0, 1).split(groups_at_once) for x in (*by_block, *by_head)]
    parts: list[tuple[torch.Tensor, ...]] = []
    outputs: list[torch.Tensor] = []
    first = 0
    for group in zip(*groups, strict=False):
        of_heads = group[len(by_block) :]
        cut = [repeat(None) if x is None else x.split(at_once, dim=1) for x in group[: len(by_block)]]
        for part in zip(*cut, strict=False):
            if torch.is_grad_enabled():
                parts.append(checkpoint(attend, *part, *of_heads, use_reentrant=False, preserve_rng_state=False))
                continue
            found = attend(*part, *of_heads)
            outputs = outputs or [x.new_empty(shape.numel(), *x.shape[2:]) for x in found]
            last = first + found[0].shape[0] * found[0].shape[1]
            for output, x in zip(outputs, found, strict=True):
                output[first:last] = x.flatten(0, 1)
            first = last
    outputs = outputs or [torch.cat([x.flatten(0, 1) for x in all_parts]) for all_parts in zip(*parts, strict=True)]
    return [x.unflatten(0, shape) for x in outputs]


def _attend_part(
    query: torch.Tensor,
    lists: torch.Tensor,
    log_weight: torch.Tensor,
    mixing: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mean_key: torch.Tensor,
    mean_value: torch.Tensor,
    states: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Attend to listed blocks, to means, and read mixed states: output and LSE of each, of states no LSE.

    Query blocks (g, q, L, D), their lists (g, q, n), what is added to logits of means (g, q, K) and mixing
    (g, q, stretches); of their heads all keys (g, K + E, L', D), logs of the keys' weights (g, K + E, L'), means
    (g, K, D) and states (g, stretches, D, D).
    """
    pooled = softmax_of(query, mean_key[:, None], mean_value[:, None], log_weight)
    of_states: tuple[torch.Tensor, ...] = ()
    if mixing is not None and states is not None:
        of_states = (product(query, product(mixing, states.flatten(2)).unflatten(2, states.shape[2:])),)
    groups, count, rows, _ = key.shape
    places = (lists.clamp_min(0) + torch.arange(groups, device=lists.device)[:, None, None] * count).flatten()
    key, value, bias = (
        x.flatten(0, 1).index_select(0, places).view(*lists.shape, *x.shape[2:]).flatten(2, 3)
        for x in (key, value, bias)
    )
    bias = bias.masked_fill((lists < 0).repeat_interleave(rows, dim=-1), EMPTY).clamp_min(EMPTY)
    return *softmax_of(query, key, value, bias), *pooled, *of_states


def softmax_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with blocks (g, q, L, D) to keys (g, q or 1, n, D), with what is added to logits, (g, q, n).

    On a CPU, without gradients, large blocks have the kernel of scaled_dot_product_attention, which keeps no logits.

    Returns:
        Output (g, q, L, D) and LSE (g, q, L); 0 and ``EMPTY`` where there is nothing to attend to.
    """
    is_plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if query.device.type == "cpu" and is_plain and query.shape[2] >= _KERNEL_ROWS:
        shape = query.shape[:2]
        by_block = [x.expand(*shape, -1, -1).flatten(0, 1)[:, None] for x in (query, key, value)]
        mask = None
        if bool(bias.any()):  # else the kernel is faster without one
            mask = bias[:, :, None].expand(*shape, query.shape[2], -1).flatten(0, 1)[:, None]
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_block, attn_mask=mask, scale=1.0)
        output, lse = output.view(query.shape), lse.view(query.shape[:-1])
    elif key.shape[1] == 1:  # one product of all blocks, since a broadcast one would copy the keys for each
        logits = product(query.flatten(1, 2)[:, None], key.mT).view(*query.shape[:-1], -1) + bias[:, :, None]
        lse = logits.logsumexp(dim=-1)
        output = product(logits.softmax(dim=-1).flatten(1, 2)[:, None], value).view_as(query)
    else:
        logits = product(query, key.mT) + bias[:, :, None]
        lse, output = logits.logsumexp(dim=-1), product(logits.softmax(dim=-1), value)
    is_empty = lse < EMPTY / 2
    return output.masked_fill(is_empty[..., None], 0), lse.masked_fill(is_empty, EMPTY)


def softmax_attention(call: SparseCall, of_extra: bool = False) -> torch.Tensor:
    """Attend to everything by ``torch.nn.functional.scaled_dot_product_attention``: (B, N, H, D).

    ``of_extra``: with the extra tokens alone, those before the grid first, and sums in the type of sums.
    """
    query, key, value = call.query, call.key, call.value
    if of_extra:
        query, key, value = (x.to(sum_dtype(x.dtype)) for x in (query, key, value))
    query, key = rotated(query, call.rotary), rotated(key, call.rotary)
    if of_extra:
        query = call.extra_last(query)[:, math.prod(call.grid) :]
    bias = None if call.key_mask is None else call.key_mask.to(query.dtype).log()[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return output.transpose(1, 2).to(call.query.dtype)
