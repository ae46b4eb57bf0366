"""Softmax attention over chosen tiles of keys, all other tiles taking part through their means, in PyTorch operations.

For a query of head h in tile a, R its exact tiles, s_t = q · k_t / √D after RoPE, and for every other tile c of n_c
tokens the means k̄_c and v̄_c::

    o = [ Σ_{t∈R} exp(s_t) v_t + Σ_{c∉R} n_c exp(β_h + q · k̄_c / √D) v̄_c ] / [ the same without v ]

The logarithm of the denominator comes with the output, so that :mod:`mhla_diffusers.attention.merge` can put the far
field under the same denominator.
"""

import torch

from .call import Call
from .eager import sum_dtype, without_autocast
from .rotary import apply_rotary
from .tile_attention import flat_lists, tile_attention
from .tiles import ExactTiles, places_of_tokens, tokens_of_tiles


def exact_attention(call: Call, tiles: ExactTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the exact tiles and, where the call has ``mean_bias``, to the means of the others.

    Returns:
        Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), both in float32 (float64 for float64 inputs). A
        query that attends to nothing gets 0 and the lowest finite number.
    """
    device, dtype = call.query.device, sum_dtype(call.query.dtype)
    tokens, exists = (x.to(device) for x in tokens_of_tiles(call.grid, tiles.counts))
    with without_autocast(device):
        query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
        if call.rotary is not None:
            query, key = (apply_rotary(x, call.rotary.to(dtype)) for x in (query, key))
        query, key, value = (_in_tiles(x, tokens) for x in (query * query.shape[-1] ** -0.5, key, value))
        weight = exists.to(dtype)[None]
        if call.key_mask is not None:
            weight = weight * call.key_mask.to(dtype)[:, tokens]
        means = tile_means(key, value, weight) if call.mean_bias is not None else None
        if means is not None and call.mean_bias is not None:
            mean_key, mean_value, log_count = means
            means = mean_key, mean_value, log_count + call.mean_bias.to(dtype)[:, None]
        output, log_sum = tile_attention(query, key, value, weight.log(), *(means or (None,) * 3), *flat_lists(tiles))
        places = places_of_tokens(call.grid, tiles.counts).to(device)
        output, log_sum = (x.flatten(2, 3)[:, :, places].transpose(1, 2) for x in (output, log_sum[..., None]))
    return output, log_sum


def _in_tiles(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) to (B, H, T, L, D) for tokens (T, L)."""
    return x.index_select(1, tokens.flatten()).unflatten(1, tokens.shape).permute(0, 3, 1, 2, 4).contiguous()


def tile_means(
    key: torch.Tensor, value: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean key and value (B, H, T, D) of every tile, and the log of its number of tokens (1 or B, 1, T).

    Args:
        key: (B, H, T, L, D).
        value: (B, H, T, L, D).
        weight: (1 or B, T, L), of every token in its tile.
    """
    count = weight.sum(dim=-1)
    shares = (weight / count.clamp_min(torch.finfo(weight.dtype).tiny)[..., None])[:, None, :, :, None]
    return (shares * key).sum(dim=3), (shares * value).sum(dim=3), count.log()[:, None]
