"""One pass over query, key and value before the attention: RoPE, token order, means, states.

Queries follow the curve of :mod:`..layout`: a program takes one block of one head. Keys and values are sorted by
content (:mod:`..order`): a program takes one stretch, and finds in the caches what it reads again. The pass back is
operations of PyTorch, since gradients are taken in training alone.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import Layout, block_count, layout_of
from ..order import blocks_per_state, stretch_of
from ..rope import apply_rotary, rotary_table
from .features import rotate_pairs, strides_of
from .operators import allocate, operator, refuse_second_derivative
from .tiles import power_of_two, precision_of, states_dtype, tile_of

GRID = "SymInt[] grid, SymInt block_size, SymInt extra"
"""Arguments of an operator that finds the tables of the layout itself, so that torch.compile never traces them; extra
tokens come last."""


@triton.jit
def load_keys(
    key, angles, key_at, angles_at, exists, channel, D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Some channels of keys after RoPE, float32 (ROWS, CHUNK), 0 where there is none."""
    mask = exists[:, None] & (channel < D)[None, :]
    turned = tl.load(key + key_at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if angles is not None:
        both = tl.load(angles + angles_at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(both, (ROWS, CHUNK // 2, 2)))
        turned = rotate_pairs(turned, cos, sin)
    return turned


@triton.jit
def spread_rows(values, LENGTH: tl.constexpr):
    """One value of every part (parts,), for all of its rows: (parts * LENGTH,)."""
    return tl.reshape(tl.broadcast_to(values[:, None], (values.shape[0], LENGTH)), (values.shape[0] * LENGTH,))


@triton.jit
def sorted_by(column, place, PARTS: tl.constexpr, LENGTH: tl.constexpr):
    """Places (PARTS * LENGTH,) in the order of a column, part by part; of equal ones the first place comes first."""
    bits = (column + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    # numbers whose order is that of the column, with the place in the lower half
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    both = tl.sort(tl.reshape((ordered << 32) | place.to(tl.int64), (PARTS, LENGTH)), 1)
    return tl.reshape((both & 0xFFFFFFFF).to(tl.int32), (PARTS * LENGTH,))


@triton.jit
def weights_of(row_tokens, row, inside, key_mask):
    """Tokens of rows and their weights by their sample's key mask; -1 and 0 of padding and of rows not inside."""
    token = tl.load(row_tokens + row, mask=inside, other=None if inside is None else -1)
    weight = (token >= 0).to(tl.float32)
    if key_mask is not None:
        weight = tl.load(key_mask + token, mask=token >= 0, other=0.0)
    return token, weight


@triton.jit
def deciding_column(
    key,
    angles,
    key_at,
    angles_at,
    is_key,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the channel that varies most in every part, (PARTS * LENGTH,), infinite where there is no key."""
    real = is_key.to(tl.float32)
    count = tl.maximum(tl.sum(tl.reshape(real, (PARTS, LENGTH)), 1), 1.0)
    largest = tl.full((PARTS,), -1.0, tl.float32)
    column = tl.zeros((PARTS * LENGTH,), tl.float32)
    for first in range(0, D, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        keys = load_keys(key, angles, key_at, angles_at, is_key, channel, D, PARTS * LENGTH, CHUNK)
        parts = tl.reshape(keys, (PARTS, LENGTH, CHUNK))
        apart = parts - (tl.sum(parts, 1) / count[:, None])[:, None, :]
        squares = apart * apart * tl.reshape(real, (PARTS, LENGTH))[:, :, None]
        variance, which = tl.max(tl.sum(squares, 1), 1, return_indices=True)
        is_chosen = tl.arange(0, CHUNK)[None, :] == spread_rows(which, LENGTH)[:, None]
        column = tl.where(spread_rows(variance > largest, LENGTH), tl.sum(tl.where(is_chosen, keys, 0.0), 1), column)
        largest = tl.maximum(largest, variance)
    return tl.where(is_key & (column == column), column, float("inf"))  # NaN would come after what is not a key


@triton.jit
def apart_from_mean(x, row, channel, share, HEAD_DIM: tl.constexpr):
    """Some channels of rows less their mean by shares (rows, 1), float32."""
    at = row[:, None] * HEAD_DIM + channel[None, :]
    found = tl.load(x + at, mask=(channel < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    return found - tl.sum(found * share, 0)[None, :]


@triton.jit(
    do_not_specialize=[
        *("key_batch", "key_token", "key_head", "value_batch", "value_token", "value_head"),
        *("angle_tokens", "tokens", "rows", "grid_blocks"),
    ]
)
def prepare_kernel(
    key,
    value,
    angles,
    key_mask,
    order,
    key_rows,
    value_rows,
    row_tokens,
    pooled_key,
    pooled_value,
    spread,
    states,
    row_bias,
    block_weight,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    angle_tokens,
    tokens,
    rows,
    grid_blocks,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCH: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch of one head, of the grid or of extra tokens, which are not sorted: halved LEVELS times.

    Of queries, which come without a value, a block is a stretch.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = batch * tl.num_programs(0) + head
    of_grid = tl.cdiv(grid_blocks * BLOCK, STRETCH)
    is_grid = tl.program_id(1) < of_grid
    start = tl.where(is_grid, tl.program_id(1), tl.program_id(1) - of_grid) * STRETCH
    start += tl.where(is_grid, 0, grid_blocks * BLOCK)
    end = tl.minimum(start + STRETCH, tl.where(is_grid, grid_blocks * BLOCK, rows))
    PARTS: tl.constexpr = STRETCH // BLOCK
    key += batch * key_batch * ALIGNMENT + head * key_head * ALIGNMENT
    if value is not None:
        value += batch * value_batch * ALIGNMENT + head * value_head * ALIGNMENT
    if angles is not None:
        angles += batch * angle_tokens * D
    if key_mask is not None:
        key_mask += batch * tokens
    place = tl.arange(0, STRETCH)
    for level in tl.static_range(LEVELS):
        if is_grid:
            token, weight = weights_of(order, start + place, start + place < end, key_mask)
            at = tl.maximum(token, 0).to(tl.int64)
            column = deciding_column(
                key, angles, at * key_token * ALIGNMENT, at * D, weight > 0, D, 2**level, STRETCH // 2**level, CHUNK
            )
            place = sorted_by(column, place, 2**level, STRETCH // 2**level)
    token, weight = weights_of(order, start + place, start + place < end, key_mask)
    exists, at = token >= 0, tl.maximum(token, 0).to(tl.int64)
    total = tl.sum(tl.reshape(weight, (PARTS, BLOCK)), 1)
    block = start // BLOCK + tl.arange(0, PARTS)
    if value is not None:
        tl.store(block_weight + group * grid_blocks + block, total, mask=block < grid_blocks)
    share = tl.reshape(weight, (PARTS, BLOCK)) / tl.where(total > 0, total, 1.0)[:, None]
    row = start + tl.arange(0, STRETCH)
    inside = row < end
    if value is not None:
        tl.store(row_tokens + group * rows + row, token, mask=inside)
    if row_bias is not None:
        log_weight = tl.where(weight > 0, tl.log(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(row_bias + group * rows + row, log_weight, mask=inside)
    for first in range(0, D, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        rows_at = (group * rows + row)[:, None] * D + channel[None, :]
        pooled_at = (group * grid_blocks + block)[:, None] * D + channel[None, :]
        mask = inside[:, None] & (channel < D)[None, :]
        pooled_mask = (block < grid_blocks)[:, None] & (channel < D)[None, :]
        keys = load_keys(key, angles, at * key_token * ALIGNMENT, at * D, exists, channel, D, STRETCH, CHUNK)
        if value is not None:
            there = exists[:, None] & (channel < D)[None, :]
            values_at = (at * value_token * ALIGNMENT)[:, None] + channel[None, :]
            values = tl.load(value + values_at, mask=there, other=0.0)
        tl.store(key_rows + rows_at, keys.to(key.dtype.element_ty), mask=mask)
        if value is not None:
            tl.store(value_rows + rows_at, values, mask=mask)
        parts = tl.reshape(keys, (PARTS, BLOCK, CHUNK))
        mean = tl.sum(parts * share[:, :, None], 1)
        tl.store(pooled_key + pooled_at, mean.to(key.dtype.element_ty), mask=pooled_mask)
        if value is not None:
            apart = parts - mean[:, None, :]
            variance = tl.sum(apart * apart * share[:, :, None], 1)
            tl.store(spread + pooled_at, variance.to(spread.dtype.element_ty), mask=pooled_mask)
            mean = tl.sum(tl.reshape(values.to(tl.float32), (PARTS, BLOCK, CHUNK)) * share[:, :, None], 1)
            tl.store(pooled_value + pooled_at, mean.to(value.dtype.element_ty), mask=pooled_mask)
    if states is not None:  # noqa: SIM102 - the compiler knows this one, and not the other
        if is_grid:  # the mean state of the blocks, a square part with SIDE channels at a time
            tl.debug_barrier()  # the rows that this program has just written are read by other threads of it
            key_rows += (group * rows + start) * D
            value_rows += (group * rows + start) * D
            row_tokens += group * rows + start
            states += (group * of_grid + tl.program_id(1)) * D * D
            with_weight = tl.maximum(tl.sum((total > 0).to(tl.int32)), 1)
            number = key_rows.dtype.element_ty
            for part in range(0, tl.cdiv(D, SIDE) * tl.cdiv(D, SIDE)):
                key_channel = part // tl.cdiv(D, SIDE) * SIDE + tl.arange(0, SIDE)
                value_channel = part % tl.cdiv(D, SIDE) * SIDE + tl.arange(0, SIDE)
                state = tl.zeros((SIDE, SIDE), tl.float32)
                for of_block in range(0, (end - start) // BLOCK):
                    own_row = of_block * BLOCK + tl.arange(0, BLOCK)
                    _, own = weights_of(row_tokens, own_row, None, key_mask)
                    own_total = tl.sum(own)
                    own = (own / tl.where(own_total > 0, own_total, 1.0))[:, None]
                    k = apart_from_mean(key_rows, own_row, key_channel, own, D)
                    v = apart_from_mean(value_rows, own_row, value_channel, own, D)
                    # times BLOCK, so that half precision loses no small shares
                    k = (k * own * BLOCK).to(number)
                    state = tl.dot(tl.trans(k), v.to(number), state, input_precision=PRECISION)
                state /= BLOCK * with_weight
                state_at = key_channel[:, None] * D + value_channel[None, :]
                is_channel = (key_channel < D)[:, None] & (value_channel < D)[None, :]
                tl.store(states + state_at, state.to(states.dtype.element_ty), mask=is_channel)


_PLACE = "SymInt[] grid, SymInt block_size, SymInt key_block_size, SymInt extra"


def _outputs(query, key_mask, grid, block_size, key_block_size, extra, with_states) -> tuple[torch.Tensor, ...]:
    """Allocate what :func:`prepare` returns."""
    groups, head_dim, dtype = query.shape[0] * query.shape[2], query.shape[3], query.dtype
    keys_of_grid, number = block_count(grid, key_block_size), states_dtype(dtype)
    stretches = block_count(grid, stretch_of(key_block_size)) if with_states else 0
    rows = groups, block_count(grid, key_block_size, extra) * key_block_size
    shapes = (
        ((groups, block_count(grid, block_size, extra) * block_size, head_dim), dtype),
        *[((*rows, head_dim), dtype)] * 2,
        ((groups, block_count(grid, block_size), head_dim), dtype),
        *[((groups, keys_of_grid, head_dim), x) for x in (dtype, dtype, number)],
        (rows, torch.int32),
        ((groups, stretches, head_dim, head_dim), number),
        ((0,) if key_mask is None else rows, torch.float32),
        ((groups, keys_of_grid), torch.float32),
    )
    return tuple(allocate(shape, x, query.device) for shape, x in shapes)


@operator(
    f"(Tensor query, Tensor key, Tensor value, Tensor? angles, Tensor? key_mask, {_PLACE}, bool by_content, "
    f"bool with_states) -> ({', '.join(['Tensor'] * 11)})"
)
def prepare(query, key, value, angles, key_mask, grid, block_size, key_block_size, extra, by_content, with_states):
    """Rotate query and key, put all three in the order of their blocks, and pool the blocks of the grid.

    Query, key and value are (B, N, H, D) of any strides but the last, the ``extra`` tokens last; ``angles`` are those
    of :func:`.features.shared_arguments`; ``key_mask`` is float32 (B, N). Blocks of queries and of keys have powers of
    two of rows, 16 at least.

    Returns:
        Rows of query (B H, Q, D), of key and of value (B H, R, D), 0 where they are padding. Of the grid's blocks
        (B H, T, D): mean of the queries; mean of keys and of values weighted by the key mask, 0 where no weight is
        left; weighted variance of the keys by channel, in the type of states. The token of every row of keys, int32
        (B H, R), -1 of padding. The mean states of stretches (B H, stretches, D, D),
        :func:`mhla_diffusers.attention.sparse.stretch_states`, none without ``with_states``. Float32: logs of the
        weights of the rows of keys (B H, R), empty without a mask; and weights of the blocks of keys (B H, T).
    """
    (batch, _, heads, head_dim), device = query.shape, query.device
    queries, keys = (layout_of(tuple(grid), size, extra, device) for size in (block_size, key_block_size))
    found = _outputs(query, key_mask, grid, block_size, key_block_size, extra, with_states)
    query_rows, key_rows, value_rows, pooled_query, pooled_key, pooled_value, spread, row_tokens, states, *_ = found
    angles = None if angles is None else angles.contiguous()

    def launch(kernel: str, x: torch.Tensor, layout: Layout, stretch: int, levels: int, **more: Any) -> None:
        tile = tile_of(kernel, x, most_n=power_of_two(head_dim))
        of_extra = layout.blocks - layout.grid_blocks
        stretches = sum(triton.cdiv(n * layout.block_size, stretch) for n in (layout.grid_blocks, of_extra))
        prepare_kernel[heads, stretches, batch](
            key=x,
            angles=angles,
            angle_tokens=0 if angles is None or len(angles) == 1 else angles.shape[1],
            order=layout.order,
            tokens=len(layout.rows),
            rows=len(layout.order),
            grid_blocks=layout.grid_blocks,
            D=head_dim,
            BLOCK=layout.block_size,
            STRETCH=stretch,
            LEVELS=levels,
            CHUNK=tile.n,
            SIDE=min(tile.m, power_of_two(head_dim)),
            PRECISION=precision_of(x),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **more,
        )

    of_values = "value", "value_rows", "row_tokens", "pooled_value", "spread", "block_weight"
    outputs: dict[str, Any] = {"key_rows": query_rows, "pooled_key": pooled_query}
    absent = dict.fromkeys((*of_values, "key_mask", "states", "row_bias"))
    launch("prepare_queries", query, queries, block_size, 0, **outputs, **absent, **strides_of(key=query, value=query))
    stretch = stretch_of(key_block_size) if by_content or with_states else key_block_size
    launch(
        "prepare_keys",
        key,
        keys,
        stretch,
        (stretch // key_block_size).bit_length() - 1 if by_content else 0,
        value=value,
        key_mask=None if key_mask is None else key_mask.contiguous(),
        key_rows=key_rows,
        value_rows=value_rows,
        row_tokens=row_tokens,
        pooled_key=pooled_key,
        pooled_value=pooled_value,
        spread=spread,
        states=states if with_states else None,
        row_bias=None if key_mask is None else found[9],
        block_weight=found[10],
        **strides_of(key=key, value=value),
    )
    return found


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor pooled_query, Tensor pooled_key, Tensor pooled_value, "
    "Tensor spread, Tensor states, Tensor key_rows, Tensor value_rows, Tensor row_tokens, Tensor bias, Tensor weight, "
    f"Tensor? angles, {_PLACE}, SymInt heads) -> (Tensor, Tensor, Tensor)"
)
def prepare_backward(query, key, value, pooled_query, pooled_key, pooled_value, spread, states, *arguments: Any):
    """Gradients of query, key and value (B, N, H, D), from those of all that :func:`prepare` returns of them.

    A state Σ w (k - k̄) (v - v̄)ᵀ with Σ w = 1 gives a key w ∂S (v - v̄) and a value w ∂Sᵀ (k - k̄); the variance
    Σ w (k - k̄)² gives a key 2 w ∂ (k - k̄). Gradients through the means cancel, since deviations add up to 0.
    """
    key_rows, value_rows, row_tokens, bias, weight, angles, grid, block_size, key_block_size, extra, heads = arguments
    dtype, queries = query.dtype, layout_of(tuple(grid), block_size, extra, query.device)
    query, key, value, pooled_query, pooled_key, pooled_value, spread, states = (
        x.float() for x in (query, key, value, pooled_query, pooled_key, pooled_value, spread, states)
    )
    tokens, blocks, by_block = len(queries.rows), weight.shape[1], (-1, key_block_size)
    of_query = pooled_query[:, :, None] / queries.valid[: queries.grid_blocks, None, None]
    of_query = _with_means(query, of_query.expand(-1, -1, block_size, -1))

    own = bias.exp() if bias.ndim == 2 else (row_tokens >= 0).float()
    share = own[:, : blocks * key_block_size].unflatten(1, by_block) / weight.where(weight > 0, 1)[..., None]
    share = share[..., None]
    keys, values = (x[:, : blocks * key_block_size].float().unflatten(1, by_block) for x in (key_rows, value_rows))
    keys, values = (x - share.mT @ x for x in (keys, values))
    of_key, of_value = pooled_key[:, :, None] + 2 * spread[:, :, None] * keys, pooled_value[:, :, None]
    if states.shape[1]:
        per_stretch = blocks_per_state(key_block_size)

        def by_stretch(x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -blocks % per_stretch))
            return x.unflatten(1, (-1, per_stretch)).flatten(2, 3)

        count = by_stretch((weight > 0)[..., None, None]).sum(dim=2, keepdim=True).clamp_min(1)
        of_state = states / count
        read = by_stretch(values) @ of_state.mT, by_stretch(keys) @ of_state
        from_key, from_value = (x.flatten(1, 2)[:, : blocks * key_block_size].unflatten(1, by_block) for x in read)
        of_key, of_value = of_key + from_key, of_value + from_value

    rows = row_tokens.new_empty(len(key), tokens + 1, dtype=torch.int64)  # the last of padding
    every_row = torch.arange(row_tokens.shape[1], device=key.device).expand_as(row_tokens)
    rows = rows.scatter_(1, row_tokens.where(row_tokens >= 0, tokens).long(), every_row)[:, :tokens]
    found = (
        _in_sequence(of_query, queries.rows[None], heads, angles),
        _in_sequence(_with_means(key, share * of_key), rows, heads, angles),
        _in_sequence(_with_means(value, share * of_value), rows, heads, None),
    )
    return tuple(x.to(dtype) for x in found)


def _with_means(rows: torch.Tensor, of_blocks: torch.Tensor) -> torch.Tensor:
    """Gradients of rows (G, R, D), and of rows of the grid's blocks (G, T, L, D): their sum, float32."""
    of_grid = of_blocks.flatten(1, 2)
    return rows + torch.nn.functional.pad(of_grid, (0, 0, 0, rows.shape[1] - of_grid.shape[1]))


def _in_sequence(rows: torch.Tensor, places: torch.Tensor, heads: int, angles: torch.Tensor | None) -> torch.Tensor:
    """Rows (G, R, D) of every token by their places (G or 1, N), rotated back by any angles: (B, N, H, D)."""
    places = places + torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
    found = rows.flatten(0, 1).index_select(0, places.flatten()).view(-1, heads, places.shape[1], rows.shape[2])
    if angles is not None:
        back = rotary_table((angles, -angles))
        assert back is not None
        found = apply_rotary(found, back.transpose(1, 2))
    return found.transpose(1, 2).contiguous()


@prepare.register_fake
def _(query, key, value, angles, key_mask, grid, block_size, key_block_size, extra, by_content, with_states):
    return _outputs(query, key_mask, grid, block_size, key_block_size, extra, with_states)


@prepare_backward.register_fake
def _(query, *arguments: Any):
    grid, _, _, extra, heads = arguments[-5:]
    shape = query.shape[0] // heads, math.prod(list(grid)) + extra, heads, query.shape[2]
    return tuple(query.new_empty(shape) for _ in range(3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, _, _, angles, _, *ctx.place, _, _ = inputs
    ctx.heads = query.shape[2]
    ctx.save_for_backward(output[1], output[2], output[7], output[9], output[10], angles)
    ctx.mark_non_differentiable(output[7], *output[9:])


def _differentiate(
    ctx: Any, query, key, value, pooled_query, pooled_key, pooled_value, spread, _, states, *__: Any
) -> tuple[Any, ...]:
    gradients = query, key, value, pooled_query, pooled_key, pooled_value, spread, states
    return *prepare_backward(*gradients, *ctx.saved_tensors, *ctx.place, ctx.heads), *(None,) * 8


prepare.register_autograd(_differentiate, setup_context=_save)
prepare_backward.register_autograd(refuse_second_derivative)
