"""What a query takes from its own frame block by the kernels of block-sparse attention, whose lists name all of it.

MHLA within the own block, which causal attention by token has, is PyTorch operations on all devices
(:mod:`mhla_diffusers.attention.own_block`).
"""

import torch

from ..call import Call
from ..own_block import Own, block_runs, joined, own_block_attention
from .sparse import listed, log_weights, prepare, raster_rows

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

    table, mask = call.rotary_of_tokens, None if call.key_mask is None else by_block(call.key_mask).contiguous()
    if table is not None:
        table = by_block(table.expand(batch, -1, -1, -1)).contiguous()
    query, key, value = (by_block(x) for x in (call.query, call.key, call.value))
    query, key, value, *_ = prepare(query, key, value, table, mask, *place)
    bias, _, _ = log_weights(mask, batch * count, *place, device)
    groups, blocks = len(query), query.shape[1] // block_size
    number = torch.arange(groups * blocks, dtype=torch.int32, device=device)
    indices = number.view(groups, 1, blocks).expand(-1, blocks, -1).flatten(0, 1).contiguous()
    counts = number % blocks + 1 if is_causal else torch.full_like(number, blocks)
    output, lse = listed(query, key, value, bias, indices, counts, head_dim**-0.5, *place, is_causal)
    rows = raster_rows((length,), block_size, device)
    in_order = (x[:, rows].unflatten(0, (batch, count, heads)) for x in (output.float(), lse[..., None]))
    output, lse = (x.transpose(2, 3).flatten(1, 2) for x in in_order)
    return output, lse
