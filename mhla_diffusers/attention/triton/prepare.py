"""One pass over query, key and value before the attention: RoPE, token order, pooling; and one pass back.

A program takes one block of rows and some heads of one sample, so it reads the angles of its tokens once for them.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, allocate, architecture_of, power_of_two


class Tiles(NamedTuple):
    """How the kernels of this file cut their work."""

    heads: int
    """Of one program, one after the other."""
    line: int
    """Bytes of a row of one head that a program takes: pairs turn and channels are pooled each for itself."""
    warps: int


TILES = {"default": Tiles(heads=4, line=128, warps=4)}
"""By architecture."""


class Prepared(NamedTuple):
    """What the attention reads: rows (B * H, R, D) and pooled blocks (B * H, grid_blocks, D) in the input's type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pooled_query: torch.Tensor
    """Mean over the block's tokens."""
    pooled_key: torch.Tensor
    """Mean weighted by the key mask, 0 where no weight is left; of rotated keys."""
    pooled_value: torch.Tensor
    spread: torch.Tensor
    """Weighted variance of the rotated keys around their mean, by channel."""


@triton.jit
def rotate(x, cos, sin, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Channel pairs (2i, 2i + 1) of ``x`` (BLOCK, CHUNK), float32, turned by angles (BLOCK, CHUNK / 2)."""
    even, odd = tl.split(tl.reshape(x, (BLOCK, CHUNK // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK, CHUNK))


@triton.jit
def load_angles(angles, at, mask, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Cosines and sines of channel pairs, float32 (BLOCK, CHUNK / 2) each."""
    both = tl.load(angles + at, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, (BLOCK, CHUNK // 2, 2)))


@triton.jit
def key_shares(key_mask, batch, tokens, token, exists, count):
    """What part of its block's weight a row has, float32 (BLOCK,); 0 in all rows where there is no weight."""
    if key_mask is None:
        return exists.to(tl.float32) / count
    else:
        weight = tl.load(key_mask + batch * tokens + token, mask=exists, other=0.0)
        total = tl.sum(weight)
        return weight / tl.where(total > 0, total, 1.0)


@triton.jit(
    do_not_specialize=[
        *("query_batch", "query_token", "query_head", "key_batch", "key_token", "key_head"),
        *("value_batch", "value_token", "value_head", "angle_tokens", "tokens", "heads", "blocks", "grid_blocks"),
    ]
)
def prepare_kernel(
    query,
    key,
    value,
    angles,
    key_mask,
    order,
    valid,
    query_rows,
    key_rows,
    value_rows,
    pooled_query,
    pooled_key,
    pooled_value,
    spread,
    query_batch,
    query_token,
    query_head,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    angle_tokens,
    tokens,
    heads,
    blocks,
    grid_blocks,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Strides of query, key and value count ALIGNMENT elements, so that the compiler knows how far it may read at once.

    ``angle_tokens`` is the number of tokens, or 0 where all samples share their angles.
    """
    first_head = tl.program_id(0) // CHUNKS * HEADS
    block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(order + row)
    exists = token >= 0
    token = tl.maximum(token, 0).to(tl.int64)
    mask = exists[:, None] & (channel < D)[None, :]
    count = tl.maximum(tl.load(valid + block), 1).to(tl.float32)
    of_query = exists.to(tl.float32) / count
    of_key = key_shares(key_mask, batch, tokens, token, exists, count)
    if angles is not None:
        at = (batch * angle_tokens + token)[:, None] * D + channel[None, :]
        cos, sin = load_angles(angles, at, mask, BLOCK, CHUNK)
    query_at = (batch * query_batch + token * query_token)[:, None] * ALIGNMENT + channel[None, :]
    key_at = (batch * key_batch + token * key_token)[:, None] * ALIGNMENT + channel[None, :]
    value_at = (batch * value_batch + token * value_token)[:, None] * ALIGNMENT + channel[None, :]
    here = (channel < D)[None, :]
    pooled_here = channel < tl.where(block < grid_blocks, D, 0)
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        # all loads before the first store, so that they are under way together; then one tensor after the other
        q = tl.load(query + query_at + head * query_head.to(tl.int64) * ALIGNMENT, mask=mask, other=0.0)
        k = tl.load(key + key_at + head * key_head.to(tl.int64) * ALIGNMENT, mask=mask, other=0.0)
        v = tl.load(value + value_at + head * value_head.to(tl.int64) * ALIGNMENT, mask=mask, other=0.0)
        group = batch * heads + head
        rows_at = (group * blocks * BLOCK + row)[:, None] * D + channel[None, :]
        pooled_at = (group * grid_blocks + block) * D + channel
        turned = q.to(tl.float32)
        if angles is not None:
            turned = rotate(turned, cos, sin, BLOCK, CHUNK)
        tl.store(query_rows + rows_at, turned.to(q.dtype), mask=here)
        mean = tl.sum(turned * of_query[:, None], 0)
        tl.store(pooled_query + pooled_at, mean.to(q.dtype), mask=pooled_here)
        turned = k.to(tl.float32)
        if angles is not None:
            turned = rotate(turned, cos, sin, BLOCK, CHUNK)
        tl.store(key_rows + rows_at, turned.to(k.dtype), mask=here)
        mean = tl.sum(turned * of_key[:, None], 0)
        tl.store(pooled_key + pooled_at, mean.to(k.dtype), mask=pooled_here)
        apart = turned - mean[None, :]
        variance = tl.sum(apart * apart * of_key[:, None], 0)
        tl.store(spread + pooled_at, variance.to(k.dtype), mask=pooled_here)
        tl.store(value_rows + rows_at, v, mask=here)
        mean = tl.sum(v.to(tl.float32) * of_key[:, None], 0)
        tl.store(pooled_value + pooled_at, mean.to(v.dtype), mask=pooled_here)


@triton.jit(do_not_specialize=["angle_tokens", "tokens", "heads", "blocks", "grid_blocks"])
def prepare_backward_kernel(
    query_rows,
    key_rows,
    value_rows,
    pooled_key,
    pooled_value,
    angles,
    key_mask,
    order,
    valid,
    query,
    key,
    value,
    angle_tokens,
    tokens,
    heads,
    blocks,
    grid_blocks,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Everything is a gradient of what has its name in :func:`prepare_kernel`."""
    first_head = tl.program_id(0) // CHUNKS * HEADS
    block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(order + row)
    exists = token >= 0
    token = tl.maximum(token, 0).to(tl.int64)
    mask = exists[:, None] & (channel < D)[None, :]
    if pooled_key is not None:
        count = tl.maximum(tl.load(valid + block), 1).to(tl.float32)
        of_key = key_shares(key_mask, batch, tokens, token, exists, count)[:, None]
        pooled_mask = channel < tl.where(block < grid_blocks, D, 0)
    if angles is not None:
        at = (batch * angle_tokens + token)[:, None] * D + channel[None, :]
        cos, sin = load_angles(angles, at, mask, BLOCK, CHUNK)
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        group = batch * heads + head
        rows_at = (group * blocks * BLOCK + row)[:, None] * D + channel[None, :]
        # all loads before the first store, so that they are under way together
        q = tl.load(query_rows + rows_at, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(key_rows + rows_at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(value_rows + rows_at, mask=mask, other=0.0).to(tl.float32)
        if pooled_key is not None:
            pooled_at = (group * grid_blocks + block) * D + channel
            k += of_key * tl.load(pooled_key + pooled_at, mask=pooled_mask, other=0.0).to(tl.float32)[None, :]
            v += of_key * tl.load(pooled_value + pooled_at, mask=pooled_mask, other=0.0).to(tl.float32)[None, :]
        if angles is not None:
            q = rotate(q, cos, -sin, BLOCK, CHUNK)
            k = rotate(k, cos, -sin, BLOCK, CHUNK)
        out_at = ((batch * tokens + token) * heads + head)[:, None] * D + channel[None, :]
        tl.store(query + out_at, q.to(query.dtype.element_ty), mask=mask)
        tl.store(key + out_at, k.to(key.dtype.element_ty), mask=mask)
        tl.store(value + out_at, v.to(value.dtype.element_ty), mask=mask)


def prepare_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    order: torch.Tensor,
    valid: torch.Tensor,
    blocks: int,
    grid_blocks: int,
    architecture: str | None = None,
) -> tuple[Launch, Prepared]:
    """Rotate query and key, put all three in the order of the blocks, and pool the blocks of the grid.

    Args:
        query: (B, N, H, D), float32, bfloat16 or float16, with any strides but the last, which is 1.
        key: as ``query``.
        value: as ``query``.
        angles: (1 or B, N, 1, D), the cosine of a channel pair at its first channel and its sine at the second; None
            without RoPE.
        key_mask: float32 (B, N), weights of the keys in the means; None for 1 everywhere.
        order: int32 (R,), position in the sequence of every row, -1 for padding, which stands at the end of a block.
        valid: int32 (T,), how many rows of every block hold a token.
        blocks: T, a block being R / T rows: a power of two, 16 at least.
        grid_blocks: how many blocks are pooled, from the first on; the others hold extra tokens.
        architecture: of a card that is not there.

    Returns:
        The launch, and what it writes: rows (B * H, R, D), 0 where they are padding, and pooled blocks
        (B * H, grid_blocks, D).
    """
    batch, tokens, heads, head_dim = query.shape
    rows, pooled = (batch * heads, order.shape[0], head_dim), (batch * heads, grid_blocks, head_dim)
    prepared = Prepared(*(allocate(shape, query.dtype, query.device) for shape in [rows] * 3 + [pooled] * 4))
    strides = {
        f"{name}_{axis}": x.stride(i) if x.shape[i] > 1 else 0
        for name, x in (("query", query), ("key", key), ("value", value))
        for i, axis in enumerate(("batch", "token", "head"))
    }
    alignment = math.gcd(16, *strides.values())
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "query_rows": prepared.query,
        "key_rows": prepared.key,
        "value_rows": prepared.value,
        "pooled_query": prepared.pooled_query,
        "pooled_key": prepared.pooled_key,
        "pooled_value": prepared.pooled_value,
        "spread": prepared.spread,
        "ALIGNMENT": alignment,
        **{name: stride // alignment for name, stride in strides.items()},
    }
    shared = _tokens(angles, key_mask, order, valid, blocks, grid_blocks)
    return _launch(
        prepare_kernel, arguments | shared, query.shape, architecture or architecture_of(query.device)
    ), prepared


def prepare_backward_launch(
    query_rows: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    pooled_key: torch.Tensor | None,
    pooled_value: torch.Tensor | None,
    angles: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    order: torch.Tensor,
    valid: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    architecture: str | None = None,
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gradients of query, key and value from those of what :func:`prepare_launch` makes of them.

    Choosing blocks passes no gradient on, so there is none of the pooled query and the spread.

    Args:
        query_rows: gradient of the rows, (B * H, R, D), contiguous.
        key_rows: as ``query_rows``.
        value_rows: as ``query_rows``.
        pooled_key: gradient (B * H, grid_blocks, D), contiguous; None where nothing read the pooled blocks.
        pooled_value: as ``pooled_key``, and None with it.
        angles: as in :func:`prepare_launch`, like the next three.
        key_mask: weights of the keys.
        order: positions of the rows; together they hold all N tokens.
        valid: rows of every block that hold a token.
        shape: of the gradients, (B, N, H, D).
        dtype: of the gradients.
        architecture: of a card that is not there.

    Returns:
        The launch, and what it writes: three contiguous tensors (B, N, H, D).
    """
    query, key, value = (allocate(shape, dtype, query_rows.device) for _ in range(3))
    arguments = {
        "query_rows": query_rows,
        "key_rows": key_rows,
        "value_rows": value_rows,
        "pooled_key": pooled_key,
        "pooled_value": pooled_value,
        "query": query,
        "key": key,
        "value": value,
    }
    grid_blocks = pooled_key.shape[1] if pooled_key is not None else 0
    shared = _tokens(angles, key_mask, order, valid, valid.shape[0], grid_blocks)
    card = architecture or architecture_of(query_rows.device)
    return _launch(prepare_backward_kernel, arguments | shared, shape, card), (query, key, value)


def _tokens(
    angles: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    order: torch.Tensor,
    valid: torch.Tensor,
    blocks: int,
    grid_blocks: int,
) -> dict[str, Any]:
    """What both kernels take about the tokens."""
    return {
        "angles": angles.contiguous() if angles is not None else None,
        "angle_tokens": angles.shape[1] if angles is not None and angles.shape[0] > 1 else 0,
        "key_mask": key_mask.contiguous() if key_mask is not None else None,
        "order": order,
        "valid": valid,
        "blocks": blocks,
        "grid_blocks": grid_blocks,
        "BLOCK": order.shape[0] // blocks,
    }


def _launch(kernel: Any, arguments: dict[str, Any], shape: Sequence[int], architecture: str) -> Launch:
    """With the sizes of query, key and value (B, N, H, D)."""
    batch, tokens, heads, head_dim = shape
    tiles = TILES.get(architecture, TILES["default"])
    chunk = min(tiles.line // arguments["query_rows"].element_size(), power_of_two(head_dim))
    chunks = -(-head_dim // chunk)
    sizes = {"tokens": tokens, "heads": heads, "D": head_dim, "CHUNK": chunk, "CHUNKS": chunks, "HEADS": tiles.heads}
    grid = -(-heads // tiles.heads) * chunks, arguments["blocks"], batch
    return Launch(kernel, grid, arguments | sizes, tiles.warps, stages=1)
