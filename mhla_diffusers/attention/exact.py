"""Softmax attention over chosen tiles of keys, all other tiles taking part through their means, in PyTorch operations.

For a query of head h in tile a, R its exact tiles, s_t = q · k_t / √D after RoPE, and for every other tile c of n_c
tokens the means k̄_c and v̄_c::

    o = [ Σ_{t∈R} exp(s_t) v_t + Σ_{c∉R} n_c exp(β_h + q · k̄_c / √D) v̄_c ] / [ the same without v ]

The logarithm of the denominator comes with the output, so that :mod:`mhla_diffusers.attention.merge` can put the far
field under the same denominator. Lists of one length are worked through together, head by head.
"""

import math
from dataclasses import dataclass

import torch

from .call import Call
from .eager import sum_dtype, without_autocast
from .rotary import apply_rotary
from .tiles import ExactTiles, tokens_of_tiles

_SCORES = 2**22
"""Logits that are formed at once."""


@dataclass(frozen=True)
class _Tiled:
    """One head's queries, keys and values in tiles; T tiles of at most L tokens."""

    query: torch.Tensor
    """(B, T, L, D), scaled."""
    key: torch.Tensor
    """(B, T, L, D)."""
    value: torch.Tensor
    """(B, T, L, D)."""
    bias: torch.Tensor
    """(1 or B, T, L): log of a key's weight, −∞ where there is no token."""
    means: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """k̄ (B, T, D), v̄ (B, T, D) and log n + β (B, T) of every tile; None to leave the others out."""


def exact_attention(call: Call, tiles: ExactTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the exact tiles and, where the call has ``mean_bias``, to the means of the others.

    Returns:
        Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), both in float32 (float64 for float64 inputs). A
        query that attends to nothing gets 0 and the lowest finite number.
    """
    tokens, exists = (x.to(call.query.device) for x in tokens_of_tiles(call.grid, tiles.counts))
    outputs = []
    with without_autocast(call.query.device):
        for head in range(call.query.shape[2]):
            rows = tiles.offsets[head * len(tokens) : (head + 1) * len(tokens) + 1]
            outputs.append(_attend_head(_in_tiles(call, head, tokens, exists), rows, tiles.keys))
    order = tokens[exists].argsort()
    output, log_sum = (torch.stack(parts, dim=-2)[:, exists][:, order] for parts in zip(*outputs, strict=True))
    return output, log_sum


def _in_tiles(call: Call, head: int, tokens: torch.Tensor, exists: torch.Tensor) -> _Tiled:
    dtype = sum_dtype(call.query.dtype)
    query, key, value = (x[:, :, head].to(dtype) for x in (call.query, call.key, call.value))
    if call.rotary is not None:
        table = call.rotary[:, :, 0].to(dtype)
        query, key = apply_rotary(query, table), apply_rotary(key, table)
    query, key, value = (x[:, tokens] for x in (query * query.shape[-1] ** -0.5, key, value))
    weight = exists.to(dtype)[None]
    if call.key_mask is not None:
        weight = weight * call.key_mask.to(dtype)[:, tokens]
    means = None
    if call.mean_bias is not None:
        count = weight.sum(dim=-1)
        shares = (weight / count.clamp_min(torch.finfo(dtype).tiny)[..., None])[..., None]
        means = ((shares * key).sum(dim=2), (shares * value).sum(dim=2), count.log() + call.mean_bias[head].to(dtype))
    return _Tiled(query, key, value, weight.log(), means)


def _attend_head(tiled: _Tiled, offsets: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, T, L, D) and log of the sum of weights (B, T, L, 1) of one head."""
    lengths = offsets.diff()
    done, pieces = [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        at_once = max(1, _SCORES // (tiled.query.shape[0] * tiled.query.shape[2] ** 2 * max(1, length)))
        for some in rows.split(at_once):
            lists = keys[offsets[some][:, None] + torch.arange(length, device=keys.device)]
            done.append(some)
            pieces.append(_attend_rows(tiled, some, lists))
    order = torch.cat(done).argsort()
    output, log_sum = (torch.cat(parts, dim=1)[:, order] for parts in zip(*pieces, strict=True))
    return output, log_sum


def _attend_rows(tiled: _Tiled, rows: torch.Tensor, lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of some query tiles (R,), each with its list of key tiles (R, length)."""
    query = tiled.query[:, rows]
    # (B, R, length · L, D): the tokens of a list of tiles side by side
    key, value = (x[:, lists].flatten(2, 3) for x in (tiled.key, tiled.value))
    logits = query @ key.mT + tiled.bias[:, lists].flatten(2)[:, :, None]
    if tiled.means is not None:
        mean_key, mean_value, count = tiled.means
        others = torch.ones(len(rows), mean_key.shape[1], dtype=torch.bool, device=rows.device)
        others.scatter_(1, lists, False)
        of_means = query @ mean_key[:, None].mT + count[:, None, None]
        logits = torch.cat([logits, of_means.masked_fill(~others[None, :, None], -math.inf)], dim=-1)
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[-1] == 0:
        return torch.zeros_like(query), torch.full_like(query[..., :1], lowest)
    largest = logits.detach().amax(dim=-1, keepdim=True).clamp_min(lowest)
    weights = (logits - largest).exp()
    total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).tiny)
    output = weights[..., : key.shape[2]] @ value
    if tiled.means is not None:
        output = output + weights[..., key.shape[2] :] @ mean_value[:, None]
    return output / total, largest + total.log()
