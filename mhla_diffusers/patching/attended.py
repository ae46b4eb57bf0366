"""What a self-attention attends with, read off one of its calls."""

from typing import NamedTuple

import torch

from ..attention.call import ExtraTokens, of_grid
from ..attention.layout import Extra
from ..attention.rope import Rotary, rotary_table, rotated


class Attended(NamedTuple):
    """Query, key and value of the sequence that a self-attention works on, and how its tokens lie."""

    query: torch.Tensor
    """(B, N, H, D), of the tokens of the grid and of those outside."""
    key: torch.Tensor
    """Like ``query``."""
    value: torch.Tensor
    """Like ``query``."""
    grid: tuple[int, ...]
    extra: Extra = (0, 0)
    """How many tokens stand before and after those of the grid."""
    rotary: Rotary | None = None
    """(cos, sin), each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N)."""

    def of_grid(self) -> "Attended":
        """The tokens of the grid alone."""
        query, key, value = (of_grid(x, self.extra) for x in (self.query, self.key, self.value))
        cos_sin = self.rotary
        rotary = None if cos_sin is None else (of_grid(cos_sin[0], self.extra), of_grid(cos_sin[1], self.extra))
        mask = None if self.key_mask is None else of_grid(self.key_mask, self.extra)
        return Attended(query, key, value, self.grid, (0, 0), rotary, mask)

    def others(self) -> ExtraTokens | None:
        """The extra tokens; None if there are none."""
        if not any(self.extra):
            return None
        return ExtraTokens.of(self.query, self.key, self.value, self.rotary, self.key_mask, self.extra)

    def in_float32(self) -> "Attended":
        """With query, key and value in float32."""
        return self._replace(query=self.query.float(), key=self.key.float(), value=self.value.float())

    def turned(self) -> "Attended":
        """With RoPE applied to query and key."""
        table = rotary_table(self.rotary) if self.rotary is not None else None
        return self._replace(query=rotated(self.query, table), key=rotated(self.key, table), rotary=None)
