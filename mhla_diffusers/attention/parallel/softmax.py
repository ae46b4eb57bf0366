"""Softmax attention of some queries to all of some keys, of which others may hold more: extra tokens.

They are few, so who has them gives them to all processes of the ring. Their own queries attend to the tokens of every
process by that process, and what comes out is put under one denominator where it is due. What is sent grows with their
number, and not with that of the grid's tokens.
"""

from dataclasses import replace

import torch

from ..extra import ExtraTokens
from .collectives import counts_of, exchanged, gathered
from .place import Group


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
