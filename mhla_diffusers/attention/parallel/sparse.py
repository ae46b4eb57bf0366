"""The sparse branch over a ring of processes, each of which holds tokens of the grid: PyTorch operations.

The formula is that of :mod:`mhla_diffusers.attention.sparse`. A process attends with its own queries. Rows of the key
blocks that these list are fetched, and sums of blocks are added up over the processes. Extra tokens are few, so who has
them gives them to all processes of the ring; their own queries attend to the tokens of every process by that process,
and what comes out is put under one denominator where it is due. All processes know all lists and who holds which
tokens, so each knows for itself what every other lacks; working that out waits for the device.
"""

import math
from dataclasses import replace

import torch

from ..call import Call, ExtraTokens
from ..layout import BlockTable, block_table
from ..precision import sum_dtype, without_autocast
from ..rope import rotated
from ..sparse import attend_to_all, attend_to_lists, filled_blocks, given_lists, pooled_keys
from .collectives import counts_of, exchanged, gathered
from .place import Group


def ring_sparse_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the listed blocks and, where the call has ``pooled_bias``, to the pooled keys of the others.

    Keys are sent after RoPE in the type of the call.

    Returns:
        Output (B, N + n, H, D) and LSE (B, N, H, 1), both in float32 (float64 for float64 inputs); the n own extra
        tokens come last. A query that attends to nothing gets 0 and the lowest finite number.
    """
    lists, dtype, rotary = given_lists(call), sum_dtype(call.query.dtype), call.rotary_of_tokens
    grid, size, device = call.grid, lists.block_size, call.query.device
    scale, extra = call.query.shape[-1] ** -0.5, call.extra
    with without_autocast(device):
        everyone, own = block_table(grid, (), size, device), block_table(grid, (), size, device, *_share(call))
        query = rotated(call.query.to(dtype), rotary) * scale
        both = torch.cat([rotated(call.key, rotary), call.value], dim=-1)
        pooled = None
        if call.pooled_bias is not None:
            own_key, own_value = own.in_blocks(both.to(dtype)).chunk(2, dim=-1)
            weights = own.weights(call.key_mask, dtype)
            pooled = pooled_keys(weights, own_key, own_value, call.pooled_bias, own, call.group)
        if lists.longest or pooled is not None:
            key, value = everyone.in_blocks(_fetched(call, both, own)).to(dtype).chunk(2, dim=-1)
            weights = everyone.weights(_mask_of_all(call), dtype)
        else:  # lists that are empty for all, beside extra tokens: nothing of others is looked at
            key = value = query.new_empty(len(query), query.shape[2], 0, size, query.shape[3])
            weights = query.new_empty(1, 0, size)
        of_grid = key.shape[2]
        if extra is not None:
            more = (filled_blocks(x.to(dtype), size) for x in (extra.key, extra.value))
            key, value = (torch.cat(pair, dim=2) for pair in zip((key, value), more, strict=True))
            of_extra = key.new_ones(1, extra.count) if extra.key_mask is None else extra.key_mask.to(dtype)
            of_extra = filled_blocks(of_extra[..., None, None], size)[:, 0, ..., 0]
            batch = max(len(weights), len(of_extra))
            weights = torch.cat([x.expand(batch, -1, -1) for x in (weights, of_extra)], dim=1)
        output, lse = attend_to_lists(
            own.in_blocks(query).contiguous(),
            key.contiguous(),
            value.contiguous(),
            weights.log(),
            *(pooled or (None, None, None)),
            lists.padded()[:, :, own.blocks],
            key.shape[2] - of_grid,
        )
        output, lse = own.in_order(output), own.in_order(lse[..., None])
        if extra is None:
            return output, lse
        mask = call.key_mask
        if mask is not None and extra.key_mask is not None:
            mask = torch.cat([mask, extra.key_mask[:, extra.own].to(mask.dtype)], dim=1)
        own_key, own_value = both.to(dtype).chunk(2, dim=-1)
        from_here = attend_to_all(
            extra.query.to(dtype) * scale,
            torch.cat([own_key, extra.key[:, extra.own].to(dtype)], dim=1),
            torch.cat([own_value, extra.value[:, extra.own].to(dtype)], dim=1),
            mask,
        )
        return torch.cat([output, of_own(*from_here, extra, call.group)], dim=1), lse


def _share(call: Call) -> tuple[int, int]:
    return call.first, call.query.shape[1]


def _mask_of_all(call: Call) -> torch.Tensor | None:
    """Key mask (B, tokens of the grid)."""
    if call.key_mask is None:
        return None
    return gathered(call.key_mask.mT, [count for _, count in call.shares], call.group).mT


def _fetched(call: Call, x: torch.Tensor, own: BlockTable) -> torch.Tensor:
    """Rows of the own tokens, and of those of others that lists of the own query blocks hold.

    A row goes to the processes that need it, and to no other, so that never more is sent than by gathering everything
    everywhere.

    Args:
        call: with lists.
        x: (B, own tokens, H, C).
        own: the own tokens block by block.

    Returns:
        (B, tokens of the grid, H, C), 0 where nothing was fetched.
    """
    lists, device = given_lists(call), x.device
    mask, tokens = lists.mask(), math.prod(call.grid)
    block_of = block_table(call.grid, (), lists.block_size, device).rows // lists.block_size
    # bool (S, H, T), of every process: which key blocks its lists hold
    needed = [mask[:, :, block_of[first : first + count].unique()].any(dim=2) for first, count in call.shares]
    rows = x.unflatten(0, (lists.samples, -1)).permute(0, 3, 2, 1, 4)  # S, H, own tokens, B / S, C
    place = torch.arange(math.prod(mask.shape[:2]) * tokens, device=device).view(*mask.shape[:2], tokens)
    first, count = _share(call)
    due = [needed_there[:, :, block_of[first : first + count]] for needed_there in needed]
    coming = [needed[call.rank][:, :, block_of[a : a + n]] for a, n in call.shares]
    due[call.rank], coming[call.rank] = (torch.zeros_like(x[call.rank]) for x in (due, coming))
    sent, received = ([int(some.sum()) for some in of_process] for of_process in (due, coming))
    others = exchanged(torch.cat([rows[some] for some in due]), sent, received, call.group)
    places = [place[:, :, a : a + n][some] for (a, n), some in zip(call.shares, coming, strict=True)]
    here = torch.cat([rows.flatten(0, 2), others])
    to = torch.cat([place[:, :, first : first + count].flatten(), *places])
    everything = rows.new_zeros(place.numel(), *rows.shape[3:]).index_copy(0, to, here)
    return everything.unflatten(0, place.shape).permute(0, 3, 2, 1, 4).flatten(0, 1)


def of_everyone(own: ExtraTokens, group: Group, even: bool) -> ExtraTokens:
    """The extra tokens of all processes of the ring, each of which has at least one, and as many where ``even``."""
    counts = counts_of(own.count, group, even, own.key.device)

    def everyones(x: torch.Tensor) -> torch.Tensor:
        return gathered(x.movedim(1, 0), counts, group.name).movedim(0, 1)

    together = torch.cat([own.query, own.key, own.value.to(own.query.dtype)], dim=-1)
    query, key, value = everyones(together).chunk(3, dim=-1)
    mask = own.key_mask
    if mask is not None:
        mask = everyones(mask)
    return replace(own, query=query, key=key, value=value, key_mask=mask, counts=tuple(counts), rank=group.rank)


def of_own(output: torch.Tensor, log_sum: torch.Tensor, others: ExtraTokens, group: str | None) -> torch.Tensor:
    """What the own ones of n extra queries get from the tokens of all processes, (B, own of n, H, D).

    Given output (B, n, H, D) and log of the sum of weights (B, n, H, 1) of all extra queries with this one's tokens.
    """
    rows, counts = torch.cat([output, log_sum], dim=-1).movedim(1, 0), others.counts
    found = exchanged(rows, counts, [counts[others.rank]] * len(counts), group).unflatten(0, (len(counts), -1))
    shares = found[..., -1:].softmax(dim=0)
    return (shares * found[..., :-1]).sum(dim=0).movedim(0, 1)
