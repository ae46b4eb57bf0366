"""The sparse branch: softmax over listed blocks of keys, all other blocks taking part through their pooled keys.

For a query of head h in block a, R the tokens of its listed blocks and all extra tokens, s_t = q · k_t / √D after RoPE,
and for every other block c of n_c tokens the mean key k̄_c and value v̄_c::

    o = [ Σ_{t∈R} exp(s_t) v_t + Σ_{c∉R} n_c exp(β_h + q · k̄_c / √D) v̄_c ] / [ the same without v ]

The linear branch, MHLA over all blocks, stands under the same denominator: with LSE the logarithm of that above and
w = σ(LSE − log(λ · normaliser)) the part of the sparse branch in the common sum of weights, the two outputs add up to
w · sparse + (1 − w) · linear. Extra tokens attend to everything with softmax, and leave nothing to the linear branch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from .call import BlockLists, Call, ContentRule, UniformBlocks, list_length, mask_of_lists
from .layout import block_count, in_blocks, in_order, layout_of
from .linear import finish, read, states
from .order import content_order
from .precision import EMPTY, LEAST_MASK, LEAST_MIXING, product, sum_dtype, without_autocast
from .rope import rotated

BIASES = (-3.0, 3.0, 25)
"""β that are tried: the first, the last and how many."""
FITTING_QUERIES = 256
"""Queries of a head that β is fitted on; of fewer than 96 times as many tokens, one in 96 and at least 8."""
_LOGITS, _DEVICE_LOGITS = 2**19, 2**22
"""Logits that are formed at once on a CPU, whose cache then keeps what is gathered, and elsewhere."""
_KERNEL_ROWS = 32
"""Queries of a block from which on PyTorch's kernel for CPUs is as fast as products written out."""
ROWS = 64
"""Rows of a block beside extra tokens alone, as many as fill one block of a matrix product."""


def sparse(call: Call) -> torch.Tensor:
    """Attend to listed blocks, to the pooled keys of the others with ``pooled_bias``, and with λ through MHLA to all.

    A query that attends to nothing gets 0.

    Returns:
        (B, N, H, D); norm and gate leave extra tokens as they are.
    """
    dtype, tokens = sum_dtype(call.query.dtype), call.tokens
    call, output, lse = _softmax_branches(call)
    lists = call.sparse
    assert isinstance(lists, BlockLists)
    with without_autocast(call.query.device):
        output, lse = (in_order(x, call.grid, lists.block_size) for x in (output, lse[..., None]))
    if call.linear_weight is not None:
        alone = linear_branch(call)
        far, normaliser = read(alone, states(alone))
        log_far = (call.linear_weight.to(normaliser.dtype)[:, None] * normaliser).log()
        output = under_common_sum(output, lse, far, log_far)
    output = finish(output, call.output_norm, call.output_gate).to(call.query.dtype)
    if not any(call.extra):
        return output
    with without_autocast(call.query.device):
        sequence = [call.extra_last(rotated(x.to(dtype), call.rotary)) for x in (call.query, call.key)]
        mask = None if call.key_mask is None else call.extra_last(call.key_mask)
        of_extra = _attend_to_all(sequence[0][:, tokens:], sequence[1], call.extra_last(call.value.to(dtype)), mask)
    return call.in_sequence(torch.cat([output, of_extra.to(output.dtype)], dim=1))


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Query (B, H, T + E, L, D), key and value (B, H, K + E', L', D) after RoPE in blocks of queries and of keys, those of
extra tokens last, in the type of sums; and weights of the keys (1 or B, 1 or H, K + E', L'), 0 of padding."""


def uniform_rows(call: Call) -> Rows:
    """Order the tokens of a call by uniform blocks."""
    blocks = call.sparse if call.sparse is not None else UniformBlocks(block_size=ROWS, order="curve")
    with without_autocast(call.query.device):
        dtype = sum_dtype(call.query.dtype)
        query = in_blocks(call.extra_last(rotated(call.query.to(dtype), call.rotary)), call.grid, blocks.block_size)
        key, weights, order = _key_rows(call, blocks)
        value = in_blocks(call.extra_last(call.value.to(dtype)), call.grid, blocks.key_block_size)
        return query, key, value if order is None else _in_order_of_content(value, order), weights


def _key_rows(call: Call, blocks: UniformBlocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and their weights of :data:`Rows`, and the rows along the curve that they were, (B, H, K L'), if sorted."""
    dtype, place = sum_dtype(call.query.dtype), (call.grid, blocks.key_block_size)
    key = in_blocks(call.extra_last(rotated(call.key.to(dtype), call.rotary)), *place)
    mask = key.new_ones(1, call.key.shape[1]) if call.key_mask is None else call.extra_last(call.key_mask.to(dtype))
    weights = in_blocks(mask[..., None, None], *place)[..., 0]
    if blocks.order == "curve":
        return key, weights, None
    on_grid = block_count(*place)
    exists = weights[:, 0, :on_grid].flatten(1) > 0
    order = content_order(key[:, :, :on_grid].flatten(2, 3), exists, blocks.key_block_size)
    if call.key_mask is None:  # what is no key stays behind all that are
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


def with_lists(call: Call) -> Call:
    """Find what the call leaves to its queries and keys: the lists of a rule, and β.

    Beside extra tokens, no ``sparse`` stands for empty lists, and no ``linear_weight`` for a λ of 1 then.
    """
    if isinstance(call.sparse, BlockLists):
        return call
    if call.sparse is None:
        heads, device = call.query.shape[2], call.query.device
        weight = call.linear_weight if call.linear_weight is not None else torch.ones(heads, device=device)
        none = torch.empty(1, heads, block_count(call.grid, ROWS), 0, dtype=torch.int64, device=device)
        return replace(call, sparse=BlockLists(ROWS, none, 0), linear_weight=weight)
    with torch.no_grad():
        return _softmax_branches(call)[0] if call.sparse.fit_pooled_bias else _chosen(call, uniform_rows(call))


def _chosen(call: Call, rows: Rows) -> Call:
    """Replace a rule by the lists that it chooses."""
    rule = call.sparse
    if not isinstance(rule, ContentRule):
        return call
    with torch.no_grad(), without_autocast(call.query.device):
        keys = choose_by_content(call, rule, rows)
    count, size = block_count(call.grid, rule.key_block_size), rule.key_block_size
    lists = BlockLists(rule.block_size, keys, keys.numel(), count, key_block_size=size, order=rule.order)
    return replace(call, sparse=lists)


def _softmax_branches(call: Call) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Attend to listed and pooled keys: the call with lists and β, output (B, H, T, L, D) and LSE (B, H, T, L)."""
    rule = call.sparse
    call = with_lists(call) if rule is None else call
    with without_autocast(call.query.device):
        rows = query, key, value, weights = uniform_rows(call)
        call = _chosen(call, rows)
        lists = call.sparse
        assert isinstance(lists, BlockLists)
        bias, scaled = weights.log(), query[:, :, : lists.blocks] * query.shape[-1] ** -0.5
        output, lse = attend_to_lists(scaled, key, value, bias, lists)
        fits = isinstance(rule, ContentRule) and rule.fit_pooled_bias
        if call.pooled_bias is None and not fits:
            return call, output, lse
        on_grid = weights[:, :, : lists.key_blocks]
        mean_key, mean_value = block_means(on_grid, key[:, :, : lists.key_blocks], value[:, :, : lists.key_blocks])
        far, far_lse = attend_to_pooled(scaled, mean_key, mean_value, on_grid.sum(dim=-1).log(), lists)
        if fits:
            with torch.no_grad():
                branches = output, lse, far, far_lse
                call = replace(call, pooled_bias=fit_pooled_bias(call, scaled, key, value, bias, branches))
        assert call.pooled_bias is not None
        far_lse = far_lse + call.pooled_bias.to(far_lse.dtype)[..., None, None]
        merged = under_common_sum(output, lse[..., None], far, far_lse[..., None])
        return call, merged, torch.logaddexp(lse, far_lse)


def linear_branch(call: Call) -> Call:
    """MHLA over all blocks as it stands beside softmax: without norm and gate, and never 0."""
    mask = call.key_mask
    if mask is not None:
        mask = mask.to(sum_dtype(call.query.dtype)).clamp_min(LEAST_MASK)
    return replace(call, key_mask=mask, mixing=least_mixing(call.mixing), output_norm=None, output_gate=None)


def least_mixing(mixing: torch.Tensor) -> torch.Tensor:
    """Mixing matrix in the type of sums, without an entry of 0."""
    return mixing.to(sum_dtype(mixing.dtype)) + LEAST_MIXING


def under_common_sum(
    near: torch.Tensor, log_near: torch.Tensor, far: torch.Tensor, log_far: torch.Tensor
) -> torch.Tensor:
    """Merge two outputs (B, N, H, D) under the sum of their denominators, whose logs are (B, N, H, 1)."""
    return torch.sigmoid(log_near - log_far) * near + torch.sigmoid(log_far - log_near) * far


def softmax_attention(call: Call) -> torch.Tensor:
    """Attend to everything by :func:`torch.nn.functional.scaled_dot_product_attention`: (B, N, H, D)."""
    query, key = (rotated(x, call.rotary) for x in (call.query, call.key))
    output = _attend_to_all(query, key, call.value, call.key_mask)
    if call.output_norm is None and call.output_gate is None:
        return output
    output = call.extra_last(output)
    on_grid = finish(output[:, : call.tokens], call.output_norm, call.output_gate).to(output.dtype)
    return call.in_sequence(torch.cat([on_grid, output[:, call.tokens :]], dim=1))


def _attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention of (B, Q, H, D) to all of (B, K, H, D), with weights of the keys (B, K)."""
    bias = None if mask is None else mask.to(query.dtype).log()[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2)


def block_means(weights: torch.Tensor, *some: torch.Tensor) -> list[torch.Tensor]:
    """Means (B, H, T, D) of (B, H, T, L, D) with weights (1 or B, 1 or H, T, L); 0 where there is no weight."""
    # a token alone in its block has the share 1 exactly, so that keys do not vary there
    share = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    # no product of matrices, whose backward pass autocast would lower where backward() is called under it
    return [(share[..., None] * x).sum(dim=-2) for x in some]


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
    return _in_parts(_listed, query, entries, by_head, length * entries.shape[-1] * key.shape[3])


def attend_to_pooled(
    query: torch.Tensor, mean_key: torch.Tensor, mean_value: torch.Tensor, log_weight: torch.Tensor, lists: BlockLists
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the means of all blocks that are not listed, without β.

    Args:
        query: (B, H, T, L, D), scaled.
        mean_key: (B, H, K, D).
        mean_value: likewise.
        log_weight: (1 or B, 1 or H, K), log of the sum of a block's weights, −∞ of a block without keys.
        lists: of T query blocks and K key blocks.

    Returns:
        As :func:`attend_to_lists`.
    """
    batch, heads, _, length, _ = query.shape
    by_head = mean_key, mean_value, log_weight.expand(batch, heads, -1)
    return _in_parts(_pooled, query, lists.keys, by_head, length * lists.key_blocks)


def _in_parts(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    lists: torch.Tensor,
    by_head: Sequence[torch.Tensor],
    of_block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend some query blocks of some heads at a time, so that few logits are formed at once.

    In the backward pass these are formed again, so that none are kept.
    """
    batch, blocks = len(query), query.shape[2]
    logits = _LOGITS if query.device.type == "cpu" else _DEVICE_LOGITS
    groups_at_once = max(1, logits // max(1, of_block * blocks))
    at_once = max(1, min(blocks, logits // max(1, of_block)))
    groups = (x.flatten(0, 1).split(groups_at_once) for x in (query, lists.expand(batch, -1, -1, -1), *by_head))
    outputs, sums = [], []
    for q, here, *keys in zip(*groups, strict=True):
        for part in zip(q.split(at_once, dim=1), here.split(at_once, dim=1), strict=True):
            if torch.is_grad_enabled():
                output, lse = checkpoint(attend, *part, *keys, use_reentrant=False, preserve_rng_state=False)
            else:
                output, lse = attend(*part, *keys)
            outputs.append(output.flatten(0, 1))
            sums.append(lse.flatten(0, 1))
    return torch.cat(outputs).view_as(query), torch.cat(sums).view(query.shape[:-1])


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
    query: torch.Tensor, lists: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the means of their heads (g, K, D)."""
    bias = bias.clamp_min(EMPTY)[:, None].masked_fill(mask_of_lists(lists, key.shape[1]), EMPTY)
    return _softmax(query, key[:, None], value[:, None], bias)


def _softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with blocks (g, q, L, D) to keys (g, q or 1, n, D), with what is added to logits, (g, q, n).

    On a CPU, without gradients, large blocks have the kernel of scaled_dot_product_attention, which keeps no logits.
    """
    is_plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
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


def choose_by_content(call: Call, rule: ContentRule, rows: Rows) -> torch.Tensor:
    """For every query block as many key blocks, those that their mean stands for worst.

    To first order a block's mean is wrong by its softmax weight times the spread of its logits, so for a mean query q a
    key block with mean k̄ and variance σ² per channel is judged by q·k̄/√D + ½ log Σ_d q_d² σ_d²/D. A block in which
    no key takes part comes after all others.

    Returns:
        int64 (B, H, T, list length), ascending within a list; at least one key block for every query block.
    """
    blocks, key_blocks = (block_count(call.grid, size) for size in (rule.block_size, rule.key_block_size))
    query, scale = rows[0][:, :, :blocks], call.query.shape[-1] ** -0.5
    key, weights = rows[1][:, :, :key_blocks], rows[3][:, :, :key_blocks]
    # the mean of a query block is that of all its tokens, whatever the mask of keys is
    has_token = in_blocks(query.new_ones(1, call.tokens, 1, 1), call.grid, rule.block_size)[..., 0]
    mean_query = block_means(has_token, query)[0] * scale
    (mean_key,) = block_means(weights, key)
    (variance,) = block_means(weights, (key - mean_key[:, :, :, None]).square())
    spread = (mean_query.square() @ variance.mT).clamp_min(torch.finfo(torch.float32).tiny)
    scores = mean_query @ mean_key.mT + spread.log() / 2
    if call.key_mask is not None:
        scores = scores.masked_fill((weights.sum(dim=-1) == 0)[:, :, None], torch.finfo(scores.dtype).min)
    length = list_length(rule.density, key_blocks)
    return scores.topk(length, dim=-1, sorted=False).indices.sort(dim=-1).values


def fit_pooled_bias(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    branches: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """β with which listed blocks and pooled keys come closest to softmax attention over all keys, on some queries.

    Args:
        call: the call.
        query: as :func:`attend_to_lists` takes it.
        key: likewise.
        value: likewise.
        bias: likewise.
        branches: output and LSE of the listed keys and of the pooled ones without β, of all queries.

    Returns:
        float32 (float64 for float64 inputs) (B, H).
    """
    some = fitting_rows(math.prod(call.grid), query.device)
    near, near_lse, far, far_lse = (x.flatten(2, 3)[:, :, some] for x in branches)
    mask = bias.flatten(2)[:, :, None].expand(len(query), -1, -1, -1)
    truth = torch.nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3)[:, :, some], key.flatten(2, 3), value.flatten(2, 3), attn_mask=mask, scale=1.0
    )
    return best_bias(truth, near, near_lse, far, far_lse)


def best_bias(
    truth: torch.Tensor, near: torch.Tensor, near_lse: torch.Tensor, far: torch.Tensor, far_lse: torch.Tensor
) -> torch.Tensor:
    """β, of those tried, with the least squared error of the output: (...).

    Args:
        truth: softmax attention's output, (..., queries, D).
        near: of the listed blocks.
        near_lse: (..., queries).
        far: of the pooled keys without β.
        far_lse: (..., queries).
    """
    candidates = torch.linspace(*BIASES, device=truth.device, dtype=truth.dtype)
    near, far = near - truth, far - truth
    share = torch.sigmoid(far_lse[..., None] + candidates - near_lse[..., None])
    of_near, of_both, of_far = (x.sum(dim=-1, keepdim=True) for x in (near * near, near * far, far * far))
    errors = (1 - share).square() * of_near + 2 * share * (1 - share) * of_both + share.square() * of_far
    return candidates[errors.sum(dim=-2).argmin(dim=-1)]


def fitting_rows(count: int, device: torch.device) -> torch.Tensor:
    """Rows of the queries that β is fitted on, evenly spread along the blocks of N = ``count`` tokens: int64."""
    number = min(FITTING_QUERIES, max(8, count // 96), count)
    # the rows of the grid's tokens follow each other, and the padding comes behind
    return ((torch.arange(number, device=device) + 0.5) * count / number).long()
