"""Lists of exact tiles to measure with, and FlexAttention over the same lists."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..attention import BlockLists
from ..attention.tile_scores import list_length
from ..attention.tiles import places_of_tokens, tokens_of_tiles
from .shapes import Shape

_LARGEST_BLOCK = 64
"""Queries and keys that FlexAttention's kernels on GPUs are told to take at once where its blocks are that small."""


def draw_mask(counts: Sequence[int], heads: int, share: float) -> torch.Tensor:
    """Random exact tiles from a seed, every query tile with as many key tiles and at least one: bool (H, T, T).

    Args:
        counts: tile counts per axis; the product is T.
        heads: H.
        share: part of all pairs of tiles.
    """
    tiles = math.prod(counts)
    order = torch.rand(heads, tiles, tiles, generator=torch.Generator().manual_seed(0))
    chosen = order.topk(list_length(share, tiles), dim=-1).indices
    return torch.zeros(heads, tiles, tiles, dtype=torch.bool).scatter_(-1, chosen, value=True)


def draw_tiles(shape: Shape, device: torch.device) -> BlockLists:
    """The lists of :func:`draw_mask` for a shape with exact tiles."""
    if shape.tiles is None:
        raise ValueError(f"Shape {shape.name!r} has no exact tiles; give it tile counts.")
    return BlockLists.from_mask(shape.tiles, draw_mask(shape.tiles, shape.heads, shape.share).to(device))


def why_no_flex(device: torch.device, backward: bool) -> str | None:
    """Why FlexAttention is not to be tried; None if it is, which does not mean that it compiles."""
    return "FlexAttention has no backward pass on CPUs" if backward and device.type == "cpu" else None


def flex_over_tiles(shape: Shape, inputs: Sequence[torch.Tensor], tiles: BlockLists) -> Callable[[], torch.Tensor]:
    """Softmax attention over exact tiles by compiled FlexAttention: what attends gives (B, N, H, D).

    Tokens are brought into the order of tiles, each filled up to a power of two, and back again. Tiles that are not
    listed are left out.

    Args:
        shape: grid, and tile counts.
        inputs: query, key and value, each (B, N, H, D).
        tiles: the lists, the same for all samples.
    """
    device = inputs[0].device
    tokens, exists = tokens_of_tiles(shape.grid, tiles.counts)
    length = tokens.shape[1]
    block = max(16, 2 ** math.ceil(math.log2(length)))
    filled = torch.nn.functional.pad(tokens, (0, block - length)).flatten().to(device)
    is_token = torch.nn.functional.pad(exists, (0, block - length)).flatten().to(device)
    places = places_of_tokens(shape.grid, tiles.counts)
    back = (places // length * block + places % length).to(device)
    mask = _block_mask(tiles.mask(), block, None if bool(is_token.all()) else is_token)
    small: Any = {"BLOCK_M": block, "BLOCK_N": block} if block <= _LARGEST_BLOCK and device.type != "cpu" else None

    @torch.compile(dynamic=False)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.index_select(1, filled).transpose(1, 2) for x in (query, key, value))
        output: Any = flex_attention(q, k, v, block_mask=mask, kernel_options=small)
        return output.transpose(1, 2).index_select(1, back)

    return lambda: attend(*inputs)


def _block_mask(listed: torch.Tensor, block: int, is_token: torch.Tensor | None) -> BlockMask:
    """FlexAttention's form of lists.

    Args:
        listed: bool (1, H, T, T).
        block: places of a tile.
        is_token: bool (T * block,), whether a place holds a token; None if all do.
    """
    count = listed.sum(dim=-1, dtype=torch.int32)
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    size = listed.shape[-1] * block
    if is_token is None:
        nothing = torch.zeros_like(count), torch.zeros_like(order)  # FlexAttention confuses tensors given twice
        return BlockMask.from_kv_blocks(*nothing, count, order, BLOCK_SIZE=block, seq_lengths=(size, size))

    def holds_token(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_token[key]

    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=block, mask_mod=holds_token, seq_lengths=(size, size))
