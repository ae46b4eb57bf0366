"""Block-sparse softmax attention over tiles that are gathered already, forward and backward, as PyTorch operators.

Operators, since lists of tiles differ in length, which torch.compile need not know; and the backward pass forms the
weights anew, so that none are kept. T tiles of at most L tokens; B batch, H heads, D head dim, S 1 or B.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .eager import without_autocast
from .tiles import mask_of_lists

_LOGITS = 2**22
"""Logits that are formed at once."""
_PADDING = 1.25
"""Lists that differ in length by less than this factor are worked through together."""
_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? mean_key, Tensor? mean_value, Tensor? pooled_bias"
)
_LISTS = "Tensor offsets, Tensor keys, Tensor? places=None"


@dataclass(frozen=True)
class _Tiled:
    """The operator's tensors, with heads and tiles, and samples where each has lists of its own, as one axis."""

    query: torch.Tensor
    """(B, R, L, D), scaled."""
    key: torch.Tensor
    value: torch.Tensor
    """Both (B, K, L, D)."""
    bias: torch.Tensor
    """(B, K, L): log of a key's weight, −∞ where there is no token."""


@dataclass(frozen=True)
class _Rows:
    """Some query tiles and their lists, padded to one width."""

    rows: torch.Tensor
    """int64 (rows,): where on the axis R the query tiles stand."""
    lists: torch.Tensor
    """int64 (rows, width): where on the axis K the key tiles stand."""
    exists: torch.Tensor
    """bool (rows, width)."""


@torch.library.custom_op(
    "mhla_diffusers::tile_attention", mutates_args=(), schema=f"({_TENSORS}, {_LISTS}) -> (Tensor, Tensor)"
)
def tile_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mean_key: torch.Tensor | None,
    mean_value: torch.Tensor | None,
    pooled_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to listed tiles, and to the means of those that are not.

    Args:
        query: (B, H, Q, L, D), scaled, of Q query tiles: all T, or with ``places`` some of them.
        key: (B, H, T, L, D); with ``places`` (B / S, K, L, D), K tiles of any head and sample.
        value: like ``key``.
        bias: (1 or B, T, L), log of a key's weight, −∞ where there is no token; takes no gradient. With ``places``
            (B / S, K, L).
        mean_key: (B, H, T, D); None to leave other tiles out.
        mean_value: (B, H, T, D).
        pooled_bias: (1 or B, H, T), added to the logit of a mean.
        offsets: int64 (S H Q + 1,), as of :class:`mhla_diffusers.attention.tiles.BlockLists`.
        keys: int64 (pairs,), of the same.
        places: int64 (pairs,), which of the K tiles of keys each pair's is; None where keys stand by head and tile.

    Returns:
        Output (B, H, Q, L, D), and the log of the sum of weights (B, H, Q, L).
    """
    tiled = _flatten(query, key, value, bias, offsets)
    output = torch.zeros_like(tiled.query)
    log_sum = torch.full_like(output[..., 0], torch.finfo(output.dtype).min)
    for some in _groups(tiled, query.shape[2], offsets, keys, places):
        logits, _, values = _logits(tiled, some)
        output[:, some.rows], log_sum[:, some.rows] = _softmax(logits, values)
    output, log_sum = output.view(query.shape), log_sum.view(query.shape[:-1])
    if mean_key is not None and mean_value is not None and pooled_bias is not None:
        others = _others(query, mean_key, offsets, keys)
        for here in _some_tiles(query, mean_key):
            of_means = _mean_logits(query[here], mean_key[here[:2]], pooled_bias, others, here)
            mean_output, mean_sum = (
                x.view_as(y[here])
                for x, y in zip(_softmax(of_means, mean_value[here[:2]]), (output, log_sum), strict=True)
            )
            output[here] = torch.lerp(mean_output, output[here], (log_sum[here] - mean_sum).sigmoid()[..., None])
            log_sum[here] = torch.logaddexp(log_sum[here], mean_sum)
    return output, log_sum


@torch.library.custom_op(
    "mhla_diffusers::tile_attention_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor sum_gradient, Tensor output, Tensor log_sum, {_TENSORS}, {_LISTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def tile_attention_backward(
    output_gradient: torch.Tensor,
    sum_gradient: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mean_key: torch.Tensor | None,
    mean_value: torch.Tensor | None,
    pooled_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, mean_key, mean_value and pooled_bias; those of means are empty without them."""
    # a weight p takes the gradient p (do · v − shift)
    shift = ((output_gradient * output).sum(dim=-1) - sum_gradient)[..., None]
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    tiled = _flatten(query, key, value, bias, offsets)
    gradients, shifts, sums, to_query = (
        x.reshape(*tiled.query.shape[:3], -1) for x in (output_gradient, shift, log_sum[..., None], of_query)
    )
    to_key, to_value = (x.view(tiled.key.shape) for x in (of_key, of_value))
    for some in _groups(tiled, query.shape[2], offsets, keys, places):
        logits, tokens, values = _logits(tiled, some)
        weights = (logits - sums[:, some.rows]).exp_()
        gradient = gradients[:, some.rows]
        of_logits = weights * (gradient @ values.mT - shifts[:, some.rows])
        to_query[:, some.rows] = of_logits @ tokens
        pairs, shape = some.lists.flatten(), (-1, *tiled.query.shape[2:])
        to_key.index_add_(1, pairs, (of_logits.mT @ tiled.query[:, some.rows]).reshape(len(to_key), *shape))
        to_value.index_add_(1, pairs, (weights.mT @ gradient).reshape(len(to_key), *shape))
    if mean_key is None or mean_value is None or pooled_bias is None:
        return of_query, of_key, of_value, *(query.new_empty(0) for _ in range(3))
    of_mean_key, of_mean_value = torch.zeros_like(mean_key), torch.zeros_like(mean_value)
    of_pooled_bias = mean_key.new_zeros(mean_key.shape[:-1])
    others = _others(query, mean_key, offsets, keys)
    for here in _some_tiles(query, mean_key):
        heads = here[:2]
        logits = _mean_logits(query[here], mean_key[heads], pooled_bias, others, here)
        queries, gradient, sums, shifts = (
            x[here].flatten(2, 3) for x in (query, output_gradient, log_sum[..., None], shift)
        )
        weights = (logits - sums).exp_()
        of_logits = weights * (gradient @ mean_value[heads].mT - shifts)
        of_query[here] += (of_logits @ mean_key[heads]).view_as(query[here])
        of_mean_key[heads] += of_logits.mT @ queries
        of_mean_value[heads] += weights.mT @ gradient
        of_pooled_bias[heads] += of_logits.sum(dim=2)
    return of_query, of_key, of_value, of_mean_key, of_mean_value, of_pooled_bias.sum_to_size(pooled_bias.shape)


def _flatten(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor
) -> _Tiled:
    batch, heads, tiles, length, head_dim = query.shape
    rows = len(offsets) - 1
    batch = batch * heads * tiles // rows
    shape = (batch, rows, length, head_dim)
    if key.ndim == 4:  # of tiles that stand in any place
        return _Tiled(query.reshape(shape), key, value, bias)
    bias = bias[:, None].expand(*query.shape[:-1]).reshape(shape[:-1])
    return _Tiled(query.reshape(shape), key.reshape(shape), value.reshape(shape), bias)


def _groups(
    tiled: _Tiled, tiles: int, offsets: torch.Tensor, keys: torch.Tensor, places: torch.Tensor | None
) -> Iterator[_Rows]:
    """All query tiles that have a list, a few of similar lengths at a time."""
    lengths = offsets.diff()
    batch, _, length, _ = tiled.query.shape
    longest = int(lengths.max())
    while longest > 0:
        shortest = math.floor(longest / _PADDING)
        rows = ((lengths > shortest) & (lengths <= longest)).nonzero().flatten()
        for some in rows.split(max(1, _LOGITS // (batch * length**2 * longest))):
            place = torch.arange(longest, device=keys.device)
            exists = place < lengths[some][:, None]
            pairs = (offsets[some][:, None] + place).clamp_max(len(keys) - 1)
            found = (some // tiles * tiles)[:, None] + keys[pairs] if places is None else places[pairs]
            yield _Rows(some, found.where(exists, 0), exists)
        longest = int(lengths.where(lengths <= shortest, 0).max())


def _logits(tiled: _Tiled, some: _Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (B, rows, L, width L), and the listed keys and values (B, rows, width L, D) side by side."""
    key, value = (x[:, some.lists].flatten(2, 3) for x in (tiled.key, tiled.value))
    bias = tiled.bias[:, some.lists].masked_fill(~some.exists[..., None], -math.inf).flatten(2)
    return (tiled.query[:, some.rows] @ key.mT).add_(bias[:, :, None]), key, value


def _softmax(logits: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log of the sum of weights; overwrites the logits."""
    finite = torch.finfo(logits.dtype)
    largest = logits.amax(dim=-1, keepdim=True).clamp_min_(finite.min)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True).clamp_min_(finite.tiny)
    return (weights @ value).div_(total), (largest + total.log()).squeeze(-1)


def _others(query: torch.Tensor, mean_key: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tiles of keys that are not listed: bool (1 or B, H, Q, T)."""
    return ~mask_of_lists(offsets, keys, mean_key.shape[2]).view(-1, *query.shape[1:3], mean_key.shape[2])


def _some_tiles(query: torch.Tensor, mean_key: torch.Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, heads and query tiles whose logits against all means are formed at once."""
    batch, heads, tiles, length, _ = query.shape
    means = mean_key.shape[2]
    heads_at_once = max(1, _LOGITS // (batch * tiles * means * length))
    tiles_at_once = max(1, _LOGITS // (batch * means * length))
    for head in range(0, heads, heads_at_once):
        for tile in range(0, tiles, tiles_at_once):
            yield slice(None), slice(head, head + heads_at_once), slice(tile, tile + tiles_at_once)


def _mean_logits(
    query: torch.Tensor,
    mean_key: torch.Tensor,
    pooled_bias: torch.Tensor,
    others: torch.Tensor,
    here: tuple[slice, slice, slice],
) -> torch.Tensor:
    """Logits (B, heads, tiles L, T) of means, −∞ for tiles that are attended to exactly."""
    bias = pooled_bias[here[:2]][:, :, None].masked_fill(~others[here], -math.inf)
    # one product of all tiles, since a broadcast one would copy the means for each
    logits = query.flatten(2, 3) @ mean_key.mT
    logits.view(*query.shape[:-1], -1).add_(bias[:, :, :, None])
    return logits


@tile_attention.register_fake
def _shapes(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1])


@tile_attention_backward.register_fake
def _backward_shapes(*arguments: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, _, *means = arguments[4:11]
    return tuple(query.new_empty(0) if x is None else torch.empty_like(x) for x in (query, key, value, *means))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs)


def _differentiate(ctx: Any, output_gradient: torch.Tensor, sum_gradient: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    with without_autocast(output_gradient.device):  # who calls backward() under autocast has it here too
        of_query, of_key, of_value, *of_means = tile_attention_backward(output_gradient, sum_gradient, *saved)
    return of_query, of_key, of_value, None, *(of_means if saved[6] is not None else (None,) * 3), None, None, None


tile_attention.register_autograd(_differentiate, setup_context=_save)


def _count_pairs(query: torch.Size, means: torch.Size | None, offsets: torch.Size, keys: torch.Size) -> int:
    """Queries times what they attend to, tokens and means; every tile counts as long as the longest.

    Args:
        query: (B, H, Q, L, D).
        means: (B, H, T, D); None without means.
        offsets: (S H Q + 1,).
        keys: (pairs,).
    """
    batch, heads, tiles, length, _ = query
    exact = keys[0] * batch * heads * tiles // (offsets[0] - 1) * length
    return length * (exact + (batch * heads * tiles * means[2] if means is not None else 0))


@register_flop_formula(torch.ops.mhla_diffusers.tile_attention)
def _flops(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    bias: torch.Size,
    mean_key: torch.Size | None,
    mean_value: torch.Size | None,
    pooled_bias: torch.Size | None,
    offsets: torch.Size,
    keys: torch.Size,
    places: torch.Size | None = None,
    **_: Any,
) -> int:
    """Of the forward, for PyTorch's counter: logits and sums of values."""
    return 4 * query[-1] * _count_pairs(query, mean_key, offsets, keys)


@register_flop_formula(torch.ops.mhla_diffusers.tile_attention_backward)
def _flops_backward(
    output_gradient: torch.Size,
    sum_gradient: torch.Size,
    output: torch.Size,
    log_sum: torch.Size,
    query: torch.Size,
    *inputs: Any,
    **_: Any,
) -> int:
    """Of the backward: logits anew, their gradients, and those of query, key and value, as PyTorch counts its own."""
    mean_key, offsets, keys = inputs[3], *inputs[6:8]
    return 10 * query[-1] * _count_pairs(query, mean_key, offsets, keys)
