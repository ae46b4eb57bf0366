"""Extra tokens: text in one sequence with an image, class and register tokens.

They have no place on the token grid, so they are in no block of it. They are few, so every query attends to them with
softmax, and they attend to everything with softmax: to the sparse branch they are further blocks that every list holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .rope import Rotary, rotary_table, rotated

Extra = tuple[int, int]
"""How many tokens stand before, and how many after those of the grid in the sequence."""


@dataclass(frozen=True)
class ExtraTokens:
    """What extra tokens bring to an attention: n of them, those before the grid first."""

    query: torch.Tensor
    """(B, n, H, D) after RoPE, float32 (float64 for float64 inputs)."""
    key: torch.Tensor
    """Like ``query``."""
    value: torch.Tensor
    """(B, n, H, D) in the type of the input."""
    key_mask: torch.Tensor | None
    """(B, n), where the tokens of the grid have one."""
    before: int
    """How many of the own ones stand before the grid in the sequence."""
    counts: tuple[int, ...] = ()
    """How many are of every process of the call's group; empty where all are own ones."""
    rank: int = 0
    """Which of these processes is this one."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        key_mask: torch.Tensor | None,
        extra: Extra,
    ) -> "ExtraTokens":
        """Out of a whole sequence: query, key and value (B, N, H, D), RoPE (1 or B, N, 1, D), mask (B, N)."""
        table = None if rotary is None else rotary_table((of_extra(rotary[0], extra), of_extra(rotary[1], extra)))
        dtype = torch.promote_types(query.dtype, torch.float32)
        near_query, near_key = (rotated(of_extra(x, extra).to(dtype), table) for x in (query, key))
        mask = None if key_mask is None else of_extra(key_mask, extra)
        return cls(near_query, near_key, of_extra(value, extra), mask, extra[0])

    @property
    def count(self) -> int:
        """How many there are, n."""
        return self.query.shape[1]

    @property
    def own(self) -> slice:
        """Those of this process, which follow each other."""
        if not self.counts:
            return slice(None)
        return slice(sum(self.counts[: self.rank]), sum(self.counts[: self.rank + 1]))

    def after(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The grid's tokens with these after them, in the types of the grid's: (B, N + n, H, D), mask (B, N + n).

        Args:
            query: (B, N, H, D) after RoPE.
            key: (B, N, H, D) after RoPE.
            value: (B, N, H, D).
            key_mask: (B, N).
        """
        pairs = ((query, self.query), (key, self.key), (value, self.value))
        query, key, value = (torch.cat([x, own.to(x.dtype)], dim=1) for x, own in pairs)
        if key_mask is not None and self.key_mask is not None:
            key_mask = torch.cat([key_mask, self.key_mask.to(key_mask.dtype)], dim=1)
        return query, key, value, key_mask

    def around(self, grid: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The whole sequence, (B, N + n, ...), of the grid's tokens (B, N, ...) and these (B, n, ...)."""
        return torch.cat([own[:, : self.before], grid, own[:, self.before :]], dim=1)


def check_extra(extra: Any) -> Extra:
    """Return ``extra`` as a tuple after checking it alone.

    Raises:
        ValueError: it is not two counts.
    """
    counts = tuple(extra) if isinstance(extra, Sequence) else ()
    if len(counts) == 2 and all(isinstance(count, int) and count >= 0 for count in counts):
        before, after = counts
        return before, after
    raise ValueError(
        f"extra={extra!r} must be two counts, how many tokens stand before and after those of the grid, for "
        "example (0, 77)."
    )


def of_grid(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    """The tokens of the grid of a whole sequence (B, N, ...)."""
    before, after = extra
    return x[:, before : x.shape[1] - after]


def of_extra(x: torch.Tensor, extra: Extra) -> torch.Tensor:
    """The extra tokens of a whole sequence (B, N, ...), side by side: (B, n, ...)."""
    before, after = extra
    return torch.cat([x[:, :before], x[:, x.shape[1] - after :]], dim=1)
