"""One pass over query, key and value before the attention: RoPE, token order, pooling; and one pass back.

A program takes one block of rows and some heads of one sample, so it reads the angles of its tokens once for them.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import Layout, layout_of
from .features import rotate_pairs
from .operators import allocate, operator, refuse_second_derivative
from .tiles import power_of_two, tile_of

GRID = "SymInt[] grid, SymInt block_size, SymInt extra"
"""Arguments of an operator that reads tables of the layout: it finds them inside, so that torch.compile never traces
them."""


def layout_for(grid: Sequence[int], block_size: int, extra: int, device: torch.device) -> Layout:
    """Return the layout of an operator's tokens, the extra ones last."""
    return layout_of(tuple(grid), block_size, extra, str(device))


def block_counts(grid: Sequence[int], block_size: int, extra: int) -> tuple[int, int]:
    """Return the number of blocks of all tokens, and of the grid's."""
    of_grid = (math.prod(list(grid)) + block_size - 1) // block_size
    return of_grid + (extra + block_size - 1) // block_size, of_grid


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
            turned = rotate_pairs(turned, cos, sin)
        tl.store(query_rows + rows_at, turned.to(q.dtype), mask=here)
        mean = tl.sum(turned * of_query[:, None], 0)
        tl.store(pooled_query + pooled_at, mean.to(q.dtype), mask=pooled_here)
        turned = k.to(tl.float32)
        if angles is not None:
            turned = rotate_pairs(turned, cos, sin)
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
        pooled_at = (group * grid_blocks + block) * D + channel
        k += of_key * tl.load(pooled_key + pooled_at, mask=pooled_mask, other=0.0).to(tl.float32)[None, :]
        v += of_key * tl.load(pooled_value + pooled_at, mask=pooled_mask, other=0.0).to(tl.float32)[None, :]
        if angles is not None:
            q = rotate_pairs(q, cos, -sin)
            k = rotate_pairs(k, cos, -sin)
        out_at = ((batch * tokens + token) * heads + head)[:, None] * D + channel[None, :]
        tl.store(query + out_at, q.to(query.dtype.element_ty), mask=mask)
        tl.store(key + out_at, k.to(key.dtype.element_ty), mask=mask)
        tl.store(value + out_at, v.to(value.dtype.element_ty), mask=mask)


def _launch(layout, like, batch, heads, angles, key_mask) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return programs and arguments of both kernels, for heads like (..., D)."""
    tile = tile_of("prepare", like, most_n=power_of_two(like.shape[-1]))
    chunks = triton.cdiv(like.shape[-1], tile.n)
    tables = {"order": layout.order, "valid": layout.valid, "blocks": layout.blocks, "grid_blocks": layout.grid_blocks}
    constants = {"D": like.shape[-1], "BLOCK": layout.block_size, "CHUNK": tile.n, "CHUNKS": chunks, "HEADS": tile.m}
    arguments = {
        "angles": None if angles is None else angles.contiguous(),
        "angle_tokens": 0 if angles is None or len(angles) == 1 else angles.shape[1],
        "key_mask": None if key_mask is None else key_mask.contiguous(),
        "tokens": len(layout.rows),
        "heads": heads,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return (triton.cdiv(heads, tile.m) * chunks, layout.blocks, batch), tables | constants | arguments


@operator(
    f"(Tensor query, Tensor key, Tensor value, Tensor? angles, Tensor? key_mask, {GRID}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def prepare(query, key, value, angles, key_mask, grid, block_size, extra):
    """Rotate query and key, put all three in the order of the blocks, and pool the blocks of the grid.

    Args:
        query: (B, N, H, D), float32, bfloat16 or float16, of any strides but the last, 1.
        key: like ``query``.
        value: like ``query``.
        angles: (1 or B, N, 1, D), the cosine of a channel pair at its first channel and its sine at the second; None
            without RoPE.
        key_mask: float32 (B, N), weights of the keys in the means; None for 1 everywhere.
        grid: token grid.
        block_size: rows of a block, a power of two, 16 at least.
        extra: extra tokens, the last of the N.

    Returns:
        Rows of query, key and value (B H, R, D), 0 where they are padding; and of the grid's blocks (B H, T, D): mean
        of the queries; mean of keys and of values weighted by the key mask, 0 where no weight is left; and weighted
        variance of the keys around their mean, by channel.
    """
    layout, (batch, _, heads, head_dim) = layout_for(grid, block_size, extra, query.device), query.shape
    programs, shared = _launch(layout, query, batch, heads, angles, key_mask)
    strides = {
        f"{name}_{axis}": x.stride(i) if x.shape[i] > 1 else 0
        for name, x in (("query", query), ("key", key), ("value", value))
        for i, axis in enumerate(("batch", "token", "head"))
    }
    alignment = math.gcd(16, *strides.values())
    rows = [allocate((batch * heads, len(layout.order), head_dim), query.dtype, query.device) for _ in range(3)]
    pooled = [allocate((batch * heads, layout.grid_blocks, head_dim), query.dtype, query.device) for _ in range(4)]
    prepare_kernel[programs](
        query=query,
        key=key,
        value=value,
        query_rows=rows[0],
        key_rows=rows[1],
        value_rows=rows[2],
        pooled_query=pooled[0],
        pooled_key=pooled[1],
        pooled_value=pooled[2],
        spread=pooled[3],
        ALIGNMENT=alignment,
        **{name: stride // alignment for name, stride in strides.items()},
        **shared,
    )
    return *rows, *pooled


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor pooled_key, Tensor pooled_value, Tensor? angles, "
    f"Tensor? key_mask, {GRID}, SymInt heads) -> (Tensor, Tensor, Tensor)"
)
def prepare_backward(query, key, value, pooled_key, pooled_value, angles, key_mask, grid, block_size, extra, heads):
    """Gradients of query, key and value (B, N, H, D) from those of rows and means, contiguous.

    Choosing blocks passes no gradient on, so there is none of the pooled query and the spread.
    """
    layout, batch = layout_for(grid, block_size, extra, query.device), len(query) // heads
    programs, shared = _launch(layout, query, batch, heads, angles, key_mask)
    shape = batch, len(layout.rows), heads, query.shape[-1]
    gradients = [allocate(shape, query.dtype, query.device) for _ in range(3)]
    prepare_backward_kernel[programs](
        query_rows=query,
        key_rows=key,
        value_rows=value,
        pooled_key=pooled_key,
        pooled_value=pooled_value,
        query=gradients[0],
        key=gradients[1],
        value=gradients[2],
        **shared,
    )
    return tuple(gradients)


@prepare.register_fake
def _(query, key, value, angles, key_mask, grid, block_size, extra):
    blocks, grid_blocks = block_counts(grid, block_size, extra)
    groups, head_dim = query.shape[0] * query.shape[2], query.shape[3]
    rows = [query.new_empty(groups, blocks * block_size, head_dim) for _ in range(3)]
    return *rows, *(query.new_empty(groups, grid_blocks, head_dim) for _ in range(4))


@prepare_backward.register_fake
def _(query, key, value, pooled_key, pooled_value, angles, key_mask, grid, block_size, extra, heads):
    shape = query.shape[0] // heads, math.prod(list(grid)) + extra, heads, query.shape[2]
    return tuple(query.new_empty(shape) for _ in range(3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, _, _, angles, key_mask, ctx.grid, ctx.block_size, ctx.extra = inputs
    ctx.heads = query.shape[2]
    ctx.save_for_backward(angles, key_mask)
    ctx.mark_non_differentiable(output[3], output[6])


def _differentiate(ctx: Any, query, key, value, _, pooled_key, pooled_value, __) -> tuple[Any, ...]:
    gradients = (x.contiguous() for x in (query, key, value, pooled_key, pooled_value))
    place = ctx.grid, ctx.block_size, ctx.extra
    return *prepare_backward(*gradients, *ctx.saved_tensors, *place, ctx.heads), *(None,) * 5


prepare.register_autograd(_differentiate, setup_context=_save)
prepare_backward.register_autograd(refuse_second_derivative)


@operator(f"(Tensor rows, Tensor? key_mask, {GRID}) -> (Tensor, Tensor)")
def block_weights(rows, key_mask, grid, block_size, extra):
    """Logs of the weights of rows (B, R), empty without a mask; and weights of the grid's blocks (1 or B, T)."""
    layout = layout_for(grid, block_size, extra, rows.device)
    if key_mask is None:
        return rows.new_empty(0, dtype=torch.float32), layout.valid[None, : layout.grid_blocks].float()
    of_rows = key_mask.index_select(1, layout.order.clamp_min(0)) * (layout.order >= 0)
    of_blocks = of_rows.unflatten(1, (-1, block_size)).sum(dim=-1)
    return of_rows.log(), of_blocks[:, : layout.grid_blocks].contiguous()


@block_weights.register_fake
def _(rows, key_mask, grid, block_size, extra):
    samples, of_rows = (1, [0]) if key_mask is None else (len(key_mask), [len(key_mask), rows.shape[1]])
    of_blocks = [samples, block_counts(grid, block_size, extra)[1]]
    return rows.new_empty(of_rows, dtype=torch.float32), rows.new_empty(of_blocks, dtype=torch.float32)
