"""MHLA and sparse attention on kernels: the functions of a backend, and the order in which operators run.

MHLA alone is block_states, mixing, which is a product of PyTorch, and read_states; processes that hold a share of the
tokens each add up their states between them. Sparse attention:

prepare         RoPE, order of the blocks, their means and states: (B, N, H, D) to rows (B H, R, D), once for all
block_weights   weights of all rows and blocks, by the key mask
choose          the key blocks that every query block attends to, where no lists are given
listed          softmax over the keys of the listed blocks
variance        of the scores of every block, by one product of PyTorch, and what they gain by it
pooled          softmax over the means of all other blocks
content_mixing  the matrix that mixes the states of these blocks, by one product of PyTorch
fit             β and γ
merge           listed and pooled keys and what is read from the mixed states, in raster order

MHLA beside extra tokens is prepare, listed over the extra blocks, block_states, mixing, and read_states, which merges.

An operator takes the token grid as numbers and finds its tables inside, so that torch.compile never traces them, and
keeps them on the device, so that nothing waits for it.
"""

from typing import Any, NamedTuple

import torch

from ..blocks import in_order
from ..call import BlockLists, MHLACall, SparseCall, UniformBlocks
from ..causal import Own, block_runs, joined
from ..causal import own_block as own_block_of_features
from ..extra import ROWS, empty_lists, linear_branch
from ..layout import block_count
from ..linear import finish
from ..merge import under_common_sum
from ..precision import product
from ..rope import rotary_table
from ..sparse import log_gain
from .choose import choose
from .content_mixing import content_mixing
from .listed import listed
from .merge import merge
from .pooled import fit, pooled
from .prepare import block_weights, prepare
from .read import read_states
from .states import block_states
from .tiles import states_dtype

_LARGE = 1e30
_OWN_BLOCK_SIZES = 16, 64
"""Fewest and most rows of the blocks that a frame block is cut into."""


def linear(call: MHLACall) -> torch.Tensor:
    """MHLA alone: (B, N, H, D)."""
    return _read(call, *_states(call))[0]


def states(call: MHLACall) -> torch.Tensor:
    """Add up states of all blocks over the tokens of a call: float32 (B, H, M, D + normalize, D).

    The normaliser state is the last row.
    """
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def read(call: MHLACall, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mix the :func:`states` of all tokens and read them by the queries of a call.

    Returns:
        Output (B, N, H, D) and, with ``normalize``, normaliser float32 (B, N, H, 1). N tokens of the grid.
    """
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(states_dtype(call.query.dtype)), sums, call.normalize)
    return found if call.normalize else found[:1]


def sparse(call: SparseCall) -> torch.Tensor:
    """Attend to listed blocks, and approximate the others from means, spread and states.

    Returns:
        (B, N, H, D) in the type of the query.
    """
    rule, batch, scale = call.sparse, len(call.query), call.query.shape[3] ** -0.5
    rows = _prepared(call, rule, call.far == "second-order")
    place = list(call.grid), rule.key_block_size, sum(call.extra)
    key_blocks = rows.key.shape[1] // rule.key_block_size
    variance = product((scale * rows.pooled_query.float()).square(), rows.spread.mT)
    gain: torch.Tensor | None = None
    if call.far == "second-order":
        log_count = rows.weight.log().repeat_interleave(len(variance) // len(rows.weight), dim=0)
        gain = log_gain(variance, log_count[:, None])
    with torch.no_grad():
        if isinstance(rule, BlockLists):
            indices, counts, bits = given_blocks(rule, batch, key_blocks)
        else:
            of_blocks = rows.pooled_query, rows.pooled_key, variance, gain, rows.weight
            indices, counts, bits = choose(*of_blocks, rule.density, scale, *place)
    query = rows.query[:, : rows.pooled_query.shape[1] * rule.block_size].contiguous()
    near, near_lse = listed(query, *rows.keys, indices, counts, scale, *place, False)
    far, far_lse = pooled(query, rows.pooled_key, rows.pooled_value, gain, rows.weight.log(), bits, scale)
    mixed: torch.Tensor | None = None
    if gain is not None:
        means = rows.pooled_query, rows.pooled_key
        mixing = content_mixing(*means, gain, rows.weight, bits, scale, rule.key_block_size)
        mixed = product(mixing, rows.states.flatten(2)).unflatten(2, rows.states.shape[2:])
    if call.pooled_bias is None:
        with torch.no_grad():
            beta, gamma = fit(query, *rows.keys, near, near_lse, far, far_lse, mixed, scale, *place)
    else:
        beta, gamma = (
            torch.zeros_like(far_lse[:, 0]) if x is None else x.detach().float().expand(batch, -1).flatten()
            for x in (call.pooled_bias, call.state_weight)
        )
        gamma = gamma.contiguous()  # of one head it is a view with stride 0, which the kernel does not read
    far_lse = far_lse + beta[:, None]
    of_states = (None, None) if mixed is None else (mixed, gamma)
    output = merge(
        near, near_lse, far, far_lse, query, *of_states, scale, place[0], rule.block_size, call.query.shape[2]
    )
    return _with_extra(call, rows, output)


def beside_extra(call: MHLACall) -> torch.Tensor:
    """MHLA merged with softmax over the extra tokens, which attend to everything: (B, N, H, D).

    MHLA adds up its states over the tokens as they come. With ``rope="before"`` it is read by the rows of the queries
    that softmax has; with "after" by the tokens as they come, and the merge is PyTorch operations.
    """
    lists, batch, scale = empty_lists(call), len(call.query), call.query.shape[3] ** -0.5
    rows = _prepared(call, lists, False)
    place = list(call.grid), lists.key_block_size, sum(call.extra)
    indices, counts, _ = given_blocks(lists, batch, rows.key.shape[1] // lists.key_block_size)
    query = rows.query[:, : lists.blocks * lists.block_size].contiguous()
    near, lse = listed(query, *rows.keys, indices, counts, scale, *place, False)
    alone, ones = linear_branch(call), torch.ones(call.query.shape[2], device=query.device)
    weight = ones if call.linear_weight is None else call.linear_weight.float()
    if rotary_table(call.rotary) is None or call.rope == "before":
        mixture = _mixed(alone.mixing, *_states(alone))
        tensors = query.unflatten(0, (batch, -1)), *mixture, near, lse, weight, *_norm_and_gate(call), None
        output = read_states(*tensors, *_place(call, lists.block_size), False)[0]
    else:
        blocks = (
            x.unflatten(1, (-1, lists.block_size)).unflatten(0, (batch, -1)) for x in (near.float(), lse[..., None])
        )
        near, lse = (in_order(x, call.grid, lists.block_size) for x in blocks)
        linear, normaliser = read(alone, states(alone))
        merged = under_common_sum(near, lse, linear.float(), (weight[:, None] * normaliser).log())
        output = finish(merged, call.output_norm, call.output_gate).to(call.query.dtype)
    return _with_extra(call, rows, output)


class _Rows(NamedTuple):
    """What :func:`.prepare.prepare` returns, and the weights of keys and blocks."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pooled_query: torch.Tensor
    pooled_key: torch.Tensor
    pooled_value: torch.Tensor
    spread: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor
    bias: torch.Tensor | None
    """Logs of the weights of the key rows; None without a mask."""
    weight: torch.Tensor
    """Number of key blocks in the grid."""

    @property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What is attended to one by one."""
        return self.key, self.value, self.bias


def _prepared(call: MHLACall | SparseCall, blocks: UniformBlocks, with_states: bool) -> _Rows:
    """Rotate, order and pool query, key and value of a call, extra tokens last."""
    tensors = [_usable(call.extra_last(x)) for x in (call.query, call.key, call.value)]
    table, mask, extra = rotary_table(call.rotary), call.key_mask, sum(call.extra)
    table = None if table is None else call.extra_last(table).float().contiguous().detach()
    mask = None if mask is None else call.extra_last(mask).float().contiguous()
    grid, sizes = list(call.grid), blocks.sizes
    rows = prepare(*tensors, table, mask, grid, *sizes, extra, blocks.order == "content", with_states)
    with torch.no_grad():
        bias, weight = block_weights(rows[7], mask, grid, blocks.key_block_size, extra)
    return _Rows._make((*rows, None if mask is None else bias, weight))


def _with_extra(call: MHLACall | SparseCall, rows: _Rows, output: torch.Tensor) -> torch.Tensor:
    """Add the outputs of extra tokens, which attend to everything, to those of the grid's (B, tokens, H, D)."""
    extra = sum(call.extra)
    if not extra:
        return output
    sizes = call.sparse.sizes if isinstance(call, SparseCall) else (ROWS, ROWS)
    grid_rows = block_count(call.grid, sizes[0]) * sizes[0]
    query = rows.query[:, grid_rows:].contiguous()
    everything = all_blocks(len(query), query.shape[1] // sizes[0], rows.key.shape[1] // sizes[1], query.device)
    place = list(call.grid), sizes[1], extra
    found, _ = listed(query, *rows.keys, *everything, call.query.shape[3] ** -0.5, *place, False)
    found = found[:, :extra].unflatten(0, (len(call.query), -1)).transpose(1, 2)
    return call.in_sequence(torch.cat([output, found], dim=1))


def own_block(call: MHLACall) -> Own:
    """Attention within the own frame block, by lists of all its blocks.

    MHLA within the own block, which causal attention by token has, is PyTorch operations on all devices.
    """
    if call.linear_weight is None:
        return own_block_of_features(call)
    return joined([_of_blocks(call, blocks.stop - blocks.start, tokens) for blocks, tokens in block_runs(call)])


def _of_blocks(call: MHLACall, count: int, tokens: slice) -> Own:
    """Attend within frame blocks of equal length, each as its own sequence."""
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
    query, key, value, *_, row_tokens, _ = prepare(
        query, key, value, table, mask, [length], block_size, *place[1:], False, False
    )
    bias = None if mask is None else block_weights(row_tokens, mask, *place)[0]
    groups, blocks = len(query), query.shape[1] // block_size
    indices, counts = all_blocks(groups, blocks, blocks, device)
    if is_causal:
        counts = torch.arange(groups * blocks, dtype=torch.int32, device=device) % blocks + 1
    output, lse = listed(query, key, value, bias, indices, counts, head_dim**-0.5, *place, is_causal)
    of_blocks = (x.view(-1, heads, blocks, block_size, x.shape[-1]) for x in (output.float(), lse[..., None]))
    output, lse = (in_order(x, *place[:2]).unflatten(0, (batch, count)).flatten(1, 2) for x in of_blocks)
    return output, lse


def _states(call: MHLACall) -> tuple[torch.Tensor, torch.Tensor | None]:
    key, value = _usable(call.on_grid(call.key)), _usable(call.on_grid(call.value))
    states, sums = block_states(key, value, _mask(call), _angles(call), *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(
    call: MHLACall, states: torch.Tensor, sums: torch.Tensor | None, with_normaliser: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    mixed, mixed_sums = _mixed(call.mixing[..., call.own_blocks, :], states, sums)
    if mixed_sums is not None and call.key_mask is not None:
        # a block that gives weight to masked keys alone reads 0, divided by something large
        is_empty = (mixed_sums == 0).all(dim=-1, keepdim=True)
        mixed_sums = mixed_sums.masked_fill(is_empty, _LARGE)
    mixture = mixed, mixed_sums
    tensors = _usable(call.on_grid(call.query)), *mixture, None, None, None, *_norm_and_gate(call), _angles(call)
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


def _place(call: MHLACall, block_size: int = 0) -> tuple[Any, ...]:
    return list(call.grid), list(call.blocks), call.first, block_size, call.feature_map, call.eps, call.rope == "before"


def _mask(call: MHLACall) -> torch.Tensor | None:
    return None if call.key_mask is None else call.on_grid(call.key_mask).float().contiguous()


def _angles(call: MHLACall) -> torch.Tensor | None:
    table = rotary_table(call.rotary)
    return None if table is None else call.on_grid(table).float().contiguous().detach()


def _norm_and_gate(call: MHLACall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    norm, gate = call.output_norm, call.output_gate
    return None if norm is None else norm.contiguous(), None if gate is None else gate.contiguous()


def _usable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if its channels are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
