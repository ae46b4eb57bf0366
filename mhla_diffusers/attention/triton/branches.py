"""MHLA and sparse attention on kernels: the functions of a backend, and the order in which operators run.

MHLA is block_states, mixing, which is a product of PyTorch, and read_states. Sparse attention:

prepare         RoPE, order of the blocks, their means and states: (B, N, H, D) to rows (B H, R, D), once for all
                (then PyTorch: logits of means and the variance of scores, by two products, and what it gains them)
choose          the key blocks that every query block attends to, and the matrix that mixes the states of all others
listed          softmax over the keys of the listed blocks
pooled          softmax over the means of all other blocks
                (then PyTorch: the states are mixed, by one product)
fit             β and γ
merge           listed and pooled keys and what is read from the mixed states, in raster order

An operator takes the token grid as numbers and finds its tables inside, so that torch.compile never traces them, and
keeps them on the device, so that nothing waits for it.
"""

from typing import Any, NamedTuple

import torch

from ..blocks import in_order, list_length
from ..call import BlockLists, MHLACall, SparseCall
from ..causal import Own, block_runs, joined
from ..causal import own_block as own_block_of_features
from ..precision import finish, product
from ..rope import rotary_table
from ..sparse import log_gain
from .choose import choose
from .linear import block_states, read_states
from .listed import listed
from .merge import fit, merge
from .pooled import pooled
from .prepare import prepare
from .tiles import power_of_two, states_dtype

_LARGE = 1e30


def linear(call: MHLACall) -> torch.Tensor:
    """MHLA alone: (B, N, H, D)."""
    return _read(call, *_states(call))[0]


def states(call: MHLACall) -> torch.Tensor:
    """States of all blocks, and to normalise key sums as a last row: float32 (B, H, M, D + normalize, D)."""
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def read(call: MHLACall, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mix the :func:`states` of all tokens and read them: output, and to normalise normaliser (B, N, H, 1)."""
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(states_dtype(call.query.dtype)), sums)
    return found if call.normalize else found[:1]


def sparse(call: SparseCall) -> torch.Tensor:
    """Attend to listed blocks, and approximate the others: (B, N, H, D)."""
    rule, (batch, _, heads, head_dim) = call.sparse, call.query.shape
    rows, scale = _prepared(call), head_dim**-0.5
    place = list(call.grid), rule.key_block_size, sum(call.extra)
    mean_query, log_weight = scale * rows.pooled_query.float(), rows.weight.log()
    logits, variance = product(mean_query, rows.pooled_key.float().mT), product(mean_query.square(), rows.spread.mT)
    gain: torch.Tensor | None = None
    if call.far == "second-order":
        gain = log_gain(variance, log_weight[:, None])
        logits = logits + gain
    if isinstance(rule, BlockLists):
        given, most = bits_of(rule, batch), rule.keys.shape[-1]
    else:
        given, most = None, list_length(rule.density, rows.weight.shape[1])
    indices, counts, bits, mixing = choose(
        logits, variance.detach(), rows.weight, given, most, gain is not None, *place
    )
    query = rows.query[:, : rows.pooled_query.shape[1] * rule.block_size].contiguous()
    near, near_lse = listed(query, *rows.keys, indices, counts, scale, *place, False)
    far, far_lse = pooled(query, rows.pooled_key, rows.pooled_value, gain, log_weight, bits, scale)
    mixed: torch.Tensor | None = None
    if gain is not None:
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
    of_states = (None, None, None) if mixed is None else (query, mixed, gamma)
    output = merge(near, near_lse, far, far_lse, *of_states, scale, place[0], rule.block_size, heads)
    if not place[2]:
        return output
    query = rows.query[:, query.shape[1] :].contiguous()  # extra tokens attend to everything
    blocks = query.shape[1] // rule.block_size, rows.key.shape[1] // rule.key_block_size
    everything = all_blocks(len(query), *blocks, query.device)
    found, _ = listed(query, *rows.keys, *everything, scale, *place, False)
    found = found[:, : place[2]].unflatten(0, (batch, -1)).transpose(1, 2)
    return call.in_sequence(torch.cat([output, found], dim=1))


class _Rows(NamedTuple):
    """What :func:`.prepare.prepare` returns."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pooled_query: torch.Tensor
    pooled_key: torch.Tensor
    pooled_value: torch.Tensor
    spread: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor
    bias: torch.Tensor
    weight: torch.Tensor

    @property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys attended to exactly, with their bias if there is a mask."""
        return self.key, self.value, self.bias if self.bias.ndim == 2 else None


def _prepared(call: SparseCall) -> _Rows:
    tensors = [_usable(call.extra_last(x)) for x in (call.query, call.key, call.value)]
    table, mask, blocks = rotary_table(call.rotary), call.key_mask, call.sparse
    table = None if table is None else call.extra_last(table).float().contiguous().detach()
    mask = None if mask is None else call.extra_last(mask).float().contiguous()
    place = list(call.grid), *blocks.sizes, sum(call.extra)
    return _Rows(*prepare(*tensors, table, mask, *place, blocks.order == "content", call.far == "second-order"))


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
    block_size = min(power_of_two(length), 64)
    place = [length], block_size, 0

    def by_block(x: torch.Tensor) -> torch.Tensor:
        return x[:, tokens].unflatten(1, (count, -1)).flatten(0, 1)

    table = rotary_table(call.rotary)
    if table is not None:
        table = by_block(table.float().detach().expand(batch, -1, -1, -1)).contiguous()
    query, key, value = (by_block(_usable(x)) for x in (call.query, call.key, call.value))
    rows = _Rows(*prepare(query, key, value, table, None, [length], block_size, *place[1:], False, False))
    groups, blocks = len(rows.query), rows.query.shape[1] // block_size
    indices, counts = all_blocks(groups, blocks, blocks, device)
    if is_causal:
        counts = torch.arange(groups * blocks, dtype=torch.int32, device=device) % blocks + 1
    output, lse = listed(rows.query, *rows.keys, indices, counts, head_dim**-0.5, *place, is_causal)
    of_blocks = (x.view(-1, heads, blocks, block_size, x.shape[-1]) for x in (output.float(), lse[..., None]))
    output, lse = (in_order(x, *place[:2]).unflatten(0, (batch, count)).flatten(1, 2) for x in of_blocks)
    return output, lse


def _states(call: MHLACall) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask = None if call.key_mask is None else call.key_mask.float().contiguous()
    states, sums = block_states(_usable(call.key), _usable(call.value), mask, *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(call: MHLACall, states: torch.Tensor, sums: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix states and normaliser states, Σ_j m_ij S_j and Σ_j m_ij z_j, and read them: output and normaliser."""
    mixing = call.mixing[..., call.own_blocks, :].float().expand(*states.shape[:2], -1, -1)
    states = product(mixing, states.flatten(3)).unflatten(3, states.shape[3:])
    if sums is not None:
        sums = product(mixing, sums)
        if call.key_mask is not None:
            # a block that gives weight to masked keys alone reads 0, divided by something large
            sums = sums.masked_fill((sums == 0).all(dim=-1, keepdim=True), _LARGE)
    # without normaliser the output may pass the largest float16
    is_rounded = call.normalize and call.output_norm is None and call.output_gate is None
    output, normaliser = read_states(_usable(call.query), states, sums, *_place(call), not is_rounded)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype), normaliser


def _place(call: MHLACall) -> tuple[Any, ...]:
    """Angles and PLACE."""
    table = rotary_table(call.rotary)
    table = None if table is None else table.float().contiguous().detach()
    rope_before = call.rope == "before"
    return table, list(call.grid), list(call.blocks), call.first, call.feature_map, call.eps, rope_before


def _usable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if its channels are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def bits_of(lists: BlockLists, batch: int) -> torch.Tensor:
    """Given lists as the bits that :func:`choose` takes."""
    bits = torch.nn.functional.pad(lists.mask(), (0, -lists.key_blocks % 32)).unflatten(-1, (-1, 32)).int()
    words = (bits << torch.arange(32, device=bits.device)).sum(dim=-1, dtype=torch.int32)
    return words.expand(batch, -1, -1, -1).flatten(0, 2).contiguous()


def all_blocks(
    groups: int, query_blocks: int, key_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and counts of lists that hold all blocks of their group."""
    everything = torch.arange(groups * key_blocks, dtype=torch.int32, device=device).view(groups, 1, key_blocks)
    indices = everything.expand(-1, query_blocks, -1).flatten(0, 1).contiguous()
    return indices, torch.full_like(indices[:, 0], key_blocks)
