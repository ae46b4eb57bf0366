"""The linear and the sparse branch on kernels: the functions of a backend, and the order in which operators run.

MHLA alone is block_states, mixing, which is a product of PyTorch, and read_states; processes that hold a share of the
tokens each add up their states between them. Beside block-sparse attention:

prepare        RoPE, order of the blocks and their means: (B, N, H, D) to rows (B H, R, D), once for all that follows
block_weights  weights of all rows and blocks, by the key mask
choose         the key blocks that every query block attends to, where no lists are given
listed         softmax over the keys of the listed blocks
pooled         softmax over the means of all other blocks
merge          listed and pooled keys alone, in raster order; or, with MHLA:
block_states   KV states of MHLA's blocks, from the tokens as they come
read_states    what queries read from the mixed states, merged with the two branches, in raster order

An operator takes the token grid as numbers and finds its tables inside, so that torch.compile never traces them, and
keeps them on the device, so that nothing waits for it.
"""

from typing import Any

import torch

from ..call import BlockLists, Call, ContentRule
from ..causal import Own, block_runs, joined
from ..causal import own_block as own_block_of_features
from ..layout import in_order
from ..linear import finish
from ..parallel.collectives import summed
from ..precision import product
from ..rope import rotary_table
from ..sparse import linear_branch, under_common_sum, with_lists
from .choose import choose
from .listed import listed
from .merge import merge
from .pooled import fit_bias, pooled
from .prepare import block_weights, prepare
from .read import read_states
from .states import block_states, states_dtype

_OWN_BLOCK_SIZES = 16, 64
"""Fewest and most rows of the blocks that a frame block is cut into."""
Branches = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Output (B H, R, D) and LSE (B H, R) of the listed keys, and of the pooled keys or None."""


def linear(call: Call) -> torch.Tensor:
    """MHLA alone: (B, N, H, D); over a ring of processes the states are summed."""
    if call.group is not None:
        return read(call, summed(states(call), call.group))[0]
    return _read(call, *_states(call))[0]


def states(call: Call) -> torch.Tensor:
    """Add up states of all blocks over the tokens of a call: float32 (B, H, M, D + normalize, D).

    The normaliser state is the last row.
    """
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def read(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mix the :func:`states` of all tokens and read them by the queries of a call.

    Returns:
        Output (B, N, H, D) and, with ``normalize``, normaliser float32 (B, N, H, 1). N tokens of the grid.
    """
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(states_dtype(call.query.dtype)), sums, call.normalize)
    return found if call.normalize else found[:1]


def sparse(call: Call) -> torch.Tensor:
    """Attend to the listed blocks, to the pooled keys of the others, and through MHLA to all.

    MHLA adds up its states over the tokens as they come. With ``rope="before"`` it is read by the rows of the queries
    that softmax has; with "after" by the tokens as they come, and the merge is PyTorch operations.

    Returns:
        (B, N, H, D); norm and gate leave extra tokens as they are.
    """
    call = call if isinstance(call.sparse, ContentRule) else with_lists(call)
    lists = call.sparse
    assert lists is not None
    tensors = [_usable(call.extra_last(x)) for x in (call.query, call.key, call.value)]
    table, mask, extra = rotary_table(call.rotary), call.key_mask, sum(call.extra)
    table = None if table is None else call.extra_last(table).float().contiguous().detach()
    mask = None if mask is None else call.extra_last(mask).float().contiguous()
    block_size, scale, batch = lists.block_size, call.query.shape[3] ** -0.5, len(call.query)
    grid, place = list(call.grid), (list(call.grid), lists.key_block_size, extra)
    rows = prepare(*tensors, table, mask, grid, block_size, *place[1:], lists.order == "content")
    (query, key, value), (pooled_query, pooled_key, pooled_value, spread), row_tokens = rows[:3], rows[3:7], rows[7]
    key_blocks = key.shape[1] // lists.key_block_size
    with torch.no_grad():
        bias, weight = block_weights(row_tokens, mask, *place)
        if isinstance(lists, BlockLists):
            indices, counts, bits = given_blocks(lists, batch, key_blocks)
        else:
            indices, counts, bits = choose(pooled_query, pooled_key, spread, weight, lists.density, scale, *place)
    of_grid = query[:, : pooled_query.shape[1] * block_size].contiguous()
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
        output = _merged(call, block_size, branches)
    else:
        output = _beside(call, of_grid.unflatten(0, (batch, -1)), block_size, branches)
    if not extra:
        return output
    of_extra = query[:, of_grid.shape[1] :].contiguous()
    everything = all_blocks(len(query), of_extra.shape[1] // block_size, key_blocks, query.device)
    of_extra, _ = listed(of_extra, *keys, *everything, scale, *place, False)
    of_extra = of_extra[:, :extra].unflatten(0, (batch, -1)).transpose(1, 2)
    return call.in_sequence(torch.cat([output, of_extra], dim=1))


def own_block(call: Call) -> Own:
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
    query, key, value = (by_block(_usable(x)) for x in (call.query, call.key, call.value))
    query, key, value, *_, row_tokens = prepare(query, key, value, table, mask, [length], block_size, *place[1:], False)
    bias = None if mask is None else block_weights(row_tokens, mask, *place)[0]
    groups, blocks = len(query), query.shape[1] // block_size
    indices, counts = all_blocks(groups, blocks, blocks, device)
    if is_causal:
        counts = torch.arange(groups * blocks, dtype=torch.int32, device=device) % blocks + 1
    output, lse = listed(query, key, value, bias, indices, counts, head_dim**-0.5, *place, is_causal)
    of_blocks = (x.view(-1, heads, blocks, block_size, x.shape[-1]) for x in (output.float(), lse[..., None]))
    output, lse = (in_order(x, *place[:2]).unflatten(0, (batch, count)).flatten(1, 2) for x in of_blocks)
    return output, lse


def _states(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    key, value = _usable(call.on_grid(call.key)), _usable(call.on_grid(call.value))
    states, sums = block_states(key, value, _mask(call), _angles(call), *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(
    call: Call, states: torch.Tensor, sums: torch.Tensor | None, with_normaliser: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    mixture = _mixed(call.mixing[..., call.own_blocks, :], states, sums)
    tensors = _usable(call.on_grid(call.query)), *mixture, *[None] * 5, *_norm_and_gate(call), _angles(call)
    output, normaliser = read_states(*tensors, *_place(call), with_normaliser)
    return output, normaliser


def _mixed(
    mixing: torch.Tensor, states: torch.Tensor, sums: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-Head Mixing: Σ_j m_ij S_j in the type of the states, and Σ_j m_ij z_j in float32.

    Args:
        mixing: (m, M) or (H, m, M), the rows of the blocks that are wanted; its gradient is added up in float32.
        states: (B, H, M, D, D).
        sums: float32 (B, H, M, D), or None.
    """
    mixing = mixing.float().expand(*states.shape[:2], -1, -1)
    mixture = product(mixing, states.flatten(3)).unflatten(3, states.shape[3:])
    return mixture, None if sums is None else product(mixing, sums)


def _place(call: Call, block_size: int = 0) -> tuple[Any, ...]:
    return list(call.grid), list(call.blocks), call.first, block_size, call.feature_map, call.eps, call.rope == "before"


def _mask(call: Call) -> torch.Tensor | None:
    return None if call.key_mask is None else call.on_grid(call.key_mask).float().contiguous()


def _angles(call: Call) -> torch.Tensor | None:
    table = rotary_table(call.rotary)
    return None if table is None else call.on_grid(table).float().contiguous().detach()


def _norm_and_gate(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    norm, gate = call.output_norm, call.output_gate
    return None if norm is None else norm.contiguous(), None if gate is None else gate.contiguous()


def _usable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` itself if its channels lie side by side, as the kernels read them; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _beside(call: Call, query: torch.Tensor, block_size: int, branches: Branches) -> torch.Tensor:
    """MHLA beside block-sparse attention under one denominator, with norm and gate, in raster order: (B, N, H, D).

    Args:
        call: whose mixing, λ and key mask weigh the linear branch; with normaliser.
        query: (B, H, R, D), rows of blocks after RoPE.
        block_size: of the blocks.
        branches: of all rows of the query.
    """
    alone = linear_branch(call)
    mixture = _mixed(alone.mixing, *_states(alone))
    weight = None if call.linear_weight is None else call.linear_weight.float()
    place = _place(call, block_size)
    return read_states(query, *mixture, *branches, weight, *_norm_and_gate(call), None, *place, False)[0]


def _merged(call: Call, block_size: int, branches: Branches) -> torch.Tensor:
    """All branches under one denominator without MHLA, or in PyTorch operations with RoPE after the feature map."""
    near, lse, far, far_lse = branches
    norm, gate = call.output_norm, call.output_gate
    if call.linear_weight is None and far is not None and far_lse is not None:
        output = merge(near, lse, far, far_lse, list(call.grid), block_size, call.query.shape[2])
        return finish(output.float(), norm, gate).to(output.dtype) if norm is not None or gate is not None else output
    output = near.float()
    if far is not None and far_lse is not None:
        share = torch.sigmoid(far_lse - lse)[..., None]
        output = (1 - share) * output + share * far.float()
        lse = torch.logaddexp(lse, far_lse)
    of_blocks = (x.unflatten(1, (-1, block_size)).unflatten(0, (len(call.query), -1)) for x in (output, lse[..., None]))
    output, lse = (in_order(x, call.grid, block_size) for x in of_blocks)
    if call.linear_weight is not None:
        all_else = linear_branch(call)
        linear, normaliser = read(all_else, states(all_else))
        log_linear = (call.linear_weight.float()[:, None] * normaliser).log()
        output = under_common_sum(output, lse, linear.float(), log_linear)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def given_blocks(lists: BlockLists, batch: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Given lists as :func:`choose` returns those it finds, the extra blocks at the end of each.

    Args:
        lists: of the grid's blocks.
        batch: B.
        blocks: of the grid and of extra tokens.
    """
    of_grid = lists.key_blocks
    # ascending, with -1 at the end
    entries = torch.where(lists.keys < 0, of_grid, lists.keys).sort(dim=-1).values
    entries = entries.where(entries < of_grid, -1).expand(batch, -1, -1, -1)
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
    bits = torch.nn.functional.pad(lists.mask(), (0, -of_grid % 32)).unflatten(-1, (-1, 32)).int()
    words = (bits << torch.arange(32, device=bits.device)).sum(dim=-1, dtype=torch.int32)
    counts = (counts + len(extra)).flatten()
    words = words.expand(batch, -1, -1, -1).flatten(0, 2).contiguous()
    return indices.int().contiguous(), counts.int(), words


def all_blocks(
    groups: int, query_blocks: int, key_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and counts of lists that hold all blocks of their group."""
    everything = torch.arange(groups * key_blocks, dtype=torch.int32, device=device).view(groups, 1, key_blocks)
    indices = everything.expand(-1, query_blocks, -1).flatten(0, 1).contiguous()
    return indices, torch.full_like(indices[:, 0], key_blocks)
