"""MHLA's two operators: KV states of its blocks, and queries that read the mixed states of their blocks.

The state of a block is Σ w φ(k) vᵀ over its tokens, the normaliser state Σ w φ(k), with w the key mask. With f = φ(q)
and S and z the mixed states of the query's block, the output is fᵀS / fᵀz, or fᵀS to leave it as it is.

Each is the other's gradient. A gradient g of the quotient o gives ∂(fᵀS) = g / fᵀz and ∂(fᵀz) = -(g · o) / fᵀz for
every query, which are added up to gradients of the mixed states as keys and values are to states. Keys read the
gradient of their block's state as queries read states: ∂v = w φ(k)ᵀ ∂S.
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
def read_kernel(
    x,
    states,
    sums,
    members,
    starts,
    angles,
    heads,
    tokens,
    blocks,
    x_batch,
    x_token,
    x_head,
    angle_tokens,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    output=None,
    normalisers=None,
    output_gradient=None,
    normaliser_gradient=None,
    sum_weight=None,
    value=None,
    key_mask=None,
    x_gradient=None,
    beside_gradient=None,
    value_batch=0,
    value_token=0,
    value_head=0,
    gradient_batch=0,
    gradient_token=0,
    gradient_head=0,
):
    """Output of one tile ``x`` of the queries of one block; or, given its gradient, those of the queries and, beside
    them, of their features times the state. Given values instead, the tile is of keys, and states and sums are the
    gradients of theirs: the gradients of the keys and, beside them, of the values.
    """
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    d = tl.arange(0, padded(HEAD_DIM))
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        x += (batch * x_batch + head * x_head) * ALIGNMENT
        if angles is not None:
            angles += batch * angle_tokens * HEAD_DIM
        index, token, source = load_tokens(members, x, angles, begin, end, x_token * ALIGNMENT, eps, HEAD_DIM, BLOCK_M)
        there, base = source.there, whole * blocks + block
        divisors = sums if value is None else None
        product, normaliser = read_state(
            source, states, divisors, base, HEAD_DIM, BLOCK_N, FEATURE_MAP, ROPE, PRECISION
        )
        here = (batch * tokens + token) * heads + head
        slope = 1.0 / normaliser
        values = product if divisors is None else product * slope[:, None]
        if output is not None:
            if normalisers is not None:
                tl.store(normalisers + here, normaliser, mask=there)
            store_tile(output + here * HEAD_DIM, there, d, values, HEAD_DIM)
        else:
            if value is None:
                upstream = load_tile(output_gradient + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
                weight = normaliser
                if sums is not None:
                    weight = tl.load(normaliser_gradient + here, mask=there, other=0.0)
                    weight -= slope * tl.sum(upstream * values, 1)
                    tl.store(sum_weight + whole * tokens + index, weight, mask=there)
                    upstream *= slope[:, None]
                upstream = upstream.to(states.dtype.element_ty)
                beside = upstream
            else:
                weight = there.to(tl.float32)
                if key_mask is not None:
                    weight = tl.load(key_mask + batch * tokens + token, mask=there, other=0.0)
                value += (batch * value_batch + head * value_head) * ALIGNMENT
                upstream = load_tile(value + token * value_token * ALIGNMENT, there, d, HEAD_DIM).to(tl.float32)
                upstream = (upstream * weight[:, None]).to(states.dtype.element_ty)
                beside = values * weight[:, None]
            out = (batch * gradient_batch + head * gradient_head + token * gradient_token) * ALIGNMENT
            store_tile(beside_gradient + out, there, d, beside, HEAD_DIM)
            tile = (x_gradient + out, source, upstream, weight, states, sums, base)
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


def _launch(kernel: str, x: torch.Tensor, tables: Tables, shared: dict[str, Any], **arguments: Any) -> None:
    """Read with tokens ``x`` (B, N, H, D) of any strides but the last, by the tile of that name."""
    tile = tables.tile_of(kernel, x)
    programs = len(x) * x.shape[2], triton.cdiv(tables.longest, tile.m), tables.blocks
    read_kernel[programs](x=x, **arguments, **shared, **tile.arguments)


_STATES = f"Tensor key, Tensor value, Tensor? key_mask, Tensor? angles, {PLACE}, bool normalize"
_READ = f"Tensor query, Tensor states, Tensor? sums, Tensor? angles, {PLACE}, bool in_float32"


@operator(f"({_STATES}) -> (Tensor, Tensor)")
def block_states(key, value, key_mask, angles, grid, blocks, first, feature_map, eps, rope_before, normalize):
    """States and normaliser states of all blocks, see :func:`sum_states`; the second is empty without normaliser."""
    tables, _ = tables_of(key, grid, blocks, first)
    shared = shared_arguments(key, tables, angles, feature_map, eps, rope_before)
    states, sums = sum_states(key, value, tables, shared, normalize, key_mask)
    return states, key.new_empty(0, dtype=torch.float32) if sums is None else sums


@operator(f"(Tensor states_gradient, Tensor sums_gradient, {_STATES}) -> Tensor[]")
def block_states_backward(states_gradient, sums_gradient, key, value, key_mask, angles, *settings: Any):
    """Gradients of key and value, contiguous, in the type of the key."""
    *place, feature_map, eps, rope_before, normalize = settings
    tables, _ = tables_of(key, *place)
    key_gradient, value_gradient = (allocate(key.shape, key.dtype, key.device) for _ in range(2))
    _launch(
        "key_gradient",
        key,
        tables,
        shared_arguments(key, tables, angles, feature_map, eps, rope_before),
        states=states_gradient,
        sums=sums_gradient if normalize else None,
        value=value,
        key_mask=key_mask,
        x_gradient=key_gradient,
        beside_gradient=value_gradient,
        **strides_of(x=key, value=value, gradient=key_gradient),
    )
    return [key_gradient, value_gradient]


@block_states.register_fake
def _(key, value, key_mask, angles, grid, blocks, first, feature_map, eps, rope_before, normalize):
    shape = key.shape[0], key.shape[2], math.prod(list(blocks)), key.shape[3]
    states = key.new_empty((*shape, key.shape[3]), dtype=states_dtype(key.dtype))
    return states, key.new_empty(shape if normalize else (0,), dtype=torch.float32)


def _outputs(query, states, sums, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what :func:`read_states` returns."""
    dtype, normaliser = torch.float32 if settings[-1] else query.dtype, (0,) if sums is None else (*query.shape[:3], 1)
    return allocate(query.shape, dtype, query.device), allocate(normaliser, torch.float32, query.device)


@operator(f"({_READ}) -> (Tensor, Tensor)")
def read_states(query, states, sums, angles, grid, blocks, first, feature_map, eps, rope_before, in_float32):
    """Read the mixed states of each query's block.

    The query is (B, N, H, D) of any strides but the last; states (B, H, M, D, D) and normaliser states float32
    (B, H, M, D), if any, are mixed and of the blocks that its tokens may lie in; all but the query is contiguous.

    Returns:
        Output (B, N, H, D), contiguous, in the type of the query or ``in_float32``; and normaliser fᵀz, float32
        (B, N, H, 1), empty without.
    """
    _, tables = tables_of(query, grid, blocks, first)
    output, normalisers = _outputs(query, states, sums, in_float32)
    _launch(
        "read",
        query,
        tables,
        shared_arguments(query, tables, angles, feature_map, eps, rope_before),
        states=states,
        sums=sums,
        output=output,
        normalisers=None if sums is None else normalisers,
        **strides_of(x=query),
    )
    return output, normalisers


@operator(f"(Tensor output_gradient, Tensor normaliser_gradient, {_READ}) -> Tensor[]")
def read_states_backward(output_gradient, normaliser_gradient, query, states, sums, angles, *settings: Any):
    """Gradients of query, states and any sums."""
    *place, feature_map, eps, rope_before, _ = settings
    _, tables = tables_of(query, *place)
    shared = shared_arguments(query, tables, angles, feature_map, eps, rope_before)
    query_gradient, product_gradient = (
        allocate(query.shape, dtype, query.device) for dtype in (query.dtype, states.dtype)
    )
    sum_weight: torch.Tensor | None = None
    if sums is not None:
        sum_weight = allocate((len(query) * query.shape[2], query.shape[1]), torch.float32, query.device)
    _launch(
        "query_gradient",
        query,
        tables,
        shared,
        states=states,
        sums=sums,
        output_gradient=output_gradient,
        normaliser_gradient=None if sums is None else normaliser_gradient,
        sum_weight=sum_weight,
        x_gradient=query_gradient,
        beside_gradient=product_gradient,
        **strides_of(x=query, gradient=query_gradient),
    )
    of_states = sum_states(query, product_gradient, tables, shared, sums is not None, sum_weight=sum_weight)
    return [x for x in (query_gradient, *of_states) if x is not None]


read_states.register_fake(_outputs)
differentiable(block_states, block_states_backward, 2)
differentiable(read_states, read_states_backward, 3)
