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
    Blocks,
    Features,
    constants_of,
    load_features,
    load_tile,
    open_tile,
    read_state,
    rows_like,
    source_of,
    store_input_gradient,
    store_tile,
    strides_of,
    tables_and_features,
    tile_of,
    tokens_first,
)
from .launch import Launch, allocate, architecture_of, processors_of, refuse_second_derivative


def states_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of KV states; sums over a block pass the largest number of half precision."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def states_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    features: Features,
    key_mask: torch.Tensor | None,
    normalize: bool,
    sum_weight: torch.Tensor | None = None,
    architecture: str | None = None,
) -> Launch:
    """States of all blocks, in as many parts as fill the card.

    Key and value are (B, N, H, D) of any strides but the last, which is 1; the value may be any rows to be added up by
    the features of the key. ``key_mask`` is float32 (B, N), contiguous, in the order of the sequence; ``sum_weight``
    that of a token and head in the normaliser state, float32 (B, H, N) in the order of ``blocks.members``.
    ``architecture`` is that of a card that is not there.
    """
    architecture = architecture or architecture_of(key.device)
    batch, _, heads, head_dim = key.shape
    tile = tile_of("states", value if value.dtype == torch.float32 else key, blocks.longest, architecture)
    columns = triton.cdiv(head_dim, tile.channels)
    # four tiles at least, or writing parts would be most of the work
    wanted = triton.cdiv(2 * processors_of(key.device, architecture), batch * heads * len(blocks) * columns)
    parts = max(1, min(wanted, blocks.longest // (4 * tile.tokens)))
    dtype = states_dtype(key.dtype) if parts == 1 else torch.float32
    shape = (parts, batch, heads, len(blocks), head_dim)
    arguments = {
        **{"key": key, "value": value, "key_mask": key_mask, "sum_weight": sum_weight},
        "states": allocate((*shape, head_dim), dtype, key.device),
        "sums": allocate(shape, torch.float32, key.device) if normalize else None,
        **{"heads": heads, "parts": parts, "BLOCK_T": tile.tokens, "BLOCK_E": tile.channels},
        **blocks.arguments,
        **features.arguments,
        **strides_of(key=key, value=value),
        **constants_of(key, architecture),
    }
    return Launch(states_kernel, (batch * heads, columns, len(blocks) * parts), arguments, tile.warps, tile.stages)


def states_of(launch: Launch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a launch of :func:`states_launch` and add up its parts, always in the same order.

    Returns:
        States (B, H, M, D, D), bfloat16 for such keys, else float32; and normaliser states float32 (B, H, M, D), or
        None.
    """
    launch.run()
    states, sums = launch.arguments["states"], launch.arguments["sums"]
    if len(states) == 1:
        return states[0], None if sums is None else sums[0]
    return states.sum(0).to(states_dtype(launch.arguments["key"].dtype)), None if sums is None else sums.sum(0)


def key_gradient_launch(
    states_gradient: torch.Tensor,
    sums_gradient: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    features: Features,
    key_mask: torch.Tensor | None,
    architecture: str | None = None,
) -> Launch:
    """The launch that writes ``key_gradient`` and ``value_gradient``, given what :func:`states_launch` was.

    They are in the type of the key and the order of its axes in memory, 0 in rows without a token. The gradients of the
    states are (B, H, M, D, D) in their type, those of the normaliser states float32 (B, H, M, D) or None; contiguous.
    """
    architecture = architecture or architecture_of(key.device)
    tile = tile_of("key_gradient", key, blocks.longest, architecture)
    key_gradient, value_gradient = (rows_like(key, blocks, key.dtype) for _ in range(2))
    arguments = {
        **{"states": states_gradient, "sums": sums_gradient, "key": key, "value": value, "key_mask": key_mask},
        **{"key_gradient": key_gradient, "value_gradient": value_gradient},
        **{"heads": key.shape[2], "BLOCK_T": tile.tokens, "BLOCK_C": tile.channels},
        **blocks.arguments,
        **features.arguments,
        **strides_of(key=key, value=value, gradient=key_gradient),
        **constants_of(key, architecture),
    }
    programs = (key.shape[0] * key.shape[2], triton.cdiv(blocks.longest, tile.tokens), len(blocks))
    return Launch(key_gradient_kernel, programs, arguments, tile.warps, tile.stages)


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
    parts,
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
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_E columns of the state of one part of one block."""
    TYPE: tl.constexpr = value.dtype.element_ty
    # batch row and head; heads run side by side, and share angles and cache lines
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    length = tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_T) * BLOCK_T
    begin += part * length
    end = tl.minimum(begin + length, end)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    key += (batch * key_batch + head * key_head) * ALIGNMENT
    value += (batch * value_batch + head * value_head) * ALIGNMENT
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    normaliser = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(begin, end, BLOCK_T):
        index = first + tl.arange(0, BLOCK_T)
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
    base = (part * tl.num_programs(0) + whole) * blocks + block
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
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of key and value for one tile of one block, from the gradient of the block's state."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_T, tl.load(starts + block + 1)
    if begin < end:
        strides = (key_batch, key_head, key_token)
        of_tile = (key, strides, batch, head, angles, angle_tokens, members, places, begin, end, eps)
        _, member, place, source = open_tile(*of_tile, HEAD_DIM, BLOCK_D, BLOCK_T, FEATURE_MAP, ROPE, ALIGNMENT)
        there = source.there
        base = whole * blocks + block
        of_value, of_sum = read_state(
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION
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
        of_state = (key_gradient + out, source, values, weight, weight * row_product, states, sums, base)
        store_input_gradient(*of_state, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION)


_SCHEMA = f"Tensor key, Tensor value, Tensor? key_mask, Tensor? angles, {PLACE}, bool normalize"
_TENSORS = 4


@torch.library.custom_op("mhla_diffusers::block_states", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def block_states(
    key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, angles: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and normaliser states of all blocks, see :func:`states_of`; without normaliser the second is empty."""
    *place, normalize = others
    rows, blocks, _, features = tables_and_features(key, angles, place)
    values = tokens_first(value, place[3])
    states, sums = states_of(states_launch(rows, values, blocks, features, key_mask, normalize))
    return states, key.new_empty(0, dtype=torch.float32) if sums is None else sums


@torch.library.custom_op(
    "mhla_diffusers::block_states_backward",
    mutates_args=(),
    schema=f"(Tensor states_gradient, Tensor? sums_gradient, {_SCHEMA}) -> (Tensor, Tensor)",
)
def block_states_backward(
    states_gradient: torch.Tensor,
    sums_gradient: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    angles: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of key and value, contiguous."""
    *place, _ = others
    rows, blocks, _, features = tables_and_features(key, angles, place)
    values = tokens_first(value, place[3])
    launch = key_gradient_launch(states_gradient, sums_gradient, rows, values, blocks, features, key_mask)
    launch.run()
    found = (launch.arguments[name] for name in ("key_gradient", "value_gradient"))
    return tuple(tokens_first(x, place[3]).contiguous() for x in found)


@block_states.register_fake
def _shapes(key: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, blocks, _first, block_size, _map, _eps, _before, normalize = arguments
    shape = len(key), key.shape[1 if block_size else 2], math.prod(list(blocks)), key.shape[3]
    states = key.new_empty((*shape, key.shape[3]), dtype=states_dtype(key.dtype))
    return states, key.new_empty(shape if normalize else (0,), dtype=torch.float32)


@block_states_backward.register_fake
def _gradient_shapes(states: Any, sums: Any, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return key.new_empty(key.shape), key.new_empty(key.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]


def _differentiate(ctx: Any, of_states: torch.Tensor, of_sums: torch.Tensor) -> tuple[Any, ...]:
    upstream = of_states.contiguous(), of_sums.contiguous() if ctx.settings[-1] else None
    found = block_states_backward(*upstream, *ctx.saved_tensors, *ctx.settings)
    return *found, *(None,) * (_TENSORS - len(found) + len(ctx.settings))


block_states.register_autograd(_differentiate, setup_context=_save)
block_states_backward.register_autograd(refuse_second_derivative)
