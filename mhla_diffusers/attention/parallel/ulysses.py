"""Ulysses: processes exchange tokens for heads, attend, and exchange back.

Of the tokens that the processes of one row of the ring hold between them, each then has all, and some of the heads;
what attends does not notice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..call import Call, of_grid
from ..layout import Extra, Shape
from ..linear import finish
from ..rope import Rotary
from .collectives import counts_of, exchanged, gathered, summed
from .place import Parallel, Share

Attend = Callable[[Call, Rotary | None, Shape | None, Extra], torch.Tensor]
"""Attends with a whole sequence, its RoPE with the channels of each axis, and the extra tokens."""


@dataclass(frozen=True)
class _Segment:
    """The tokens that the processes of one row of the ring hold between them."""

    shares: list[Share]
    """Of the grid, of every process."""
    extra: list[Extra]
    """Extra tokens of every process."""
    heads: list[int]
    """Of every process."""
    parallel: Parallel

    @classmethod
    def of(cls, call: Call, extra: Extra, parallel: Parallel) -> "_Segment":
        group, heads = parallel.ulysses, call.query.shape[2]
        row = parallel.ring.rank * group.size
        shares = parallel.shares(math.prod(call.grid))[row : row + group.size]
        device = call.query.device
        # where one process has none, all have none
        counts = (counts_of(count, group, not (parallel.anything and count), device) for count in extra)
        return cls(shares, list(zip(*counts, strict=True)), parallel.head_counts(heads), parallel)

    @property
    def lengths(self) -> list[int]:
        """Of every process's sequence, extra tokens among them."""
        return [before + count + after for (_, count), (before, after) in zip(self.shares, self.extra, strict=True)]

    @property
    def all_extra(self) -> Extra:
        return sum(before for before, _ in self.extra), sum(after for _, after in self.extra)

    @property
    def share(self) -> Share:
        return self.shares[0][0], sum(count for _, count in self.shares)

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
        of_grids = [of_grid(part, extra) for part, extra in zip(parts, self.extra, strict=True)]
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

    def rotary(self, rotary: Rotary, axes: Shape | None, grid: Shape) -> Rotary:
        """RoPE of all tokens, (1 or B, all tokens, 1, D), from that of the own ones.

        Where channels turn with one axis each, the rows of the axes are what is sent, and not those of all tokens.
        """
        if axes is None:
            cos, sin = (self.all_tokens(table) for table in rotary)
            return cos, sin
        own = self.extra[self.parallel.ulysses.rank]
        tables = torch.cat(rotary, dim=-1)
        of_axes = self._axial(of_grid(tables, own), (*axes, *axes), grid)
        if any(self.all_extra):
            before, after = self.all_extra
            parts = [(first, first + n) for first, n in ((0, own[0]), (tables.shape[1] - own[1], own[1]))]
            ends = [
                gathered(tables[:, a:b].movedim(1, 0), list(counts), self.parallel.ulysses.name).movedim(0, 1)
                for (a, b), counts in zip(parts, zip(*self.extra, strict=True), strict=True)
            ]
            of_axes = torch.cat([ends[0][:, :before], of_axes, ends[1][:, :after]], dim=1)
        cos, sin = of_axes.chunk(2, dim=-1)
        return cos, sin

    def _axial(self, table: torch.Tensor, axes: Shape, grid: Shape) -> torch.Tensor:
        """(1 or B, all tokens of the grid here, 1, C) of a table of the own ones; ``axes`` are the channels of each."""
        rank, rows = self.parallel.ulysses.rank, []
        own, *earlier = (_places(share, grid, table.device) for share in (self.shares[rank], *self.shares[:rank]))
        everyone = _places(self.share, grid, table.device)
        for axis, part in enumerate(table.split(list(axes), dim=-1)):
            which = axis % len(grid)
            rows.append(part.new_zeros(len(part), grid[which], 1, part.shape[-1]).index_copy(1, own[which], part))
            for places in earlier:  # each row is sent by the first process that has it, so that the sum is exact
                rows[-1] = rows[-1].index_fill(1, places[which], 0)
        together = summed(torch.cat([x.flatten() for x in rows]), self.parallel.ulysses.name)
        sums = together.split([x.numel() for x in rows])
        channels = (x.view_as(of_axis) for x, of_axis in zip(sums, rows, strict=True))
        found = [x.index_select(1, everyone[axis % len(grid)]) for axis, x in enumerate(channels)]
        return torch.cat(found, dim=-1)


def _places(share: Share, grid: Shape, device: torch.device) -> list[torch.Tensor]:
    """Place of every token of a share on every axis, int64 (count,) each."""
    rest, found = torch.arange(share[0], sum(share), device=device), []
    for size in reversed(grid):
        found.append(rest % size)
        rest = rest // size
    return found[::-1]


def attend_by_heads(
    call: Call, rotary: Rotary | None, axes: Shape | None, extra: Extra, parallel: Parallel, attend: Attend
) -> torch.Tensor:
    """Attend with all tokens and some heads, and give the own tokens back, (B, own tokens, H, D).

    Call, RoPE and numbers of extra tokens are those of the own tokens, with all heads.
    """
    segment = _Segment.of(call, extra, parallel)
    heads = parallel.heads(call.query.shape[2])
    query, key, value = segment.to_heads(torch.cat([call.query, call.key, call.value], dim=-1)).chunk(3, dim=-1)
    inner = replace(
        call,
        query=query,
        key=key,
        value=value,
        mixing=call.mixing[heads] if call.mixing.ndim == 3 else call.mixing,
        key_mask=segment.all_tokens(call.key_mask) if call.key_mask is not None else None,
        output_gate=None,  # is of the own tokens and all heads, so it follows the exchange back
        linear_weight=call.linear_weight[heads] if call.linear_weight is not None else None,
        pooled_bias=call.pooled_bias[heads] if call.pooled_bias is not None else None,
        first=segment.share[0],
    )
    if rotary is not None:
        rotary = segment.rotary(rotary, axes, call.grid)
    output = segment.to_tokens(attend(inner, rotary, axes, segment.all_extra))
    if call.output_gate is None:
        return output
    before, after = extra
    gated = finish(of_grid(output, extra), None, call.output_gate).to(output.dtype)
    return torch.cat([output[:, :before], gated, output[:, output.shape[1] - after :]], dim=1)
