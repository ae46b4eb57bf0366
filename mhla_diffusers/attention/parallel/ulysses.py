"""Ulysses: processes exchange tokens for heads, attend, and exchange back.

Of the tokens that the processes of one row of the ring hold between them, each then has all, and some of the heads;
what attends does not notice.
"""

import math
from dataclasses import dataclass, replace

import torch

from ..call import Call
from ..layout import Extra
from ..linear import finish
from ..rope import rotated
from .collectives import counts_of, exchanged, gathered
from .place import Group, Parallel, Share


@dataclass(frozen=True)
class Segment:
    """The tokens that the processes of one row of the ring hold between them."""

    shares: list[Share]
    """Of the grid, of every process."""
    extra: list[Extra]
    """Extra tokens of every process."""
    heads: list[int]
    """Of every process."""
    parallel: Parallel

    @classmethod
    def of(cls, call: Call) -> "Segment":
        """The segment that the tokens of a call belong to."""
        assert call.parallel is not None
        parallel, heads, device = call.parallel, call.query.shape[2], call.query.device
        group = parallel.ulysses
        row = parallel.ring.rank * group.size
        shares = parallel.shares(math.prod(call.grid))[row : row + group.size]
        # where one process has none, all have none
        counts = (counts_of(count, group, not (parallel.anything and count), device) for count in call.extra)
        return cls(shares, list(zip(*counts, strict=True)), parallel.head_counts(heads), parallel)

    def of_heads(self, call: Call) -> Call:
        """The call of all tokens and some heads, from that of the own tokens and all heads.

        RoPE acts before the exchange where nothing reads unrotated queries and keys, so that no table is sent.
        """
        heads, rotary = self.parallel.heads(call.query.shape[2]), call.rotary
        query, key = call.query, call.key
        if call.rope == "before" or call.lists_everything:
            query, key, rotary = rotated(query, rotary), rotated(key, rotary), None
        query, key, value = self.to_heads(torch.cat([query, key, call.value], dim=-1)).chunk(3, dim=-1)
        if rotary is not None:
            cos, sin = self.all_tokens(torch.cat(rotary, dim=-1)).chunk(2, dim=-1)
            rotary = cos, sin
        ring, alone = self.parallel.ring, Group("", 1, 0)
        return replace(
            call,
            query=query,
            key=key,
            value=value,
            mixing=call.mixing[heads] if call.mixing.ndim == 3 else call.mixing,
            rotary=rotary,
            key_mask=self.all_tokens(call.key_mask) if call.key_mask is not None else None,
            output_gate=None,  # is of the own tokens and all heads, so it follows the exchange back
            linear_weight=call.linear_weight[heads] if call.linear_weight is not None else None,
            pooled_bias=call.pooled_bias[heads] if call.pooled_bias is not None else None,
            extra=self.all_extra,
            parallel=None if ring.size == 1 else Parallel(ring, alone, ring, self.parallel.anything),
            first=self.shares[0][0],
        )

    def of_tokens(self, call: Call, output: torch.Tensor) -> torch.Tensor:
        """The output of all heads for the own tokens, with the call's gate, from that of :meth:`of_heads`."""
        output = self.to_tokens(output)
        if call.output_gate is None:
            return output
        output = call.extra_last(output)
        gated = finish(output[:, : call.tokens], None, call.output_gate).to(output.dtype)
        return call.in_sequence(torch.cat([gated, output[:, call.tokens :]], dim=1))

    @property
    def lengths(self) -> list[int]:
        """Of every process's sequence, extra tokens among them."""
        return [before + count + after for (_, count), (before, after) in zip(self.shares, self.extra, strict=True)]

    @property
    def all_extra(self) -> Extra:
        """Extra tokens of all processes, before and after the grid."""
        return sum(before for before, _ in self.extra), sum(after for _, after in self.extra)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, own tokens, H, C) to (B, all tokens, own heads, C), the extra ones before and after others."""
        group, own = self.parallel.ulysses, self.heads[self.parallel.ulysses.rank]
        rows = x.permute(2, 1, 0, 3).flatten(0, 1)
        sent = [heads * x.shape[1] for heads in self.heads]
        received = [own * tokens for tokens in self.lengths]
        parts = exchanged(rows, sent, received, group.name).split(received)
        found = torch.cat([part.unflatten(0, (own, -1)) for part in parts], dim=1).permute(2, 1, 0, 3)
        return self._in_order(found)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`to_heads`."""
        group = self.parallel.ulysses
        parts = self._as_held(x).split(self.lengths, dim=1)
        rows = torch.cat([part.permute(2, 1, 0, 3).flatten(0, 1) for part in parts])
        sent = [len(rows) // x.shape[1] * tokens for tokens in self.lengths]
        own = self.lengths[group.rank]
        received = [heads * own for heads in self.heads]
        return exchanged(rows, sent, received, group.name).unflatten(0, (-1, own)).permute(2, 1, 0, 3)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """(B, own tokens, ...) of every process, side by side as in :meth:`to_heads`: (B, all tokens, ...)."""
        rows = gathered(x.movedim(1, 0), self.lengths, self.parallel.ulysses.name)
        return self._in_order(rows.movedim(0, 1))

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences of all processes, one after the other along the second axis, as one sequence."""
        if not any(self.all_extra):
            return x
        parts = x.split(self.lengths, dim=1)
        of_grids = [part[:, a : part.shape[1] - b] for part, (a, b) in zip(parts, self.extra, strict=True)]
        before = [part[:, :count] for part, (count, _) in zip(parts, self.extra, strict=True)]
        after = [part[:, part.shape[1] - count :] for part, (_, count) in zip(parts, self.extra, strict=True)]
        return torch.cat([*before, *of_grids, *after], dim=1)

    def _as_held(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_in_order`."""
        if not any(self.all_extra):
            return x
        before, after = zip(*self.extra, strict=True)
        counts = [count for _, count in self.shares]
        parts = x.split([*before, *counts, *after], dim=1)
        size = len(counts)
        return torch.cat([part for process in range(size) for part in parts[process::size]], dim=1)
