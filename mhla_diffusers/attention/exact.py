"""Softmax attention over chosen tiles of keys, all other tiles taking part through their means, in PyTorch operations.

For a query of head h in tile a, R its exact tiles, s_t = q · k_t / √D after RoPE, and for every other tile c of n_c
tokens the means k̄_c and v̄_c::

    o = [ Σ_{t∈R} exp(s_t) v_t + Σ_{c∉R} n_c exp(β_h + q · k̄_c / √D) v̄_c ] / [ the same without v ]

Extra tokens are tiles that every list holds, and of their queries R is everything. The logarithm of the
denominator comes with the output, so that :mod:`mhla_diffusers.attention.merge` can put the far field under the same
denominator.
"""

import torch

from .call import Call
from .eager import sum_dtype, without_autocast
from .rotary import rotated
from .tile_attention import tile_attention
from .tiles import (
    BlockLists,
    in_tiles,
    lists_with_extra,
    places_of_tokens,
    tile_means,
    blocks_of_extra,
    tokens_of_tiles,
)


def exact_attention(call: Call, tiles: BlockLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the exact tiles and, where the call has ``pooled_bias``, to the means of the others.

    Returns:
        Output (B, N + n, H, D) and log of the sum of weights (B, N + n, H, 1), both in float32 (float64 for float64
        inputs), those of the n extra tokens last. A query that attends to nothing gets 0 and the lowest
        finite number.
    """
    device, dtype = call.query.device, sum_dtype(call.query.dtype)
    extra = 0 if call.extra is None else call.extra.count
    tokens, exists = (x.to(device) for x in tokens_of_tiles(call.grid, tiles.counts, extra))
    with without_autocast(device):
        table = call.rotary_of_tokens
        query, key = (rotated(x.to(dtype), table) for x in (call.query, call.key))
        value, mask, lists = call.value.to(dtype), call.key_mask, (tiles.offsets, tiles.keys)
        if call.extra is not None:
            query, key, value, mask = call.extra.after(query, key, value, mask)
            lists = lists_with_extra(tiles, blocks_of_extra(call.grid, tiles.counts, extra))
        scaled = query * query.shape[-1] ** -0.5
        query, key, value = (in_tiles(x, tokens).contiguous() for x in (scaled, key, value))
        weight = exists.to(dtype)[None]
        if mask is not None:
            weight = weight * mask.to(dtype)[:, tokens]
        means = _biased_means(key, value, weight, call.pooled_bias)
        output, log_sum = tile_attention(query, key, value, weight.log(), *means, *lists)
        places = places_of_tokens(call.grid, tiles.counts, extra).to(device)
        output, log_sum = (x.flatten(2, 3)[:, :, places].transpose(1, 2) for x in (output, log_sum[..., None]))
    return output, log_sum


def _biased_means(
    key: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The last three arguments of :func:`tile_attention` before the lists; None without β."""
    if bias is None:
        return None, None, None
    mean_key, mean_value, log_count = tile_means(key, value, weight)
    return mean_key, mean_value, log_count + bias.to(key.dtype)[..., None]
