"""Gradients of the linear branch (:mod:`.linear`).

With n = fᵀS, d = fᵀz and L the logarithm of the common denominator, the merged output is o = near + s n, where s is
1 / d for MHLA alone and λ exp(-L) beside block-sparse attention. A gradient g of o gives ∂n = s g and ∂d = -s (g · o).
The first kernel forms both for every query, with the gradients of all that is read by query; ``states_kernel`` adds
them up to gradients of the mixed states. After mixing has been undone, the last kernel gives key and value theirs.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, allocate, architecture_of, precision_of, processors_of
from .linear import (
    Blocks,
    Branches,
    constants_of,
    finished_states,
    merge,
    read_arguments,
    states_dtype,
    states_launch,
    strides_of,
    tile_of,
)
from .linear_features import (
    Features,
    input_gradient,
    load_state,
    load_tile,
    read_state,
    softmax_scale,
    store_tile,
)


class ReadGradients(NamedTuple):
    """Of everything that :func:`mhla_diffusers.attention.triton.linear.read_forward` takes; None where it got None."""

    query: torch.Tensor
    """(B, N, H, D) in the type of the query; rows without a token are 0."""
    states: torch.Tensor
    """In the type of the states, (B, H, M, D, D)."""
    sums: torch.Tensor | None
    """float32 (B, H, M, D)."""
    listed: torch.Tensor | None
    """(B * H, R, D) in the type of the query; rows without a token are 0, in the next three too."""
    listed_lse: torch.Tensor | None
    """float32 (B * H, R)."""
    pooled: torch.Tensor | None
    pooled_lse: torch.Tensor | None
    pooled_bias: torch.Tensor | None
    """float32 (H,)."""
    linear_weight: torch.Tensor | None
    """float32 (H,)."""
    output_norm: torch.Tensor | None
    """float32 (D,)."""
    gate: torch.Tensor | None
    """(B, N, H, D) in the type of the gate."""


def read_backward(
    output_gradient: torch.Tensor,
    query: torch.Tensor,
    states: torch.Tensor,
    sums: torch.Tensor | None,
    blocks: Blocks,
    features: Features,
    branches: Branches | None = None,
    output_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    gate: torch.Tensor | None = None,
) -> ReadGradients:
    """Gradients of :func:`mhla_diffusers.attention.triton.linear.read_forward`.

    Args:
        output_gradient: (B, N, H, D), contiguous, in the order of the sequence.
        query: as there, and so all others.
        states: mixed.
        sums: mixed.
        blocks: the tables.
        features: of the query.
        branches: of block-sparse attention.
        output_norm: (D,).
        norm_eps: of the norm.
        gate: (B, N, H, D).
    """
    launch = query_gradient_launch(
        output_gradient, query, states, sums, blocks, features, branches, output_norm, norm_eps, gate
    )
    launch.run()
    of = launch.arguments
    of_states = states_launch(
        query, of["product_gradient"], blocks, features, None, sums is not None, of["normaliser_gradient"]
    )
    of_states.run()
    by_head = (query.shape[0], query.shape[2], -1)
    of_bias, of_weight = of["pooled_lse_gradient"], of["linear_weight_gradients"]
    of_norm = of["norm_gradients"]
    return ReadGradients(
        of["query_gradient"],
        *finished_states(of_states, states_dtype(query.dtype)),
        of["listed_gradient"],
        of["listed_lse_gradient"],
        of["pooled_gradient"],
        of["pooled_lse_gradient"],
        None if of_bias is None else of_bias.view(by_head).sum((0, 2)),
        None if of_weight is None else of_weight.view(by_head).sum((0, 2)),
        None if of_norm is None else of_norm.sum((0, 1, 2)),
        of["gate_gradient"],
    )


def query_gradient_launch(
    output_gradient: torch.Tensor,
    query: torch.Tensor,
    states: torch.Tensor,
    sums: torch.Tensor | None,
    blocks: Blocks,
    features: Features,
    branches: Branches | None = None,
    output_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    gate: torch.Tensor | None = None,
    architecture: str | None = None,
) -> Launch:
    """A tile of one block's queries each: see :func:`read_backward`."""
    architecture = architecture or architecture_of(query.device)
    arguments, tile = read_arguments(
        "query_gradient", query, states, sums, blocks, features, branches, output_norm, norm_eps, gate, architecture
    )
    whole = query.shape[0] * query.shape[2]
    programs = (whole, triton.cdiv(blocks.longest, tile.tokens), len(blocks.starts) - 1)

    def by_token() -> torch.Tensor:
        return allocate((whole, len(blocks.members)), torch.float32, query.device)

    query_gradient = rows_like(query, blocks, query.dtype)
    product_gradient = rows_like(query, blocks, states.dtype)
    merged = Branches(*(None,) * 6) if branches is None else branches  # type: ignore[arg-type]
    listed, listed_lse, pooled, pooled_lse = (None if x is None else filled(x, blocks) for x in merged[:4])
    arguments |= {
        "output_gradient": output_gradient,
        "query_gradient": query_gradient,
        "product_gradient": product_gradient,
        "normaliser_gradient": None if sums is None else by_token(),
        "listed_gradient": listed,
        "listed_lse_gradient": listed_lse,
        "pooled_gradient": pooled,
        "pooled_lse_gradient": pooled_lse,
        "linear_weight_gradients": None if branches is None else by_token(),
        "norm_gradients": None
        if output_norm is None
        else allocate((*programs, query.shape[-1]), torch.float32, query.device),
        "gate_gradient": None if gate is None else allocate(gate.shape, gate.dtype, gate.device),
        **strides_of(features, query=query, gradient=query_gradient),
    }
    return Launch(query_gradient_kernel, programs, arguments, tile.warps, tile.stages)


def rows_like(x: torch.Tensor, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """For the gradient of (B, N, H, D), with the same order of axes in memory; 0 where no token is to be written."""
    batch, tokens, heads, head_dim = x.shape
    new = torch.zeros if tokens != len(blocks.members) else allocate
    if x.stride(1) < x.stride(2):
        return new((batch, heads, tokens, head_dim), dtype=dtype, device=x.device).transpose(1, 2)
    return new((batch, tokens, heads, head_dim), dtype=dtype, device=x.device)


def filled(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """For the gradient of rows (B * H, R, ...), contiguous; 0 where no token is to be written."""
    new = torch.zeros if x.shape[1] != len(blocks.members) else allocate
    return new(x.shape, dtype=x.dtype, device=x.device)


def mix_backward(
    mixed_gradient: torch.Tensor,
    mixed_sums_gradient: torch.Tensor | None,
    mixing: torch.Tensor,
    states: torch.Tensor,
    sums: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of :func:`mhla_diffusers.attention.triton.linear.mix`.

    Args:
        mixed_gradient: (B, H, M, D, D) in the type of the states, contiguous.
        mixed_sums_gradient: float32 (B, H, M, D), or None.
        mixing: (M, M) or (H, M, M).
        states: before mixing.
        sums: before mixing.

    Returns:
        Gradients of the mixing matrix in float32, of the states and of the normaliser states.
    """
    launch = mixing_gradient_launch(mixed_gradient, states)
    launch.run()
    with torch.autocast(states.device.type, enabled=False):
        back = mixing.expand(*states.shape[:2], -1, -1).mT
        of_states = torch.matmul(back.to(states.dtype), mixed_gradient.flatten(3)).view_as(states)
        of_mixing, of_sums = launch.arguments["shares"].sum((0, 2)), None
        if sums is not None and mixed_sums_gradient is not None:
            of_mixing += torch.matmul(mixed_sums_gradient, sums.mT).sum(0)
            of_sums = torch.matmul(back.float(), mixed_sums_gradient)
    return of_mixing if mixing.ndim == 3 else of_mixing.sum(0), of_states, of_sums


def mixing_gradient_launch(
    mixed_gradient: torch.Tensor, states: torch.Tensor, architecture: str | None = None
) -> Launch:
    """Shares of the gradient of the mixing matrix, float32 (B, H, parts, M, M): see :func:`mix_backward`."""
    architecture = architecture or architecture_of(states.device)
    batch, heads, blocks = states.shape[:3]
    size = states[0, 0, 0].numel()
    tile = tile_of("mixing_gradient", states, blocks, architecture)
    tiles = triton.cdiv(blocks, tile.tokens) ** 2
    wanted = triton.cdiv(2 * processors_of(states.device, architecture), batch * heads * tiles)
    parts = max(1, min(wanted, size // (4 * tile.channels)))
    arguments = {
        "mixed_gradient": mixed_gradient,
        "states": states,
        "shares": allocate((batch, heads, parts, blocks, blocks), torch.float32, states.device),
        "blocks": blocks,
        "parts": parts,
        "SIZE": size,
        "BLOCK_M": tile.tokens,
        "BLOCK_K": tile.channels,
        "PRECISION": precision_of(states.dtype, architecture),
    }
    return Launch(mixing_gradient_kernel, (tiles, parts, batch * heads), arguments, tile.warps, tile.stages)


def states_backward(
    states_gradient: torch.Tensor,
    sums_gradient: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    features: Features,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value from those of :func:`mhla_diffusers.attention.triton.linear.states_forward`.

    Args:
        states_gradient: (B, H, M, D, D) in the type of the states, contiguous.
        sums_gradient: float32 (B, H, M, D), contiguous, or None.
        key: as there, and so all others.
        value: (B, N, H, D).
        blocks: the tables.
        features: of the key.
        key_mask: (B, N), or None.

    Returns:
        (B, N, H, D) in the types of key and value; rows without a token are 0.
    """
    launch = key_gradient_launch(states_gradient, sums_gradient, key, value, blocks, features, key_mask)
    launch.run()
    return launch.arguments["key_gradient"], launch.arguments["value_gradient"]


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
    """A tile of one block's keys each: see :func:`states_backward`."""
    architecture = architecture or architecture_of(key.device)
    tile = tile_of("key_gradient", key, blocks.longest, architecture)
    key_gradient, value_gradient = (rows_like(x, blocks, x.dtype) for x in (key, value))
    arguments = {
        "states": states_gradient,
        "sums": sums_gradient,
        "key": key,
        "value": value,
        "key_mask": key_mask,
        "key_gradient": key_gradient,
        "value_gradient": value_gradient,
        "heads": key.shape[2],
        "blocks": len(blocks.starts) - 1,
        "BLOCK_T": tile.tokens,
        "BLOCK_C": tile.channels,
        **blocks.arguments,
        **features.arguments,
        **strides_of(features, key=key, value=value, key_gradient=key_gradient, value_gradient=value_gradient),
        **constants_of(key, architecture),
    }
    programs = (
        key.shape[0] * key.shape[2],
        triton.cdiv(blocks.longest, tile.tokens),
        len(blocks.starts) - 1,
    )
    return Launch(key_gradient_kernel, programs, arguments, tile.warps, tile.stages)


@triton.jit(
    do_not_specialize=[
        "heads",
        "tokens",
        "rows",
        "blocks",
        "query_batch",
        "query_token",
        "query_head",
        "gradient_batch",
        "gradient_token",
        "gradient_head",
        "angle_batch",
        "angle_token",
    ]
)
def query_gradient_kernel(
    output_gradient,
    query,
    states,
    sums,
    listed,
    listed_lse,
    pooled,
    pooled_lse,
    pooled_bias,
    linear_weight,
    output_norm,
    gate,
    query_gradient,
    product_gradient,
    normaliser_gradient,
    listed_gradient,
    listed_lse_gradient,
    pooled_gradient,
    pooled_lse_gradient,
    linear_weight_gradients,
    norm_gradients,
    gate_gradient,
    members,
    places,
    starts,
    cos,
    sin,
    heads,
    tokens,
    rows,
    blocks,
    query_batch,
    query_token,
    query_head,
    gradient_batch,
    gradient_token,
    gradient_head,
    angle_batch,
    angle_token,
    eps,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one tile of the queries of one block, and of all that is read with them."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    norm_gradient = tl.zeros((BLOCK_D,), tl.float32)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_T, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_T)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        at = (batch * query_batch + head * query_head + member * query_token) * ALIGNMENT
        angle = (batch * angle_batch + place * angle_token) * ALIGNMENT
        base = whole * blocks + block
        largest, total = softmax_scale(query, at, cos, sin, angle, there, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        product, normaliser = read_state(
            query,
            at,
            cos,
            sin,
            angle,
            there,
            largest,
            total,
            states,
            sums,
            base,
            eps,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_C,
            BLOCK_T,
            FEATURE_MAP,
            ROPE_BEFORE,
            PRECISION,
        )
        row = whole * rows + member
        values, slope, of_listed, of_pooled, lse = merge(
            product,
            normaliser,
            listed,
            listed_lse,
            pooled,
            pooled_lse,
            pooled_bias,
            linear_weight,
            row,
            head,
            there,
            sums is not None,
            HEAD_DIM,
            BLOCK_D,
        )

        # through gate and norm
        here = ((batch * tokens + place) * heads + head) * HEAD_DIM
        gradient = load_tile(output_gradient, here, there, d, HEAD_DIM).to(tl.float32)
        if output_norm is not None:
            weight = tl.load(output_norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + norm_eps)
        if gate is not None:
            gates = load_tile(gate, here, there, d, HEAD_DIM).to(tl.float32)
            sigmoid = tl.sigmoid(gates)
            of_gate = gradient * values * sigmoid * (1.0 + gates * (1.0 - sigmoid))
            if output_norm is not None:
                of_gate *= root[:, None] * weight[None, :]
            store_tile(gate_gradient, here, there, d, of_gate, HEAD_DIM)
            gradient *= gates * sigmoid
        if output_norm is not None:
            norm_gradient = tl.sum(gradient * values * root[:, None], 0)
            gradient *= weight[None, :]
            along = tl.sum(gradient * values, 1) / HEAD_DIM
            gradient = root[:, None] * (gradient - (root * root * along)[:, None] * values)

        # through the merge
        along = tl.sum(gradient * values, 1)
        of_product = tl.sum(gradient * product, 1)
        of_normaliser = -slope * along
        if listed is not None:
            near = load_tile(listed, row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            store_tile(listed_gradient, row * HEAD_DIM, there, d, gradient * of_listed[:, None], HEAD_DIM)
            of_lse = of_listed * (tl.sum(gradient * near, 1) - along)
            tl.store(listed_lse_gradient + row, of_lse, mask=there)
            if pooled is not None:
                means = load_tile(pooled, row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
                store_tile(pooled_gradient, row * HEAD_DIM, there, d, gradient * of_pooled[:, None], HEAD_DIM)
                of_lse = of_pooled * (tl.sum(gradient * means, 1) - along)
                tl.store(pooled_lse_gradient + row, of_lse, mask=there)
            # not divided by the weight, which may be 0
            of_weight = tl.exp(tl.minimum(-lse, 80.0)) * (of_product - normaliser * along)
            tl.store(linear_weight_gradients + whole * tokens + index, of_weight, mask=there)
        if sums is not None:
            tl.store(normaliser_gradient + whole * tokens + index, of_normaliser, mask=there)
        row_product = slope * of_product
        if sums is not None:
            row_product += of_normaliser * normaliser
        gradient = (gradient * slope[:, None]).to(states.dtype.element_ty)
        out = (batch * gradient_batch + head * gradient_head + member * gradient_token) * ALIGNMENT
        store_tile(product_gradient, out, there, d, gradient, HEAD_DIM)
        for first in range(0, HEAD_DIM, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            state = load_state(states, base, c, d, HEAD_DIM)
            of_features = tl.dot(gradient, tl.trans(state), input_precision=PRECISION)
            of_plain = tl.zeros_like(of_features)
            if sums is not None:
                normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
                of_plain += of_normaliser[:, None] * normaliser_state[None, :]
            of_query = input_gradient(
                query,
                at,
                cos,
                sin,
                angle,
                there,
                c,
                largest,
                total,
                of_features,
                of_plain,
                row_product,
                HEAD_DIM,
                FEATURE_MAP,
                ROPE_BEFORE,
            )
            store_tile(query_gradient, out, there, c, of_query, HEAD_DIM)
    if output_norm is not None:
        program = (whole * tl.num_programs(1) + tl.program_id(1)) * blocks + block
        tl.store(norm_gradients + program * HEAD_DIM + d, norm_gradient, mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["blocks", "parts"])
def mixing_gradient_kernel(
    mixed_gradient,
    states,
    shares,
    blocks,
    parts,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of a tile of the mixing matrix from one part of the elements of the states of one batch row and head."""
    tiles = tl.cdiv(blocks, BLOCK_M)
    rows = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    part, whole = tl.program_id(1), tl.program_id(2).to(tl.int64)
    left = mixed_gradient + (whole * blocks + rows[:, None]) * SIZE
    right = states + (whole * blocks + columns[:, None]) * SIZE
    total = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    length = tl.cdiv(tl.cdiv(SIZE, parts), BLOCK_K) * BLOCK_K
    for first in tl.range(part * length, tl.minimum((part + 1) * length, SIZE), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        there = (k < SIZE)[None, :]
        a = tl.load(left + k[None, :], mask=(rows < blocks)[:, None] & there, other=0.0)
        b = tl.load(right + k[None, :], mask=(columns < blocks)[:, None] & there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    at = shares + ((whole * parts + part) * blocks + rows[:, None]) * blocks + columns[None, :]
    tl.store(at, total, mask=(rows < blocks)[:, None] & (columns < blocks)[None, :])


@triton.jit(
    do_not_specialize=[
        "heads",
        "tokens",
        "blocks",
        "key_batch",
        "key_token",
        "key_head",
        "value_batch",
        "value_token",
        "value_head",
        "key_gradient_batch",
        "key_gradient_token",
        "key_gradient_head",
        "value_gradient_batch",
        "value_gradient_token",
        "value_gradient_head",
        "angle_batch",
        "angle_token",
    ]
)
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
    cos,
    sin,
    heads,
    tokens,
    blocks,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    key_gradient_batch,
    key_gradient_token,
    key_gradient_head,
    value_gradient_batch,
    value_gradient_token,
    value_gradient_head,
    angle_batch,
    angle_token,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of key and value for one tile of one block, from the gradient of the block's state."""
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_T, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_T)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        at = (batch * key_batch + head * key_head + member * key_token) * ALIGNMENT
        angle = (batch * angle_batch + place * angle_token) * ALIGNMENT
        base = whole * blocks + block
        largest, total = softmax_scale(key, at, cos, sin, angle, there, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE_BEFORE)
        of_value, of_sum = read_state(
            key,
            at,
            cos,
            sin,
            angle,
            there,
            largest,
            total,
            states,
            sums,
            base,
            eps,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_C,
            BLOCK_T,
            FEATURE_MAP,
            ROPE_BEFORE,
            PRECISION,
        )
        weight = there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + place, mask=there, other=0.0)
        d = tl.arange(0, BLOCK_D)
        value_at = (batch * value_batch + head * value_head + member * value_token) * ALIGNMENT
        values = load_tile(value, value_at, there, d, HEAD_DIM)
        row_product = tl.sum(of_value * values.to(tl.float32), 1)
        if sums is not None:
            row_product += of_sum
        out = (batch * value_gradient_batch + head * value_gradient_head + member * value_gradient_token) * ALIGNMENT
        store_tile(value_gradient, out, there, d, of_value * weight[:, None], HEAD_DIM)
        out = (batch * key_gradient_batch + head * key_gradient_head + member * key_gradient_token) * ALIGNMENT
        values = values.to(states.dtype.element_ty)
        for first in range(0, HEAD_DIM, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            state = load_state(states, base, c, d, HEAD_DIM)
            of_features = tl.dot(values, tl.trans(state), input_precision=PRECISION)
            of_plain = tl.zeros_like(of_features)
            if sums is not None:
                normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
                of_plain += normaliser_state[None, :]
            of_key = input_gradient(
                key,
                at,
                cos,
                sin,
                angle,
                there,
                c,
                largest,
                total,
                of_features,
                of_plain,
                row_product,
                HEAD_DIM,
                FEATURE_MAP,
                ROPE_BEFORE,
            )
            store_tile(key_gradient, out, there, c, of_key * weight[:, None], HEAD_DIM)
