"""Exact tiles over a ring of processes, each of which holds tokens of the grid: PyTorch operations for every backend.

The formula is that of :mod:`mhla_diffusers.attention.exact`. A process attends with its own queries; keys and values of
the tiles that these need are fetched (:mod:`.tiles`), means are added up, extra tokens are everywhere
(:mod:`.softmax`).
"""

import math
from functools import lru_cache

import torch

from ..blocks import Shape
from ..call import Call
from ..eager import sum_dtype, without_autocast
from ..rotary import rotated
from ..tile_attention import tile_attention
from ..tiles import Cut, BlockLists, in_tiles, tokens_of_tiles
from .collectives import finished_sum, gathered, started_sum
from .softmax import attention_to_all, of_own, under_one_denominator
from .tiles import FetchPlan, OwnTiles, fetch_plan


def ring_exact_attention(call: Call, tiles: BlockLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the exact tiles and, where the call has ``pooled_bias``, to the means of the others.

    Keys are sent after RoPE in the type of the call.

    Returns:
        Output (B, N + n, H, D) and log of the sum of weights (B, N, H, 1), both in float32 (float64 for float64
        inputs), those of the n own extra tokens last. A query that attends to nothing gets 0 and the lowest
        finite number.
    """
    dtype, table = sum_dtype(call.query.dtype), call.rotary_of_tokens
    with without_autocast(call.query.device):
        query = rotated(call.query.to(dtype), table) * call.query.shape[-1] ** -0.5
        key, value = rotated(call.key, table), call.value
        # lists that are empty for all, beside extra tokens, hold nothing that must be looked at
        alone = call.extra is not None and not len(tiles.keys) and call.pooled_bias is None
        parts = [] if alone else [_tiles(call, tiles, query, key)]
        key, value = key.to(dtype), value.to(dtype)
        others = call.extra
        if others is None:
            return parts[0]
        other_key, other_value = others.key.to(dtype), others.value.to(dtype)
        parts.append(attention_to_all(query, other_key, other_value, others.key_mask))
        output, log_sum = parts[0] if alone else under_one_denominator(*parts)
        own, mask = others.own, call.key_mask
        if mask is not None and others.key_mask is not None:
            mask = torch.cat([mask, others.key_mask[:, own].to(mask.dtype)], dim=1)
        from_here = attention_to_all(
            others.query.to(dtype) * call.query.shape[-1] ** -0.5,
            torch.cat([key, other_key[:, own]], dim=1),
            torch.cat([value, other_value[:, own]], dim=1),
            mask,
        )
        return torch.cat([output, of_own(*from_here, others, call.process_group)], dim=1), log_sum


def _tiles(call: Call, tiles: BlockLists, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of exact tiles and means, given query, scaled, and key after RoPE."""
    plan, dtype = fetch_plan(tiles, call.grid, call.shares, call.rank), query.dtype
    weight = _weights(call, tiles, dtype)
    near = torch.cat([key, call.value], dim=-1)
    means = None if call.pooled_bias is None else _started_means(call, near.to(dtype), weight, plan.own)
    fetched_key, fetched_value = plan.fetch(near, tiles.samples, call.process_group).to(dtype).chunk(2, dim=-1)
    output, log_sum = tile_attention(
        in_tiles(query, plan.own.tokens).contiguous(),
        fetched_key.contiguous(),
        fetched_value.contiguous(),
        _of_fetched(weight, plan, tiles.samples, len(call.query)).log(),
        *_finished_means(call, means, weight),
        plan.offsets,
        plan.keys,
        plan.key_places,
    )
    places = plan.own.places
    output, log_sum = (x.flatten(2, 3)[:, :, places].transpose(1, 2) for x in (output, log_sum[..., None]))
    return output, log_sum


@lru_cache(maxsize=64)
def _tokens_first(grid: Shape, cut: Cut, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`tokens_of_tiles` with the tokens of a tile first. Kept, since every layer and step asks for the same."""
    with torch.inference_mode(False):
        tokens, exists = tokens_of_tiles(grid, cut)
        # in raster order, as those that others send stand
        first = tokens.where(exists, math.prod(grid)).argsort(dim=1)
        return tokens.gather(1, first).to(device), exists.gather(1, first).to(device)


def _weights(call: Call, tiles: BlockLists, dtype: torch.dtype) -> torch.Tensor:
    """Of all keys of the grid in their tiles, (1 or B, T, L), tokens first, then 0."""
    tokens, exists = _tokens_first(call.grid, tiles.counts, call.query.device)
    weight, mask = exists.to(dtype)[None], call.key_mask
    if mask is None:
        return weight
    everyones = gathered(mask.mT, [count for _, count in call.shares], call.process_group).mT
    return weight * everyones.to(dtype)[:, tokens]


def _of_fetched(weight: torch.Tensor, plan: FetchPlan, samples: int, batch: int) -> torch.Tensor:
    """(1 or B / S, K, L) of (1 or B, T, L)."""
    by_sample = weight.expand(batch, -1, -1) if samples > 1 else weight
    by_sample = by_sample.unflatten(0, (samples, -1)).transpose(1, 2).flatten(0, 1)
    return by_sample.index_select(0, plan.tiles).transpose(0, 1)


def _started_means(call: Call, near: torch.Tensor, weight: torch.Tensor, own: OwnTiles) -> torch.Tensor:
    """What the own tokens, key and value (B, N, H, 2 D), bring to the mean of every tile: (B, H, T, 2 D)."""
    count = weight.sum(dim=-1).clamp_min(torch.finfo(weight.dtype).tiny)
    taking_part = own.exists.to(weight.dtype)[None]
    if call.key_mask is not None:
        taking_part = taking_part * call.key_mask.to(weight.dtype)[:, own.tokens]
    shares = (taking_part / count[:, own.tiles, None])[:, None, :, :, None]
    here = (shares * in_tiles(near, own.tokens)).sum(dim=3)
    everywhere = here.new_zeros(*here.shape[:2], weight.shape[1], here.shape[-1]).index_copy(2, own.tiles, here)
    return started_sum(everywhere, call.group)


def _finished_means(
    call: Call, started: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The last three arguments of :func:`tile_attention` before the lists; None without β."""
    if started is None or call.pooled_bias is None:
        return None, None, None
    mean_key, mean_value = finished_sum(started, call.group).chunk(2, dim=-1)
    bias = weight.sum(dim=-1).log()[:, None] + call.pooled_bias.to(weight.dtype)[..., None]
    return mean_key.contiguous(), mean_value.contiguous(), bias
