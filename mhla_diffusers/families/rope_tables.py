"""RoPE from a table per axis, whose channels are thirds of a head, as Wan and its relatives have it."""

from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .styles import VideoFamily

_LAID_OUT: set[tuple[int, ...]] = set()
"""Shapes of unflattened tables whose coordinates were checked to be the token grid."""


class TabledRotaryFamily(VideoFamily):
    """Transformers whose ``rope`` passes (cos, sin), each (1, N, 1, D), to every attention."""

    def grid_of_attention(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Read the grid from the sines."""
        return grid_of_table(rotary[1]) if self.recognises_self_attention(attn) else None

    has_rope = True

    def rotary_from(self, transformer: Any, rotary: Rotary, grid: tuple[int, ...], first: int) -> Rotary:
        """Take the frames' channels from later rows of the model's own table; ValueError if it is too short."""
        rope, last = transformer.rope, first + grid[0]
        if (reason := self.why_too_late(transformer, first, last)) is not None:
            raise ValueError(reason)

        def later(table: Tensor, rows: Tensor) -> Tensor:
            frames = rows[first:last, : rope.t_dim].to(table)
            spread = frames[:, None, None].expand(-1, *grid[1:], -1).reshape(1, -1, 1, frames.shape[-1])
            return torch.cat([spread, table[..., frames.shape[-1] :]], dim=-1)

        return later(rotary[0], rope.freqs_cos), later(rotary[1], rope.freqs_sin)

    def why_too_late(self, transformer: Any, first: int, last: int) -> str | None:
        """A frame past the end of the model's own table."""
        rope = transformer.rope
        if last <= rope.max_seq_len:
            return None
        return (
            f"{type(transformer).__name__} has RoPE for {rope.max_seq_len} latent frames, its rope_max_seq_len, "
            f"but frames {first + 1} to {last} were asked for. Begin another video, or load the model with a larger "
            "rope_max_seq_len=, which adds no weights; frames that far apart were not seen in training."
        )


def thirds(head_dim: int) -> tuple[int, ...]:
    """Return a third of the channels for each axis; frames also take the remainder."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def grid_of_table(table: Any) -> tuple[int, ...]:
    """Return the token grid of RoPE's sines, (1, N, 1, D), read from the three coordinates of every token.

    The table is a flattened (frames, height, width, D), and outside of inference mode a view of it. Once the
    coordinates have been checked against that shape, the shape alone is enough, and nothing waits for the device.
    """
    laid_out = tuple(table._base.shape[:-1]) if table._base is not None else None
    if laid_out in _LAID_OUT:
        return laid_out
    if not hasattr(table, "token_grid"):  # all layers of a forward get the same table
        frames, height, _ = thirds(table.shape[-1])
        # the first channel of an axis is sin(coordinate), which is 0 only for coordinate 0
        at_zero = table[0, :, 0, [0, frames, frames + height]] == 0
        along = [at_zero[:, [axis for axis in range(3) if axis != counted]].all(dim=1).sum() for counted in range(3)]
        table.token_grid = tuple(torch.stack(along).tolist())
    if table.token_grid == laid_out:
        _LAID_OUT.add(table.token_grid)
    grid: tuple[int, ...] = table.token_grid
    return grid
