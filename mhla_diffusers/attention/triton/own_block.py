"""What a query takes from its own frame block by the kernels of block-sparse attention, whose lists name all of it.

MHLA within the own block, which causal attention by token has, is PyTorch operations on all devices
(:mod:`mhla_diffusers.attention.own_block`).
"""

import torch

from ..call import Call
from ..own_block import Own, block_runs, joined, own_block_attention
from ..sparse import in_order
from .sparse import all_blocks, listed, prepare, weights

_BLOCK_SIZES = 16, 64
"""The least and the most rows of a block."""


def triton_own_block_attention(call: Call) -> Own:
    """What :func:`mhla_diffusers.attention.own_block.own_block_attention` returns.

    Args:
        call: that :func:`mhla_diffusers.attention.triton.backend.usable_call` gave.
    """
    if call.linear_weight is None:
        return own_block_attention(call)
    return joined([_of_blocks(call, blocks.stop - blocks.start, tokens) for blocks, tokens in block_runs(call)])


def _of_blocks(call: Call, count: int, tokens: slice) -> Own:
    """Of so many equally long frame blocks, each a sequence of its own."""
    batch, _, heads, head_dim = call.query.shape
    device, is_causal = call.query.device, call.causal == "token"
    length = (tokens.stop - tokens.start) // count
    block_size = min(max(_BLOCK_SIZES[0], 1 << (length - 1).bit_length()), _BLOCK_SIZES[1])
    place = [length], block_size, 0

    def by_block(x: torch.Tensor) -> torch.Tensor:
        return x[:, tokens].unflatten(1, (count, -1)).flatten(0, 1)

    table, mask = call.rotary, None if call.key_mask is None else by_block(call.key_mask).contiguous()
    if table is not None:
        table = by_block(table.expand(batch, -1, -1, -1)).contiguous()
    query, key, value = (by_block(x) for x in (call.query, call.key, call.value))
    query, key, value, *_ = prepare(query, key, value, table, mask, *place)
    bias = None if mask is None else weights(key.detach(), mask, *place)[0]
    groups, blocks = len(query), query.shape[1] // block_size
    indices, counts = all_blocks(groups, blocks, blocks, device)
    if is_causal:
        counts = torch.arange(groups * blocks, dtype=torch.int32, device=device) % blocks + 1
    output, lse = listed(query, key, value, bias, indices, counts, head_dim**-0.5, *place, is_causal)
    of_blocks = (x.view(-1, heads, blocks, block_size, x.shape[-1]) for x in (output.float(), lse[..., None]))
    output, lse = (in_order(x, *place).unflatten(0, (batch, count)).flatten(1, 2) for x in of_blocks)
    return output, lse
