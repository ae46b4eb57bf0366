"""Block-sparse attention beside MHLA as fused kernels: the operators, and the order in which they run.

prepare     RoPE, the order of the blocks and their means: (B, N, H, D) to rows (B H, R, D), once for all that follows
weights     of all rows and blocks, by the key mask
choose      the key blocks that every query block attends to, where no lists are given
listed      softmax over the keys of the listed blocks
pooled      softmax over the means of all other blocks
states      KV states of MHLA's blocks, from the same rows
read        what queries read from the mixed states, merged with the two branches, in raster order

An operator takes the token grid as numbers and finds its tables inside, so that torch.compile never traces them, and
keeps them on the device, so that nothing waits for it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..call import BlockLists, Call, ContentRule
from ..causal import Own, block_runs, joined
from ..causal import own_block as own_block_of_features
from ..layout import Shape, in_order, layout_of
from ..linear import finish
from ..rope import rotary_table
from ..sparse import best_bias, fitting_rows, linear_branch, under_common_sum, with_lists
from .choose import choose
from .linear import linear_beside, linear_read, linear_states, usable
from .listed import listed
from .pooled import pooled
from .prepare import GRID, block_weights, layout_for, prepare


def sparse_attention(call: Call) -> torch.Tensor:
    """Attend to the listed blocks, to the pooled keys of the others, and through MHLA to all.

    With ``rope="before"`` MHLA reads the same rows as softmax; with "after" it reads the tokens as they come, and the
    merge is PyTorch operations.

    Returns:
        (B, N, H, D); norm and gate leave extra tokens as they are.
    """
    call = call if isinstance(call.sparse, ContentRule) else with_lists(call)
    lists = call.sparse
    assert lists is not None
    named = {"query": call.query, "key": call.key, "value": call.value}
    tensors = [usable(call.extra_last(x), name) for name, x in named.items()]
    table, mask, extra = rotary_table(call.rotary), call.key_mask, sum(call.extra)
    table = None if table is None else call.extra_last(table).float().contiguous().detach()
    mask = None if mask is None else call.extra_last(mask).float().contiguous()
    block_size, scale, batch = lists.block_size, call.query.shape[3] ** -0.5, len(call.query)
    place = list(call.grid), block_size, extra
    rows = prepare(*tensors, table, mask, *place)
    (query, key, value), (pooled_query, pooled_key, pooled_value, spread) = rows[:3], rows[3:]
    with torch.no_grad():
        bias, weight = block_weights(key, mask, *place)
        if isinstance(lists, BlockLists):
            indices, counts, bits = given_blocks(lists, batch, key.shape[1] // block_size)
        else:
            indices, counts, bits = choose(pooled_query, pooled_key, spread, weight, lists.density, scale, *place)
    of_grid = query[:, : pooled_key.shape[1] * block_size].contiguous()
    keys = key, value, bias if mask is not None else None
    near, near_lse = listed(of_grid, *keys, indices, counts, scale, *place, False)
    far: torch.Tensor | None = None
    far_lse: torch.Tensor | None = None
    fits_bias = isinstance(lists, ContentRule) and lists.fit_pooled_bias
    if fits_bias or call.pooled_bias is not None:
        far, far_lse = pooled(of_grid, pooled_key, pooled_value, weight.log(), bits, scale)
        if call.pooled_bias is None:
            with torch.no_grad():
                beta = fit_bias(of_grid, *keys, near, near_lse, far, far_lse, scale, *place)
        else:
            beta = call.pooled_bias.float().expand(batch, -1).flatten()
        far_lse = far_lse + beta[:, None]
    branches = near, near_lse, far, far_lse
    if call.linear_weight is None or (table is not None and call.rope == "after"):
        output = _merged(call, block_size, *branches)
    else:
        by_head = [x.unflatten(0, (batch, -1)) for x in (of_grid, key, value)]
        output = linear_beside(call, by_head, block_size, branches)
    if not extra:
        return output
    of_extra = query[:, of_grid.shape[1] :].contiguous()
    everything = all_blocks(len(query), of_extra.shape[1] // block_size, key.shape[1] // block_size, query.device)
    of_extra, _ = listed(of_extra, *keys, *everything, scale, *place, False)
    of_extra = of_extra[:, :extra].unflatten(0, (batch, -1)).transpose(1, 2)
    return call.in_sequence(torch.cat([output, of_extra], dim=1))


def given_blocks(lists: BlockLists, batch: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Given lists as :func:`choose` returns those it finds, the extra blocks at the end of each.

    Args:
        lists: of the grid's blocks.
        batch: B.
        blocks: of the grid and of extra tokens.
    """
    entries, of_grid = lists.keys.expand(batch, -1, -1, -1), lists.blocks
    counts = (entries >= 0).sum(dim=-1)
    extra = torch.arange(of_grid, blocks, device=entries.device)
    width = max(1, entries.shape[-1] + len(extra))
    place = torch.arange(width, device=entries.device)
    # the grid's blocks come first, then the extra ones; what is behind them is not read
    behind = (of_grid + place - counts[..., None]).clamp(of_grid, max(of_grid, blocks - 1))
    padded = torch.nn.functional.pad(entries, (0, width - entries.shape[-1]))
    indices = torch.where(place < counts[..., None], padded, behind)
    group = torch.arange(batch * lists.heads, device=entries.device).view(batch, -1, 1, 1)
    indices = (indices.clamp_max(blocks - 1) + group * blocks).flatten(0, 2)
    bits = torch.nn.functional.pad(lists.mask(), (0, -of_grid % 32)).unflatten(-1, (-1, 32)).long()
    words = (bits << torch.arange(32, device=bits.device)).sum(dim=-1).expand(batch, -1, -1, -1).flatten(0, 2)
    counts = (counts + len(extra)).flatten()
    # numbers of 32 bits with the last one set are negative
    words = torch.where(words < 2**31, words, words - 2**32)
    return indices.int().contiguous(), counts.int(), words.int().contiguous()


def all_blocks(
    groups: int, query_blocks: int, key_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and counts of lists that hold all blocks of their group."""
    everything = torch.arange(groups * key_blocks, dtype=torch.int32, device=device).view(groups, 1, key_blocks)
    indices = everything.expand(-1, query_blocks, -1).flatten(0, 1).contiguous()
    return indices, torch.full_like(indices[:, 0], key_blocks)


@torch.library.custom_op(
    "mhla_diffusers::fit_bias",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor near, Tensor near_lse, Tensor far, "
    f"Tensor far_lse, float scale, {GRID}) -> Tensor",
)
def fit_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    near: torch.Tensor,
    near_lse: torch.Tensor,
    far: torch.Tensor,
    far_lse: torch.Tensor,
    scale: float,
    grid: Sequence[int],
    block_size: int,
    extra: int,
) -> torch.Tensor:
    """β with which the two branches come closest to softmax attention, of the β tried: float32 (G,).

    The queries are those of :func:`mhla_diffusers.attention.sparse.fit_pooled_bias`.
    """
    layout = layout_for(grid, block_size, extra, query.device)
    some, samples = fitting_rows(math.prod(grid), query.device), 1 if bias is None else len(bias)
    of_query, of_key, of_value = (x.unflatten(0, (samples, -1)) for x in (query[:, some], key, value))
    mask = None
    if bias is not None or int(layout.order.shape[0]) != math.prod(grid) + extra:
        # padding is left out, of which there is none where a block size divides the tokens
        weights = bias if bias is not None else _padding_bias(tuple(grid), block_size, extra, query.device)
        mask = weights[:, None, None].to(query.dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    truth = attend(of_query, of_key, of_value, attn_mask=mask, scale=scale).flatten(0, 1).float()
    near, far = near[:, some].float(), far[:, some].float()
    return best_bias(truth, near, near_lse[:, some], far, far_lse[:, some])


@fit_bias.register_fake
def _bias_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[:1], dtype=torch.float32)


@lru_cache(maxsize=64)
def _padding_bias(grid: Shape, block_size: int, extra: int, device: torch.device) -> torch.Tensor:
    """(1, R): −∞ for rows without a token."""
    return (layout_of(grid, block_size, extra).order >= 0).float().log()[None].to(device)


def _merged(
    call: Call,
    block_size: int,
    listed: torch.Tensor,
    lse: torch.Tensor,
    pooled: torch.Tensor | None,
    pooled_lse: torch.Tensor | None,
) -> torch.Tensor:
    """All branches under one denominator in PyTorch operations: without MHLA, or with RoPE after the feature map."""
    output = listed.float()
    if pooled is not None and pooled_lse is not None:
        share = torch.sigmoid(pooled_lse - lse)[..., None]
        output = (1 - share) * output + share * pooled.float()
        lse = torch.logaddexp(lse, pooled_lse)
    batch = len(call.query)
    of_blocks = (x.unflatten(1, (-1, block_size)).unflatten(0, (batch, -1)) for x in (output, lse[..., None]))
    output, lse = (in_order(x, call.grid, block_size) for x in of_blocks)
    if call.linear_weight is not None:
        all_else = linear_branch(call)
        far, normaliser = linear_read(all_else, linear_states(all_else))
        log_far = (call.linear_weight.float()[:, None] * normaliser).log()
        output = under_common_sum(output, lse, far.float(), log_far)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


_OWN_BLOCK_SIZES = 16, 64
"""The least and the most rows of a block of which a frame block is cut."""


def own_block_attention(call: Call) -> Own:
    """What a query takes from its own frame block, by lists that name all of it.

    MHLA within the own block, which causal attention by token has, is PyTorch operations on all devices.
    """
    if call.linear_weight is None:
        return own_block_of_features(call)
    return joined([_of_blocks(call, blocks.stop - blocks.start, tokens) for blocks, tokens in block_runs(call)])


def _of_blocks(call: Call, count: int, tokens: slice) -> Own:
    """Attend within so many equally long frame blocks, each a sequence of its own."""
    batch, _, heads, head_dim = call.query.shape
    device, is_causal = call.query.device, call.causal == "token"
    length = (tokens.stop - tokens.start) // count
    block_size = min(max(_OWN_BLOCK_SIZES[0], 1 << (length - 1).bit_length()), _OWN_BLOCK_SIZES[1])
    place = [length], block_size, 0

    def by_block(x: torch.Tensor) -> torch.Tensor:
        return x[:, tokens].unflatten(1, (count, -1)).flatten(0, 1)

    table, mask = rotary_table(call.rotary), None
    if table is not None:
        table = by_block(table.float().detach().expand(batch, -1, -1, -1)).contiguous()
    if call.key_mask is not None:
        mask = by_block(call.key_mask.float()).contiguous()
    query, key, value = (by_block(usable(x, "query")) for x in (call.query, call.key, call.value))
    query, key, value, *_ = prepare(query, key, value, table, mask, *place)
    bias = None if mask is None else block_weights(key.detach(), mask, *place)[0]
    groups, blocks = len(query), query.shape[1] // block_size
    indices, counts = all_blocks(groups, blocks, blocks, device)
    if is_causal:
        counts = torch.arange(groups * blocks, dtype=torch.int32, device=device) % blocks + 1
    output, lse = listed(query, key, value, bias, indices, counts, head_dim**-0.5, *place, is_causal)
    of_blocks = (x.view(-1, heads, blocks, block_size, x.shape[-1]) for x in (output.float(), lse[..., None]))
    output, lse = (in_order(x, *place[:2]).unflatten(0, (batch, count)).flatten(1, 2) for x in of_blocks)
    return output, lse
