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

from ..layout import Layout, layout_of
from .launch import Launch, allocate, architecture_of, power_of_two, refuse_second_derivative


class Tiles(NamedTuple):
    """How the kernels of this file are cut."""

    heads: int
    """Of one program, one after the other."""
    line: int
    """Bytes of a row of one head that a program takes: pairs turn and channels are pooled each for itself."""
    warps: int


TILES = {"default": Tiles(heads=4, line=128, warps=4)}
"""By architecture."""
_OUTPUTS = ("query_rows", "key_rows", "value_rows", "pooled_query", "pooled_key", "pooled_value", "spread")


@triton.jit
def rotate(x, cos, sin, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Channel pairs (2i, 2i + 1) of ``x`` (BLOCK, CHUNK), float32, rotated by angles (BLOCK, CHUNK / 2)."""
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
    layout: Layout,
    architecture: str | None = None,
) -> Launch:
    """The launch that writes what :func:`prepare` returns; query, key and value have any strides but the last, 1."""
    batch, _, heads, head_dim = query.shape
    rows, pooled = (batch * heads, len(layout.order), head_dim), (batch * heads, layout.grid_blocks, head_dim)
    strides = {
        f"{name}_{axis}": x.stride(i) if x.shape[i] > 1 else 0
        for name, x in (("query", query), ("key", key), ("value", value))
        for i, axis in enumerate(("batch", "token", "head"))
    }
    alignment = math.gcd(16, *strides.values())
    arguments = {
        **{"query": query, "key": key, "value": value, "ALIGNMENT": alignment},
        **{name: stride // alignment for name, stride in strides.items()},
        **{name: allocate(rows if name.endswith("rows") else pooled, query.dtype, query.device) for name in _OUTPUTS},
    }
    return _launch(prepare_kernel, arguments, angles, key_mask, layout, query.shape, architecture)


def prepare_backward_launch(
    gradients: Sequence[torch.Tensor | None],
    angles: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    layout: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    architecture: str | None = None,
) -> Launch:
    """The launch that writes the gradients ``query``, ``key`` and ``value``, contiguous, of this shape and type.

    ``gradients`` are contiguous, of the three rows and of pooled key and value; None for both where nothing read them.
    Choosing blocks passes no gradient on, so there is none of the pooled query and the spread.
    """
    names = "query_rows", "key_rows", "value_rows", "pooled_key", "pooled_value"
    arguments = dict(zip(names, gradients, strict=True))
    arguments |= {name: allocate(shape, dtype, layout.order.device) for name in ("query", "key", "value")}
    return _launch(prepare_backward_kernel, arguments, angles, key_mask, layout, shape, architecture)


def _launch(
    kernel: Any,
    arguments: dict[str, Any],
    angles: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    layout: Layout,
    shape: Sequence[int],
    architecture: str | None,
) -> Launch:
    """With what both kernels take; ``shape`` is that of query, key and value."""
    batch, tokens, heads, head_dim = shape
    card = architecture or architecture_of(layout.order.device)
    tiles = TILES.get(card, TILES["default"])
    chunk = min(tiles.line // arguments["query_rows"].element_size(), power_of_two(head_dim))
    chunks = -(-head_dim // chunk)
    arguments = arguments | {
        "angles": angles.contiguous() if angles is not None else None,
        "angle_tokens": angles.shape[1] if angles is not None and angles.shape[0] > 1 else 0,
        "key_mask": key_mask.contiguous() if key_mask is not None else None,
        **{"order": layout.order, "valid": layout.valid, "blocks": layout.blocks, "grid_blocks": layout.grid_blocks},
        **{"tokens": tokens, "heads": heads, "D": head_dim, "BLOCK": layout.block_size},
        **{"CHUNK": chunk, "CHUNKS": chunks, "HEADS": tiles.heads},
    }
    return Launch(kernel, (-(-heads // tiles.heads) * chunks, layout.blocks, batch), arguments, tiles.warps, stages=1)


GRID = "SymInt[] grid, SymInt block_size, SymInt extra"
"""Of an operator that reads tables of the layout: it finds them inside, so that torch.compile never traces them."""


def layout_for(grid: Sequence[int], block_size: int, extra: int, device: torch.device) -> Layout:
    """The layout of an operator's tokens, the extra ones last."""
    return layout_of(tuple(grid), block_size, extra, str(device))


@torch.library.custom_op(
    "mhla_diffusers::prepare_blocks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? key_mask, {GRID}) -> "
    f"({', '.join(['Tensor'] * 7)})",
)
def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    extra: int,
) -> tuple[torch.Tensor, ...]:
    """Rotate query and key, put all three in the order of the blocks, and pool the blocks of the grid.

    Args:
        query: (B, N, H, D), float32, bfloat16 or float16.
        key: as ``query``.
        value: as ``query``.
        table: (1 or B, N, 1, D), the cosine of a channel pair at its first channel and its sine at the second; None
            without RoPE.
        key_mask: float32 (B, N), weights of the keys in the means; None for 1 everywhere.
        grid: token grid.
        block_size: rows of a block, a power of two, 16 at least.
        extra: extra tokens, the last of the N.

    Returns:
        Rows of query, key and value (B * H, R, D), 0 where they are padding; and of the grid's blocks (B * H, T, D):
        mean of the queries; mean of keys and of values weighted by the key mask, 0 where no weight is left; and
        weighted variance of the keys around their mean, by channel.
    """
    launch = prepare_launch(query, key, value, table, key_mask, layout_for(grid, block_size, extra, query.device))
    launch.run()
    return tuple(launch.arguments[name] for name in _OUTPUTS)


@torch.library.custom_op(
    "mhla_diffusers::prepare_blocks_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? pooled_key, Tensor? pooled_value, Tensor? table, "
    f"Tensor? key_mask, {GRID}, SymInt[] shape) -> (Tensor, Tensor, Tensor)",
)
def prepare_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value (B, N, H, D) from those of rows and means."""
    *gradients, table, key_mask, grid, block_size, extra, shape = inputs
    layout = layout_for(grid, block_size, extra, gradients[0].device)
    launch = prepare_backward_launch(gradients, table, key_mask, layout, shape, gradients[0].dtype)
    launch.run()
    return tuple(launch.arguments[name] for name in ("query", "key", "value"))


@prepare.register_fake
def _prepared_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, grid, block_size, extra = arguments
    blocks, grid_blocks = block_counts(grid, block_size, extra)
    batch, _, heads, head_dim = query.shape
    rows = [(batch * heads, blocks * block_size, head_dim)] * 3 + [(batch * heads, grid_blocks, head_dim)] * 4
    return tuple(query.new_empty(shape) for shape in rows)


def block_counts(grid: Sequence[int], block_size: int, extra: int) -> tuple[int, int]:
    """Blocks of all tokens, and of the grid's."""
    of_grid = (math.prod(list(grid)) + block_size - 1) // block_size
    return of_grid + (extra + block_size - 1) // block_size, of_grid


@prepare_backward.register_fake
def _gradient_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(query.new_empty(tuple(arguments[-1])) for _ in range(3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, _, _, table, key_mask, *ctx.place = inputs
    ctx.save_for_backward(table, key_mask)
    ctx.shape = query.shape
    ctx.mark_non_differentiable(output[3], output[6])
    ctx.set_materialize_grads(False)
    ctx.rows = output[0].shape


def _differentiate(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    given = next((x for x in gradients if x is not None), None)
    if given is None:
        return (None,) * 8
    of_rows = (given.new_zeros(ctx.rows) if x is None else x.contiguous() for x in gradients[:3])
    of_means: list[torch.Tensor | None] = [gradients[4], gradients[5]]
    if any(x is not None for x in of_means):
        shape = next(x.shape for x in of_means if x is not None)
        of_means = [given.new_zeros(shape) if x is None else x.contiguous() for x in of_means]
    found = prepare_backward(*of_rows, *of_means, *ctx.saved_tensors, *ctx.place, list(ctx.shape))
    return *found, *(None,) * 5


prepare.register_autograd(_differentiate, setup_context=_save)
prepare_backward.register_autograd(refuse_second_derivative)


@torch.library.custom_op(
    "mhla_diffusers::block_weights",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor? key_mask, {GRID}) -> (Tensor, Tensor)",
)
def weights(
    rows: torch.Tensor, key_mask: torch.Tensor | None, grid: Sequence[int], block_size: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logs of the weights of rows (B, R), of none without a mask; and weights of the grid's blocks (1 or B, T)."""
    layout = layout_for(grid, block_size, extra, rows.device)
    if key_mask is None:
        return rows.new_empty(0, dtype=torch.float32), layout.valid[None, : layout.grid_blocks].float()
    of_rows = key_mask.index_select(1, layout.order.clamp_min(0)) * (layout.order >= 0)
    of_blocks = of_rows.unflatten(1, (-1, block_size)).sum(dim=-1)
    return of_rows.log(), of_blocks[:, : layout.grid_blocks].contiguous()


@weights.register_fake
def _weight_shapes(
    rows: torch.Tensor, key_mask: torch.Tensor | None, grid: Sequence[int], block_size: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, of_rows = (1, [0]) if key_mask is None else (len(key_mask), [len(key_mask), rows.shape[1]])
    of_blocks = [samples, block_counts(grid, block_size, extra)[1]]
    return rows.new_empty(of_rows, dtype=torch.float32), rows.new_empty(of_blocks, dtype=torch.float32)
