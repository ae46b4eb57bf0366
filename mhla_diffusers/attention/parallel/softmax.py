"""Softmax attention of some queries to all of some keys, of which others may hold more: extra tokens.

They are few, so who has them gives them to all processes of the ring. Their own queries attend to the tokens of every
process by that process, and what comes out is put under one denominator where it is due. What is sent grows with their
number, and not with that of the grid's tokens.
"""

from dataclasses import replace

import torch

from ..extra import ExtraTokens
from ..tile_attention import tile_attention
from .collectives import counts_of, exchanged, gathered
from .place import Group

_LENGTH = 64
"""Tokens that are worked on together, as many as fill one block of a matrix product."""


def of_everyone(own: ExtraTokens, group: Group, even: bool) -> ExtraTokens:
    """The extra tokens of all processes of the ring.

    Args:
        own: those of this process.
        group: the processes, each of which has at least one such token.
        even: whether all have as many.
    """
    counts = counts_of(own.count, group, even, own.key.device)

    def everyones(x: torch.Tensor) -> torch.Tensor:
        return gathered(x.movedim(1, 0), counts, group.name).movedim(0, 1)

    together = torch.cat([own.query, own.key, own.value.to(own.query.dtype)], dim=-1)
    query, key, value = everyones(together).chunk(3, dim=-1)
    mask = own.key_mask
    if mask is not None:
        mask = everyones(mask)
    return replace(own, query=query, key=key, value=value, key_mask=mask, counts=tuple(counts), rank=group.rank)


def attention_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys.

    Args:
        query: (B, Q, H, D), scaled.
        key: (B, K, H, D).
        value: (B, K, H, D).
        mask: (B, K), weights of the keys.

    Returns:
        Output (B, Q, H, D), and log of the sum of weights (B, Q, H, 1), as
        :func:`mhla_diffusers.attention.exact.exact_attention` gives them.
    """
    heads, count = query.shape[2], key.shape[1]
    weight = key.new_ones(1, count) if mask is None else mask.to(key.dtype)
    query_tiles, key_tiles, value_tiles = (_in_tiles(x) for x in (query, key, value))
    of_queries, of_keys = query_tiles.shape[2], key_tiles.shape[2]
    numbers = torch.arange(of_keys, device=key.device)
    places = torch.arange(heads, device=key.device)[:, None, None] * of_keys + numbers
    output, log_sum = tile_attention(
        query_tiles,
        *(x.flatten(1, 2) for x in (key_tiles, value_tiles)),
        _in_tiles(weight[..., None, None])[..., 0].log().expand(-1, heads, -1, -1).flatten(1, 2),
        None,
        None,
        None,
        torch.arange(heads * of_queries + 1, device=key.device) * of_keys,
        numbers.repeat(heads * of_queries),
        places.expand(-1, of_queries, -1).flatten(),
    )
    output, log_sum = (x.flatten(2, 3)[:, :, : query.shape[1]].transpose(1, 2) for x in (output, log_sum[..., None]))
    return output, log_sum


def _in_tiles(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, C), filled up with 0, as (B, H, tiles, tokens, C)."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % _LENGTH))
    return filled.unflatten(1, (-1, _LENGTH)).permute(0, 3, 1, 2, 4).contiguous()


def under_one_denominator(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two outputs of the same queries, each with the log of its sum of weights, as one."""
    (output, log_sum), (other_output, other_sum) = one, other
    share = torch.sigmoid(log_sum - other_sum)
    return share * output + (1 - share) * other_output, torch.logaddexp(log_sum, other_sum)


def of_own(output: torch.Tensor, log_sum: torch.Tensor, others: ExtraTokens, group: str) -> torch.Tensor:
    """What the queries of this process get from the tokens of all processes.

    Args:
        output: (B, n, H, D), what the queries of all processes get from the tokens of this one.
        log_sum: (B, n, H, 1), log of its sum of weights.
        others: the n tokens.
        group: of the processes.

    Returns:
        (B, own of n, H, D).
    """
    rows, counts = torch.cat([output, log_sum], dim=-1).movedim(1, 0), others.counts
    found = exchanged(rows, counts, [counts[others.rank]] * len(counts), group).unflatten(0, (len(counts), -1))
    shares = found[..., -1:].softmax(dim=0)
    return (shares * found[..., :-1]).sum(dim=0).movedim(0, 1)
