"""Tile sizes and warps of every kernel: looked up, never searched at run time."""

from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """How one kernel cuts its work."""

    tokens: int
    """Tokens per tile (BLOCK_T)."""
    channels: int
    """Channels of the summary held at once (BLOCK_C or BLOCK_E)."""
    warps: int
    stages: int


def tiling(kernel: str, head_dim: int, dtype: torch.dtype, longest_block: int, architecture: str) -> Tiling:
    """Tiles of ``kernel`` for a head dim, an input type and the number of tokens in the longest block."""
    padded = max(16, 1 << (head_dim - 1).bit_length())
    tokens = min(64, max(16, 1 << (longest_block - 1).bit_length()))
    return Tiling(tokens, min(64, padded), 4, 1)


def architecture_of(device: torch.device) -> str:
    """Name of the device's architecture, as the table of this file spells it: "sm_90", "gfx942", "interpreter"."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def parts_per_block(whole_blocks: int, longest_block: int, tile_tokens: int, device: torch.device) -> int:
    """Programs that share one block, so that a call with few blocks fills the card too.

    Args:
        whole_blocks: programs that there would be with one per block.
        longest_block: tokens in the longest block.
        tile_tokens: tokens per tile.
        device: where the kernel runs.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * _processors(device)
    most = max(1, longest_block // (tile_tokens * _TILES_PER_PART))
    return min(most, -(-wanted // whole_blocks))


_PROGRAMS_PER_PROCESSOR = 4
"""So that the last programs to finish leave little of the card idle."""
_TILES_PER_PART = 4
"""A part begins by reading, or ends by writing, a whole summary: with fewer tiles that would be most of its traffic."""


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4  # the interpreter, which then shares blocks out as a GPU does
