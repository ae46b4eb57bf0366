"""Block lists to measure with, and FlexAttention over the same lists."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..attention import BlockLists
from ..attention.call import list_length
from ..attention.layout import layout_of
from .shapes import Shape

_LARGEST_BLOCK = 64
"""Queries and keys that FlexAttention's kernels on GPUs are told to take at once where its blocks are that small."""


def draw_lists(shape: Shape, device: torch.device) -> BlockLists:
    """Random lists from a seed, every query block with as many key blocks and at least one.

    Args:
        shape: with a block size.
        device: where.
    """
    blocks, size = shape.uniform_blocks, int(shape.block_size or 0)
    order = torch.rand(shape.heads, blocks, blocks, generator=torch.Generator().manual_seed(0))
    chosen = order.topk(list_length(shape.density, blocks), dim=-1).indices
    mask = torch.zeros(order.shape, dtype=torch.bool).scatter_(-1, chosen, value=True)
    return BlockLists.from_mask(size, mask.to(device))


def why_no_flex(device: torch.device, backward: bool) -> str | None:
    """Why FlexAttention is not to be tried; None if it is, which does not mean that it compiles."""
    return "FlexAttention has no backward pass on CPUs" if backward and device.type == "cpu" else None


def flex_over_lists(shape: Shape, inputs: Sequence[torch.Tensor], lists: BlockLists) -> Callable[[], torch.Tensor]:
    """Softmax attention over listed blocks by compiled FlexAttention: what attends gives (B, N, H, D).

    Tokens are brought into the order of the uniform blocks and back again. Blocks that are not listed are left out.

    Args:
        shape: with the grid.
        inputs: query, key and value, each (B, N, H, D).
        lists: the same for all samples.
    """
    device, block = inputs[0].device, lists.block_size
    layout = layout_of(shape.grid, block, device=str(device))
    rows, back = layout.order.clamp_min(0), layout.rows
    mask = _block_mask(lists.mask(), block, layout.order >= 0, shape.tokens)
    small: Any = {"BLOCK_M": block, "BLOCK_N": block} if block <= _LARGEST_BLOCK and device.type != "cpu" else None

    @torch.compile(dynamic=False)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.index_select(1, rows).transpose(1, 2) for x in (query, key, value))
        output: Any = flex_attention(q, k, v, block_mask=mask, kernel_options=small)
        return output.transpose(1, 2).index_select(1, back)

    return lambda: attend(*inputs)


def _block_mask(listed: torch.Tensor, block: int, is_token: torch.Tensor, tokens: int) -> BlockMask:
    """FlexAttention's form of lists.

    Args:
        listed: bool (1, H, T, T).
        block: rows of a block.
        is_token: bool (T * block,), whether a row holds a token.
        tokens: how many do.
    """
    count = listed.sum(dim=-1, dtype=torch.int32)
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    size = listed.shape[-1] * block
    if size == tokens:
        nothing = torch.zeros_like(count), torch.zeros_like(order)  # FlexAttention confuses tensors given twice
        return BlockMask.from_kv_blocks(*nothing, count, order, BLOCK_SIZE=block, seq_lengths=(size, size))

    def holds_token(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_token[key]

    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=block, mask_mod=holds_token, seq_lengths=(size, size))
