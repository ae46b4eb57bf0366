"""KV states of the MHLA blocks: forward, backward and autograd.

The state of a block is Σ w φ(k) vᵀ over its tokens, the normaliser state Σ w φ(k), with w the key mask. Kernels find
the tokens of a block through tables, so that the same kernels read raster tokens, which they rotate themselves, and
prepared rows. The backward of :mod:`.read` adds up gradients of states by the same kernel.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .features import (
    PLACE,
    SIZES,
    Tables,
    load_features,
    load_tile,
    read_state,
    rows_like,
    shared_arguments,
    source_of,
    store_input_gradient,
    store_tile,
    strides_of,
    tables_of,
    tokens_first,
)
from .operators import allocate, operator, refuse_second_derivative
from .tiles import processors_of, states_dtype


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    key,
    value,
    angles,
    key_mask,
    sum_weight,
    members,
    places,
    starts,
    states,
    sums,
    heads,
    tokens,
    blocks,
    splits,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    angle_tokens,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N columns of the state of one split of one block."""
    TYPE: tl.constexpr = value.dtype.element_ty
    # batch row and head; heads run side by side, and share angles and cache lines
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    length = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_M) * BLOCK_M
    begin += split * length
    end = tl.minimum(begin + length, end)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    key += (batch * key_batch + head * key_head) * ALIGNMENT
    value += (batch * value_batch + head * value_head) * ALIGNMENT
    state = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    normaliser = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(begin, end, BLOCK_M):
        index = first + tl.arange(0, BLOCK_M)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        rows = key + member * key_token * ALIGNMENT
        turn = rows
        if angles is not None:
            turn = angles + (batch * angle_tokens + place) * HEAD_DIM
        source = source_of(rows, turn, there, eps, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE)
        features, plain = load_features(source, d, HEAD_DIM, FEATURE_MAP, ROPE, TYPE)
        weight = there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + place, mask=there, other=0.0)
            features = (features.to(tl.float32) * weight[:, None]).to(TYPE)
        values = load_tile(value + member * value_token * ALIGNMENT, there, e, HEAD_DIM)
        state = tl.dot(tl.trans(features), values, state, input_precision=PRECISION)
        if sums is not None:
            if sum_weight is not None:
                weight *= tl.load(sum_weight + whole * tokens + index, mask=there, other=0.0)
            normaliser += tl.sum(plain * weight[:, None], 0)
    base = (split * tl.num_programs(0) + whole) * blocks + block
    mask = (d < HEAD_DIM)[:, None] & (e < HEAD_DIM)[None, :]
    at = states + base * HEAD_DIM * HEAD_DIM + d[:, None] * HEAD_DIM + e[None, :]
    tl.store(at, state.to(states.dtype.element_ty), mask=mask)
    if sums is not None and tl.program_id(1) == 0:
        tl.store(sums + base * HEAD_DIM + d, normaliser, mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    states,
    sums,
    key,
    value,
    key_mask,
    key_gradient,
    value_gradient,
    members,
    places,
    starts,
    angles,
    heads,
    tokens,
    blocks,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    gradient_batch,
    gradient_token,
    gradient_head,
    angle_tokens,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of key and value for one tile of one block, from the gradient of the block's state."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_M)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        at = key + (batch * key_batch + head * key_head + member * key_token) * ALIGNMENT
        turn = at
        if angles is not None:
            turn = angles + (batch * angle_tokens + place) * HEAD_DIM
        source = source_of(at, turn, there, eps, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE)
        base = whole * blocks + block
        of_value, of_sum = read_state(
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_N, FEATURE_MAP, ROPE, PRECISION
        )
        weight = there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + place, mask=there, other=0.0)
        d = tl.arange(0, BLOCK_D)
        at = value + (batch * value_batch + head * value_head + member * value_token) * ALIGNMENT
        values = load_tile(at, there, d, HEAD_DIM).to(tl.float32)
        out = (batch * gradient_batch + head * gradient_head + member * gradient_token) * ALIGNMENT
        store_tile(value_gradient + out, there, d, of_value * weight[:, None], HEAD_DIM)
        row_product = tl.sum(of_value * values, 1)
        if sums is not None:
            row_product += of_sum
        values = (values * weight[:, None]).to(states.dtype.element_ty)
        tile = (key_gradient + out, source, values, weight, weight * row_product, states, sums, base)
        store_input_gradient(*tile, HEAD_DIM, BLOCK_D, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)


def sum_states(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: Tables,
    shared: dict[str, Any],
    normalize: bool,
    key_mask: torch.Tensor | None = None,
    sum_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add up the states of all blocks, in as many splits as fill the card, always in the same order.

    Args:
        key: (B, N, H, D) of any strides but the last, 1.
        value: likewise; may be any rows to be added up by the features of the key.
        tables: of the blocks.
        shared: what :func:`shared_arguments` returns for the key.
        normalize: whether normaliser states are wanted.
        key_mask: float32 (B, N), contiguous, in the order of the sequence.
        sum_weight: weight of a token and head in the normaliser state, float32 (B, H, N) in the order of
            ``tables.members``.

    Returns:
        States (B, H, M, D, D), bfloat16 for such keys, else float32; normaliser states float32 (B, H, M, D), or None.
    """
    batch, _, heads, head_dim = key.shape
    tile = tables.tile_of("states", value if value.dtype == torch.float32 else key)
    columns = triton.cdiv(head_dim, tile.n)
    # four tiles at least, or writing splits would be most of the work
    wanted = triton.cdiv(2 * processors_of(key.device), batch * heads * tables.blocks * columns)
    splits = max(1, min(wanted, tables.longest // (4 * tile.m)))
    shape, dtype = (splits, batch, heads, tables.blocks, head_dim), states_dtype(key.dtype)
    states = allocate((*shape, head_dim), dtype if splits == 1 else torch.float32, key.device)
    sums = allocate(shape, torch.float32, key.device) if normalize else None
    states_kernel[batch * heads, columns, tables.blocks * splits](
        key=key,
        value=value,
        key_mask=key_mask,
        sum_weight=sum_weight,
        states=states,
        sums=sums,
        splits=splits,
        **strides_of(key=key, value=value),
        **shared,
        **tile.arguments,
    )
    if splits == 1:
        return states[0], None if sums is None else sums[0]
    return states.sum(0).to(dtype), None if sums is None else sums.sum(0)


_INPUTS = f"Tensor key, Tensor value, Tensor? key_mask, Tensor? angles, {PLACE}, bool normalize"


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def block_states(
    key, value, key_mask, angles, grid, blocks, first, block_size, feature_map, eps, rope_before, normalize
):
    """States and normaliser states of all blocks, see :func:`sum_states`; without normaliser the second is empty."""
    key, value = tokens_first(key, block_size), tokens_first(value, block_size)
    tables, _ = tables_of(key, grid, blocks, first, block_size)
    shared = shared_arguments(key, tables, angles, feature_map, eps, rope_before)
    states, sums = sum_states(key, value, tables, shared, normalize, key_mask)
    return states, key.new_empty(0, dtype=torch.float32) if sums is None else sums


@operator(f"(Tensor states_gradient, Tensor sums_gradient, {_INPUTS}) -> (Tensor, Tensor)")
def block_states_backward(states_gradient, sums_gradient, key, value, key_mask, angles, *settings: Any):
    """Gradients of key and value, contiguous, in the type of the key; 0 in rows without a token."""
    grid, blocks, first, block_size, feature_map, eps, rope_before, normalize = settings
    key, value = tokens_first(key, block_size), tokens_first(value, block_size)
    tables, _ = tables_of(key, grid, blocks, first, block_size)
    key_gradient, value_gradient = (rows_like(key, tables, key.dtype) for _ in range(2))
    tile = tables.tile_of("key_gradient", key)
    key_gradient_kernel[len(key) * key.shape[2], triton.cdiv(tables.longest, tile.m), tables.blocks](
        states=states_gradient,
        sums=sums_gradient if normalize else None,
        key=key,
        value=value,
        key_mask=key_mask,
        key_gradient=key_gradient,
        value_gradient=value_gradient,
        **strides_of(key=key, value=value, gradient=key_gradient),
        **shared_arguments(key, tables, angles, feature_map, eps, rope_before),
        **tile.arguments,
    )
    return tuple(tokens_first(x, block_size).contiguous() for x in (key_gradient, value_gradient))


@block_states.register_fake
def _(key, value, key_mask, angles, grid, blocks, first, block_size, feature_map, eps, rope_before, normalize):
    shape = key.shape[0], key.shape[1 if block_size else 2], math.prod(list(blocks)), key.shape[3]
    states = key.new_empty((*shape, key.shape[3]), dtype=states_dtype(key.dtype))
    return states, key.new_empty(shape if normalize else (0,), dtype=torch.float32)


@block_states_backward.register_fake
def _(states_gradient, sums_gradient, key, *_: Any):
    return key.new_empty(key.shape), key.new_empty(key.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    key, value, key_mask, angles, *ctx.settings = inputs
    ctx.save_for_backward(key, value, key_mask, angles)


def _differentiate(ctx: Any, of_states: torch.Tensor, of_sums: torch.Tensor) -> tuple[Any, ...]:
    upstream = of_states.contiguous(), of_sums.contiguous()
    return *block_states_backward(*upstream, *ctx.saved_tensors, *ctx.settings), None, None, *[None] * len(ctx.settings)


block_states.register_autograd(_differentiate, setup_context=_save)
block_states_backward.register_autograd(refuse_second_derivative)
