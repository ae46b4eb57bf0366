"""Ulysses: processes exchange tokens for heads, attend, and exchange back.

Of the tokens that the processes of one row of the ring hold between them, each then has all, and some of the heads;
what attends does not notice.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..call import Call, MHLACall, SparseCall
from ..linear import finish
from ..rope import rotated
from .collectives import counts_of, exchanged, gathered
from .place import Group, Parallel

OneCall = TypeVar("OneCall", bound=MHLACall | SparseCall)


class Segment:
    """The tokens that the processes of one row of the ring hold between them.

    Args:
        call: of the own tokens, which has processes.
    """

    def __init__(self, call: Call) -> None:
        assert call.parallel is not None
        self.parallel, self.group = call.parallel, call.parallel.ulysses
        self.heads = self.parallel.head_counts(call.query.shape[2])
        row = self.parallel.ring.rank * self.group.size
        shares = self.parallel.shares(math.prod(call.grid))[row : row + self.group.size]
        self.first = shares[0][0]
        # where one process has no extra tokens, all have none
        before, after = (
            counts_of(count, self.group, not (self.parallel.anything and count), call.query.device)
            for count in call.extra
        )
        self.pieces = list(zip(before, (count for _, count in shares), after, strict=True))
        """Every process's tokens before the grid, of the grid, and after it."""

    def of_heads(self, call: OneCall) -> OneCall:
        """The call of all tokens and some heads, from that of the own tokens and all heads.

        RoPE acts before the exchange where nothing reads unrotated queries and keys, so that no table is sent.
        """
        heads, rotary = self.parallel.heads(call.query.shape[2]), call.rotary
        query, key = call.query, call.key
        if isinstance(call, SparseCall) or call.rope == "before":
            query, key, rotary = rotated(query, rotary), rotated(key, rotary), None
        query, key, value = self._to_heads(torch.cat([query, key, call.value], dim=-1)).chunk(3, dim=-1)
        if rotary is not None:
            cos, sin = self._all_tokens(torch.cat(rotary, dim=-1)).chunk(2, dim=-1)
            rotary = cos, sin
        ring, alone = self.parallel.ring, Group("", 1, 0)
        before, _, after = (sum(counts) for counts in zip(*self.pieces, strict=True))
        of_heads: dict[str, Any]
        if isinstance(call, SparseCall):
            given = {"pooled_bias": call.pooled_bias, "state_weight": call.state_weight}
            of_heads = {name: x if x is None else x[..., heads] for name, x in given.items()}
        else:
            of_heads = {
                "mixing": call.mixing[heads] if call.mixing.ndim == 3 else call.mixing,
                "output_gate": None,  # belongs to the own tokens and all heads, so it follows the exchange back
                "linear_weight": call.linear_weight[heads] if call.linear_weight is not None else None,
            }
        return replace(
            call,
            query=query,
            key=key,
            value=value,
            rotary=rotary,
            key_mask=self._all_tokens(call.key_mask) if call.key_mask is not None else None,
            extra=(before, after),
            parallel=None if ring.size == 1 else Parallel(ring, alone, ring, self.parallel.anything),
            first=self.first,
            **of_heads,
        )

    def of_tokens(self, call: OneCall, output: torch.Tensor) -> torch.Tensor:
        """The output of all heads for the own tokens, with the call's gate, from that of :meth:`of_heads`."""
        lengths, own = self._lengths, self.heads
        # output: tokens of all processes before the grid, then in it, then after; each gets its own three back
        kinds = [list(counts) for counts in zip(*self.pieces, strict=True)]
        of_kind = output.split([sum(counts) for counts in kinds], dim=1)
        pieces = [part.split(counts, dim=1) for part, counts in zip(of_kind, kinds, strict=True)]
        held = torch.cat([piece for of_process in zip(*pieces, strict=True) for piece in of_process], dim=1)
        rows = torch.cat([part.permute(2, 1, 0, 3).flatten(0, 1) for part in held.split(lengths, dim=1)])
        sent = [output.shape[2] * tokens for tokens in lengths]
        received = [heads * call.query.shape[1] for heads in own]
        rows = exchanged(rows, sent, received, self.group.name)
        output = rows.unflatten(0, (-1, call.query.shape[1])).permute(2, 1, 0, 3)
        if isinstance(call, SparseCall) or call.output_gate is None:
            return output
        output = call.extra_last(output)
        gated = finish(output[:, : call.tokens], None, call.output_gate).to(output.dtype)
        return call.in_sequence(torch.cat([gated, output[:, call.tokens :]], dim=1))

    @property
    def _lengths(self) -> list[int]:
        """Tokens of every process's sequence."""
        return [sum(counts) for counts in self.pieces]

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, own tokens, H, C) to (B, all tokens, own heads, C)."""
        own, rows = self.heads[self.group.rank], x.permute(2, 1, 0, 3).flatten(0, 1)
        received = [own * tokens for tokens in self._lengths]
        parts = exchanged(rows, [heads * x.shape[1] for heads in self.heads], received, self.group.name).split(received)
        return self._in_order(torch.cat([part.unflatten(0, (own, -1)) for part in parts], dim=1).permute(2, 1, 0, 3))

    def _all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """(B, own tokens, ...) of every process, in order: (B, all tokens, ...)."""
        return self._in_order(gathered(x.movedim(1, 0), self._lengths, self.group.name).movedim(0, 1))

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The sequences of all processes as one: tokens before the grid, of the grid, and after it."""
        parts = x.split([count for counts in self.pieces for count in counts], dim=1)
        return torch.cat([*parts[0::3], *parts[1::3], *parts[2::3]], dim=1)
