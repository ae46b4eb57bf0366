"""KV states of the MHLA blocks.

The state of a block is Σ w φ(k) vᵀ over its tokens, the normaliser state Σ w φ(k), with w the key mask. The backward of
:mod:`.read` adds up gradients of states by the same kernel.
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
    load_tokens,
    read_state,
    shared_arguments,
    store_input_gradient,
    store_tile,
    strides_of,
    tables_of,
)
from .operators import allocate, differentiable, operator, padded
from .tiles import processors_of, states_dtype


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    key,
    value,
    angles,
    key_mask,
    sum_weight,
    members,
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
    d = tl.arange(0, padded(HEAD_DIM))
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    key += (batch * key_batch + head * key_head) * ALIGNMENT
    value += (batch * value_batch + head * value_head) * ALIGNMENT
    if angles is not None:
        angles += batch * angle_tokens * HEAD_DIM
    state = tl.zeros((padded(HEAD_DIM), BLOCK_N), tl.float32)
    normaliser = tl.zeros((padded(HEAD_DIM),), tl.float32)
    for first in tl.range(begin, end, BLOCK_M):
        index, token, source = load_tokens(
            members, key, angles, first, end, key_token * ALIGNMENT, eps, HEAD_DIM, BLOCK_M
        )
        features, plain = load_features(source, d, HEAD_DIM, FEATURE_MAP, ROPE, TYPE)
        weight = source.there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + token, mask=source.there, other=0.0)
            features = (features.to(tl.float32) * weight[:, None]).to(TYPE)
        values = load_tile(value + token * value_token * ALIGNMENT, source.there, e, HEAD_DIM)
        state = tl.dot(tl.trans(features), values, state, input_precision=PRECISION)
        if sums is not None:
            if sum_weight is not None:
                weight *= tl.load(sum_weight + whole * tokens + index, mask=source.there, other=0.0)
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
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of key and value for one tile of one block, from those of the block's states."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        key += (batch * key_batch + head * key_head) * ALIGNMENT
        value += (batch * value_batch + head * value_head) * ALIGNMENT
        if angles is not None:
            angles += batch * angle_tokens * HEAD_DIM
        _, token, source = load_tokens(members, key, angles, begin, end, key_token * ALIGNMENT, eps, HEAD_DIM, BLOCK_M)
        base = whole * blocks + block
        of_value, _ = read_state(source, states, None, base, HEAD_DIM, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)
        weight = source.there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + token, mask=source.there, other=0.0)
        d = tl.arange(0, padded(HEAD_DIM))
        values = load_tile(value + token * value_token * ALIGNMENT, source.there, d, HEAD_DIM).to(tl.float32)
        out = (batch * gradient_batch + head * gradient_head + token * gradient_token) * ALIGNMENT
        store_tile(value_gradient + out, source.there, d, of_value * weight[:, None], HEAD_DIM)
        values = (values * weight[:, None]).to(states.dtype.element_ty)
        tile = (key_gradient + out, source, values, weight, states, sums, base)
        store_input_gradient(*tile, HEAD_DIM, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)


def sum_states(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: Tables,
    shared: dict[str, Any],
    normalize: bool,
    key_mask: torch.Tensor | None = None,
    sum_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum the states of all blocks, in as many splits as fill the GPU, deterministically.

    Key and value are (B, N, H, D) of any strides but the last, the key mask float32 (B, N), and ``sum_weight``, that of
    a token and head in the normaliser state, float32 (B, H, N) in the order of ``tables.members``.

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
def block_states(key, value, key_mask, angles, grid, blocks, first, feature_map, eps, rope_before, normalize):
    """States and normaliser states of all blocks, see :func:`sum_states`; the second is empty without normaliser."""
    tables, _ = tables_of(key, grid, blocks, first)
    shared = shared_arguments(key, tables, angles, feature_map, eps, rope_before)
    states, sums = sum_states(key, value, tables, shared, normalize, key_mask)
    return states, key.new_empty(0, dtype=torch.float32) if sums is None else sums


@operator(f"(Tensor states_gradient, Tensor sums_gradient, {_INPUTS}) -> Tensor[]")
def block_states_backward(states_gradient, sums_gradient, key, value, key_mask, angles, *settings: Any):
    """Gradients of key and value, contiguous, in the type of the key."""
    *place, feature_map, eps, rope_before, normalize = settings
    tables, _ = tables_of(key, *place)
    key_gradient, value_gradient = (allocate(key.shape, key.dtype, key.device) for _ in range(2))
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
    return [key_gradient, value_gradient]


@block_states.register_fake
def _(key, value, key_mask, angles, grid, blocks, first, feature_map, eps, rope_before, normalize):
    shape = key.shape[0], key.shape[2], math.prod(list(blocks)), key.shape[3]
    states = key.new_empty((*shape, key.shape[3]), dtype=states_dtype(key.dtype))
    return states, key.new_empty(shape if normalize else (0,), dtype=torch.float32)


differentiable(block_states, block_states_backward, 2)
