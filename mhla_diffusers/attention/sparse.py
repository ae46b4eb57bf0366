"""The sparse branch: softmax over listed blocks of keys, all other blocks taking part through their pooled keys.

For a query of head h in block a, R the tokens of its listed blocks and all extra tokens, s_t = q · k_t / √D after RoPE,
and for every other block c of n_c tokens the mean key k̄_c and value v̄_c::

    o = [ Σ_{t∈R} exp(s_t) v_t + Σ_{c∉R} n_c exp(β_h + q · k̄_c / √D) v̄_c ] / [ the same without v ]

The logarithm of the denominator (LSE) comes with the output, so that :mod:`mhla_diffusers.attention.merge` can put the
linear branch under the same denominator. Here it is PyTorch operations; what chooses the lists, fits β and attends to
lists are operators, so that torch.compile takes each as a whole.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from .call import BlockLists, Call, list_length, mask_of_lists
from .layout import BlockTable, Shape, block_count, block_table, in_blocks, in_order, layout_of
from .linear import finish
from .parallel.collectives import gathered, summed
from .precision import sum_dtype, without_autocast
from .rope import rotated

BIASES = (-3.0, 3.0, 25)
"""β that are tried: the first, the last and how many."""
FITTING_QUERIES = 256
"""Queries of a head that β is fitted on; of fewer than 96 times as many tokens, one in 96 and at least 8."""
_LOGITS = 2**22
"""That are formed at once."""
ROWS = 64
"""Rows of a block where all keys are attended to, as many as fill one block of a matrix product."""


def with_lists(call: Call) -> Call:
    """With the lists, and β, that are found by query and key, where they are to be."""
    if call.rule is None:
        return call
    rule, others = call.rule, call.extra
    inputs = call.query, call.key, call.rotary_of_tokens, call.key_mask
    place = call.grid, rule.block_size, call.first, call.group
    with torch.no_grad(), without_autocast(call.query.device):
        keys = choose_by_content(*inputs, *place, rule.density)
        call = replace(call, lists=BlockLists.from_choice(rule.block_size, keys), rule=None)
        if not rule.fit_pooled_bias:
            return call
        of_extra = (None, None, None) if others is None else (others.key, others.value, others.key_mask)
        bias = fit_pooled_bias(*inputs, *place, call.value, *of_extra, keys, len(call.shares))
        return replace(call, pooled_bias=bias)


def softmax_attention(call: Call) -> torch.Tensor:
    """Of a call that lists all pairs: :func:`torch.nn.functional.scaled_dot_product_attention`, and nothing else.

    Returns:
        (B, N, H, D); with n extra tokens (B, N + n, H, D) in the order of the sequence.
    """
    table, value, mask = call.rotary_of_tokens, call.value, call.key_mask
    query, key = rotated(call.query, table), rotated(call.key, table)
    if call.extra is not None:
        query, key, value, mask = call.extra.after(query, key, value, mask)
    output, tokens = _attend_to_all_tokens(query, key, value, mask), call.query.shape[1]
    of_grid = finish(output[:, :tokens], call.output_norm, call.output_gate).to(call.query.dtype)
    return of_grid if call.extra is None else call.extra.around(of_grid, output[:, tokens:])


def _attend_to_all_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention of (B, Q, H, D) to all of (B, K, H, D), with weights of the keys (B, K)."""
    bias = None if mask is None else mask.to(query.dtype).log()[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2)


def sparse_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the listed blocks and, where the call has ``pooled_bias``, to the pooled keys of the others.

    Args:
        call: with lists.

    Returns:
        Output (B, N + n, H, D) and LSE (B, N, H, 1), both in float32 (float64 for float64 inputs); the n extra tokens
        come last. A query that attends to nothing gets 0 and the lowest finite number.
    """
    lists, dtype, extra = given_lists(call), sum_dtype(call.query.dtype), 0
    with without_autocast(call.query.device):
        rotary = call.rotary_of_tokens
        query, key = (rotated(x.to(dtype), rotary) for x in (call.query, call.key))
        value, mask = call.value.to(dtype), call.key_mask
        if call.extra is not None:
            query, key, value, mask = call.extra.after(query, key, value, mask)
            extra = call.extra.count
        tokens, place = call.query.shape[1], (call.grid, lists.block_size)
        mask_or_ones = key.new_ones(1, key.shape[1]) if mask is None else mask.to(dtype)
        scaled = query[:, :tokens] * query.shape[-1] ** -0.5
        key_blocks, value_blocks = in_blocks(key, *place), in_blocks(value, *place)
        weights = in_blocks(mask_or_ones[..., None, None], *place)[:, 0, ..., 0]
        pooled: PooledKeys | None = None
        if call.pooled_bias is not None:
            grid_key, grid_value = (x[:, :, : lists.blocks] for x in (key_blocks, value_blocks))
            pooled = pooled_keys(weights[:, : lists.blocks], grid_key, grid_value, call.pooled_bias)
        output, lse = attend_to_lists(
            in_blocks(scaled, *place),
            key_blocks,
            value_blocks,
            weights.log(),
            *(pooled or (None, None, None)),
            lists.padded(),
            key_blocks.shape[2] - lists.blocks,
        )
        output, lse = (in_order(x, *place) for x in (output, lse[..., None]))
        if extra:
            output = torch.cat([output, _attend_to_all_tokens(query[:, tokens:], key, value, mask)], dim=1)
        return output, lse


def given_lists(call: Call) -> BlockLists:
    """The lists of a call.

    Raises:
        ValueError: there are none.
    """
    if call.lists is None:
        raise ValueError("This call has no block lists; with_lists() finds those of a rule.")
    return call.lists


PooledKeys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Mean keys and values (B, H, T, D), and what is added to their logits, (1 or B, H, T)."""


def pooled_keys(
    weights: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    table: BlockTable | None = None,
    group: str | None = None,
) -> PooledKeys:
    """Of all blocks.

    Args:
        weights: (1 or B, Q, L), of the keys.
        key: (B, H, Q, L, D).
        value: likewise.
        bias: β, (H,) or (B, H).
        table: of the own tokens, Q of T blocks; None for all.
        group: of the processes that hold the grid's tokens between them.
    """
    mean_key, mean_value = block_means(weights, key, value, table=table, group=group)
    log_count = total_of_blocks(weights.sum(dim=-1, keepdim=True), table, group).squeeze(-1).log()
    return mean_key, mean_value, log_count[:, None] + bias.to(key.dtype)[..., None]


def total_of_blocks(x: torch.Tensor, table: BlockTable | None = None, group: str | None = None) -> torch.Tensor:
    """Sums over the processes: (..., Q, C) of the own blocks to (..., T, C) of all."""
    if table is None or group is None:
        return x
    everywhere = x.new_zeros(*x.shape[:-2], table.count, x.shape[-1])
    return summed(everywhere.index_copy(x.ndim - 2, table.blocks, x), group)


def block_means(
    weights: torch.Tensor, *some: torch.Tensor, table: BlockTable | None = None, group: str | None = None
) -> list[torch.Tensor]:
    """Means (B, H, T, D) of (B, H, Q, L, D) with weights (1 or B, Q, L); 0 where there is no weight.

    With a group of processes, of the tokens that all of them hold: Q of T blocks are in the table of the own ones.
    """
    total = total_of_blocks(weights.sum(dim=-1, keepdim=True), table, group)[:, None]
    total = total.clamp_min(torch.finfo(weights.dtype).tiny)
    rows = weights[:, None, :, :, None]
    # no product of matrices, whose backward pass autocast would lower where backward() is called under it
    return [total_of_blocks((rows * x).sum(dim=-2), table, group) / total for x in some]


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys, with an LSE through which gradients pass.

    Args:
        query: (B, Q, H, D), scaled.
        key: (B, K, H, D).
        value: (B, K, H, D).
        mask: (B, K), weights of the keys.

    Returns:
        Output (B, Q, H, D) and LSE (B, Q, H, 1).
    """
    weights = key.new_ones(1, key.shape[1]) if mask is None else mask.to(key.dtype)
    query_blocks, key_blocks, value_blocks = (filled_blocks(x, ROWS) for x in (query, key, value))
    no_lists = torch.empty(1, *query_blocks.shape[1:3], 0, dtype=torch.int64, device=key.device)
    log_weights = filled_blocks(weights[..., None, None], ROWS)[:, 0, ..., 0].log()
    inputs = query_blocks, key_blocks, value_blocks, log_weights
    output, lse = attend_to_lists(*inputs, None, None, None, no_lists, key_blocks.shape[2])
    output, lse = (x.flatten(2, 3)[:, :, : query.shape[1]].transpose(1, 2) for x in (output, lse[..., None]))
    return output, lse


def filled_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(B, N, H, C), filled up with 0, as (B, H, blocks, rows, C)."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % rows))
    return filled.unflatten(1, (-1, rows)).permute(0, 3, 1, 2, 4).contiguous()


class Inputs(NamedTuple):
    """What :func:`attend_to_lists` is given."""

    query: torch.Tensor
    """(B, H, Q, L, D), scaled."""
    key: torch.Tensor
    """(B, H, T + E, K, D)."""
    value: torch.Tensor
    bias: torch.Tensor
    """(1 or B, T + E, K), log of a key's weight, −∞ where there is no token; takes no gradient."""
    mean_key: torch.Tensor | None
    """(B, H, T, D); None to leave other blocks out, as the next two."""
    mean_value: torch.Tensor | None
    mean_bias: torch.Tensor | None
    """(1 or B, H, T), added to the logit of a pooled key."""
    lists: torch.Tensor
    """int64 (1 or B, H, Q, n), key blocks of T, -1 for none."""
    always: int
    """E, how many blocks behind the T every query attends to."""


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? mean_key, Tensor? mean_value, Tensor? mean_bias, "
    "Tensor lists, SymInt always"
)


@torch.library.custom_op("mhla_diffusers::attend_to_lists", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def attend_to_lists(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to listed blocks, and to the pooled keys of those that are not listed; takes :class:`Inputs` one by one.

    Returns:
        Output (B, H, Q, L, D) and LSE (B, H, Q, L).
    """
    given = Inputs(*inputs)
    query = given.query
    output, lse = torch.empty_like(query), query.new_empty(query.shape[:-1])
    finite = torch.finfo(query.dtype)
    for part in _parts(given):
        largest = part.logits.amax(dim=-1, keepdim=True).clamp_min_(finite.min)
        weights = part.logits.sub_(largest).exp_()
        total = weights.sum(dim=-1, keepdim=True).clamp_min_(finite.tiny)
        near, far = part.split(weights)
        found = near @ part.value
        if part.mean_value is not None:
            found += (far.flatten(1, 2) @ part.mean_value).view_as(found)
        part.of(output).copy_(found.div_(total))
        part.of(lse).copy_((largest + total.log()).squeeze(-1))
    return output, lse


@torch.library.custom_op(
    "mhla_diffusers::attend_to_lists_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor lse_gradient, Tensor output, Tensor lse, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attend_to_lists_backward(
    output_gradient: torch.Tensor, lse_gradient: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, mean_key, mean_value and mean_bias; those of means are empty without them.

    The weights are formed anew, so that none are kept.
    """
    given = Inputs(*inputs)
    query, key, value, _, mean_key, mean_value, mean_bias, *_ = given
    # a weight p takes the gradient p (do · v − delta)
    delta = ((output_gradient * output).sum(dim=-1) - lse_gradient)[..., None]
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    of_means = [query.new_empty(0) if x is None else torch.zeros_like(x) for x in (mean_key, mean_value)]
    of_mean_bias = query.new_empty(0) if mean_key is None else mean_key.new_zeros(mean_key.shape[:-1])
    for part in _parts(given):
        weights = part.logits.sub_(part.of(lse)[..., None]).exp_()
        q, do, d = (part.of(x) for x in (query, output_gradient, delta))
        near, far = part.split(weights)
        ds = near * (do @ part.value.mT - d)
        found = ds @ part.key
        for to, rows in ((dk, ds.mT @ q), (dv, near.mT @ do)):
            blocks = to.view(-1, *to.shape[3:])
            blocks.index_add_(0, part.listed.flatten(), rows.reshape(-1, *blocks.shape[1:]))
        if part.mean_key is not None and part.mean_value is not None:
            q, do, d, far = (x.flatten(1, 2) for x in (q, do, d, far))
            ds = far * (do @ part.mean_value.mT - d)
            found += (ds @ part.mean_key).view_as(found)
            for to, rows in ((of_means[0], ds.mT @ q), (of_means[1], far.mT @ do), (of_mean_bias, ds.sum(dim=1))):
                to.flatten(0, 1)[part.groups] += rows
        part.of(dq).copy_(found)
    if mean_bias is not None:
        of_mean_bias = of_mean_bias.sum_to_size(mean_bias.shape)
    return dq, dk, dv, *of_means, of_mean_bias


@dataclass(frozen=True)
class _Part:
    """Some query blocks (g, q) of some heads and samples, with what they attend to: W listed rows and T means."""

    groups: slice
    """Of B H."""
    blocks: slice
    """Of Q."""
    listed: torch.Tensor
    """int64 (g, q, n + E): on the flat axis of all key blocks."""
    key: torch.Tensor
    """(g, q, W, D)."""
    value: torch.Tensor
    mean_key: torch.Tensor | None
    """(g, T, D)."""
    mean_value: torch.Tensor | None
    logits: torch.Tensor
    """(g, q, L, W + T), −∞ for means of listed blocks."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """(g, q, ...) of (B, H, Q, ...), as a view."""
        return x.flatten(0, 1)[self.groups, self.blocks]

    def split(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of listed rows and of means."""
        return weights[..., : self.key.shape[2]], weights[..., self.key.shape[2] :]


def _parts(given: Inputs) -> Iterator[_Part]:
    """All query blocks, so many at a time that no more than ``_LOGITS`` logits are formed."""
    query, key, value, bias, mean_key, mean_value, mean_bias, lists, always = given
    batch, heads, query_blocks, length, _ = query.shape
    count, rows = key.shape[2:4]
    total = batch * heads
    if not lists.shape[-1] and not always:
        lists = torch.nn.functional.pad(lists, (0, 1), value=-1)  # a softmax over nothing is not defined
    last = torch.arange(count - always, count, device=lists.device).expand(*lists.shape[:-1], -1)
    lists = torch.cat([lists, last], dim=-1).expand(batch, -1, -1, -1).flatten(0, 1)
    bias = bias[:, None].expand(batch, heads, -1, -1).reshape(-1, rows)
    all_keys, all_values = (x.reshape(-1, rows, x.shape[-1]) for x in (key, value))
    if mean_key is not None and mean_value is not None and mean_bias is not None:
        mean_key, mean_value = mean_key.flatten(0, 1), mean_value.flatten(0, 1)
        mean_bias = mean_bias.expand(batch, -1, -1).flatten(0, 1)
    of_block = length * (lists.shape[-1] * rows + (0 if mean_key is None else count - always))
    at_once = max(1, min(query_blocks, _LOGITS // max(1, of_block)))
    groups_at_once = max(1, _LOGITS // max(1, of_block * query_blocks))
    for group in range(0, total, groups_at_once):
        groups = slice(group, min(group + groups_at_once, total))
        first = torch.arange(groups.start, groups.stop, device=lists.device)[:, None, None] * count
        for block in range(0, query_blocks, at_once):
            blocks = slice(block, block + at_once)
            here = lists[groups, blocks]
            listed = here.clamp_min(0) + first
            own_key, own_value, own_bias = (
                x.index_select(0, listed.flatten()).view(*listed.shape, *x.shape[1:]).flatten(2, 3)
                for x in (all_keys, all_values, bias)
            )
            own_bias = own_bias.masked_fill((here < 0).repeat_interleave(rows, dim=-1), -math.inf)
            own_query = query.flatten(0, 1)[groups, blocks]
            logits = own_query @ own_key.mT + own_bias[:, :, None]
            own_mean_key = own_mean_value = None
            if mean_key is not None and mean_value is not None and mean_bias is not None:
                own_mean_key, own_mean_value = mean_key[groups], mean_value[groups]
                is_listed = mask_of_lists(here[..., : here.shape[-1] - always], count - always)
                far_bias = mean_bias[groups, None].masked_fill(is_listed, -math.inf)
                # one product of all blocks, since a broadcast one would copy the means for each
                far = (own_query.flatten(1, 2) @ own_mean_key.mT).view(*own_query.shape[:-1], -1)
                logits = torch.cat([logits, far + far_bias[:, :, None]], dim=-1)
            yield _Part(groups, blocks, listed, own_key, own_value, own_mean_key, own_mean_value, logits)


@attend_to_lists.register_fake
def _shapes(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1])


@attend_to_lists_backward.register_fake
def _backward_shapes(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(
        arguments[4].new_empty(0) if x is None else torch.empty_like(x) for x in (*arguments[4:7], *arguments[8:11])
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.always = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, output_gradient: torch.Tensor, lse_gradient: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    with without_autocast(output_gradient.device):  # who calls backward() under autocast has it here too
        dq, dk, dv, *of_means = attend_to_lists_backward(output_gradient, lse_gradient, *saved, ctx.always)
    return dq, dk, dv, None, *(of_means if saved[6] is not None else (None,) * 3), None, None


attend_to_lists.register_autograd(_differentiate, setup_context=_save)


def _count_pairs(query: torch.Size, key: torch.Size, means: torch.Size | None, lists: torch.Size, always: int) -> int:
    """Queries times what they attend to, rows of blocks and means; shapes as of :func:`attend_to_lists`."""
    return math.prod(query[:-1]) * ((lists[-1] + always) * key[3] + (0 if means is None else means[2]))


@register_flop_formula(torch.ops.mhla_diffusers.attend_to_lists)
def _flops(query: torch.Size, key: torch.Size, *inputs: Any, **_: Any) -> int:
    """Of the forward, for PyTorch's counter: logits and sums of values."""
    mean_key, (lists, always) = inputs[2], inputs[-2:]
    return 4 * query[-1] * _count_pairs(query, key, mean_key, lists, always)


@register_flop_formula(torch.ops.mhla_diffusers.attend_to_lists_backward)
def _flops_backward(*inputs: Any, **_: Any) -> int:
    """Of the backward: logits anew, their gradients, and those of query, key and value, as PyTorch counts its own."""
    query, key, mean_key, (lists, always) = inputs[4], inputs[5], inputs[8], inputs[-2:]
    return 10 * query[-1] * _count_pairs(query, key, mean_key, lists, always)


_CALL = "Tensor query, Tensor key, Tensor? table, Tensor? key_mask, SymInt[] grid, SymInt block_size, SymInt first"
"""Of a call that holds the grid's tokens from ``first`` on; ``group`` is that of the processes that hold the others."""


@torch.library.custom_op(
    "mhla_diffusers::choose_by_content", mutates_args=(), schema=f"({_CALL}, str? group, float density) -> Tensor"
)
def choose_by_content(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor | None, key_mask: torch.Tensor | None, *place: Any
) -> torch.Tensor:
    """For every query block as many key blocks, those that their mean stands for worst.

    To first order a block's mean is wrong by its softmax weight times the spread of its logits, so for a mean query q a
    key block with mean k̄ and variance σ² per channel is judged by q·k̄/√D + ½ log Σ_d q_d² σ_d²/D. A block in which
    no key takes part comes after all others. Processes that share the tokens of a call find the same lists.

    Returns:
        int64 (B, H, T, list length), ascending within a list; at least one key block for every query block.
    """
    grid, block_size, first, group, density = place
    own = block_table(tuple(grid), (), block_size, query.device, first, query.shape[1])
    dtype, least = sum_dtype(query.dtype), torch.finfo(torch.float32).tiny
    scale = query.shape[-1] ** -0.5
    query, key = (own.in_blocks(rotated(x, table).to(dtype)) for x in (query, key))
    weights = own.weights(key_mask, dtype)
    mean_query = block_means(own.weights(None, dtype), query, table=own, group=group)[0] * scale
    (mean_key,) = block_means(weights, key, table=own, group=group)
    (variance,) = block_means(weights, (key - mean_key[:, :, own.blocks, None]).square(), table=own, group=group)
    scores = mean_query @ mean_key.mT + (mean_query.square() @ variance.mT).clamp_min(least).log() / 2
    if key_mask is not None:
        is_masked = total_of_blocks(weights.sum(dim=-1, keepdim=True), own, group) == 0
        scores = scores.masked_fill(is_masked.mT[:, None], torch.finfo(dtype).min)
    return scores.topk(list_length(density, own.count), dim=-1, sorted=False).indices.sort(dim=-1).values


@choose_by_content.register_fake
def _choice_shape(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *_, grid, block_size, _first, _group, density = arguments
    blocks = block_count(grid, block_size)
    shape = query.shape[0], query.shape[2], blocks, list_length(density, blocks)
    return query.new_empty(shape, dtype=torch.int64)


@register_flop_formula(torch.ops.mhla_diffusers.choose_by_content)
def _flops_of_choice(query: torch.Size, *arguments: Any, **_: Any) -> int:
    """Of the two products of means, for PyTorch's counter."""
    grid, block_size = arguments[3:5]
    return 4 * query[0] * query[2] * block_count(grid, block_size) ** 2 * query[3]


@torch.library.custom_op(
    "mhla_diffusers::fit_pooled_bias",
    mutates_args=(),
    schema=f"({_CALL}, str? group, Tensor value, Tensor? extra_key, Tensor? extra_value, Tensor? extra_mask, "
    "Tensor lists, SymInt processes) -> Tensor",
)
def fit_pooled_bias(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor | None, key_mask: torch.Tensor | None, *others: Any
) -> torch.Tensor:
    """β with which listed blocks and pooled keys come closest to softmax attention over all keys, on some queries.

    Takes what :func:`choose_by_content` does up to ``group``; value (B, N, H, D); key after RoPE, value and mask of
    extra tokens, to which softmax attends; the lists that were chosen; and of how many processes the group is.

    Returns:
        float32 (float64 for float64 inputs) (B, H).
    """
    grid, block_size, first, group, value, extra_key, extra_value, extra_mask, lists, processes = others
    dtype, tokens = sum_dtype(query.dtype), query.shape[1]
    tiny, lowest = torch.finfo(dtype).tiny, torch.finfo(dtype).min
    own = block_table(tuple(grid), (), block_size, query.device, first, tokens)
    rows = fitting_rows(tuple(grid), query.device)
    some = layout_of(tuple(grid), block_size, device=str(query.device)).order[rows].long()
    is_own, here = (some >= first) & (some < first + tokens), (some - first).clamp(0, tokens - 1)
    query = rotated(query[:, here].to(dtype), None if table is None else table[:, here])
    query = summed(query * is_own[:, None, None], group).transpose(1, 2) * query.shape[-1] ** -0.5
    key, value = own.in_blocks(rotated(key.to(dtype), table)), own.in_blocks(value.to(dtype))
    weights = own.weights(key_mask, dtype)
    no_bias = query.new_zeros(query.shape[1])
    mean_key, mean_value, log_count = pooled_keys(weights, key, value, no_bias, own, group)

    logits = query @ key.flatten(2, 3).mT + weights.log().flatten(1)[:, None, None]
    of_means = query @ mean_key.mT + log_count[:, :, None]
    largest = torch.cat([logits, of_means], dim=-1).amax(dim=-1, keepdim=True)
    if group is not None:
        largest = gathered(largest[None], [1] * processes, group).amax(dim=0)
    largest = largest.clamp_min(lowest)
    is_listed = mask_of_lists(lists[:, :, rows // block_size], own.count)
    softmax = (logits - largest).exp().unflatten(-1, own.tokens.shape)
    value = _with_ones(value).flatten(2, 3)
    everything, near = (
        summed(x.flatten(-2) @ value, group) for x in (softmax, softmax * is_listed[..., own.blocks, None])
    )
    far = (of_means - largest).exp().masked_fill(is_listed, 0) @ _with_ones(mean_value)
    if extra_key is not None and extra_value is not None:
        logits = query @ extra_key.to(dtype).transpose(1, 2).mT - largest
        if extra_mask is not None:
            logits = logits + extra_mask.to(dtype).log()[:, None, None]
        more = logits.exp() @ _with_ones(extra_value.to(dtype).transpose(1, 2))
        everything, near = everything + more, near + more
    sums = [x[..., -1:].clamp_min(tiny) for x in (everything, near, far)]
    truth, near, far = (x[..., :-1] / total for x, total in zip((everything, near, far), sums, strict=True))
    return best_bias(truth, near, sums[1].log().squeeze(-1), far, sums[2].log().squeeze(-1))


def _with_ones(value: torch.Tensor) -> torch.Tensor:
    """With a further channel, in which weights add up to their sum."""
    return torch.nn.functional.pad(value, (0, 1), value=1)


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


@fit_pooled_bias.register_fake
def _bias_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], dtype=sum_dtype(query.dtype))


@lru_cache(maxsize=64)
def fitting_rows(grid: Shape, device: torch.device) -> torch.Tensor:
    """Rows of the queries that β is fitted on, evenly spread along the blocks: int64, at most 256."""
    count = math.prod(grid)
    number = min(FITTING_QUERIES, max(8, count // 96), count)
    # the rows of the grid's tokens follow each other, and the padding comes behind
    return ((torch.arange(number, device="cpu") + 0.5) * count / number).long().to(device)
