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

from .launch import Launch, allocate, architecture_of
from .linear import SIZES, Blocks, Reading, constants_of, merge, states_launch, states_of, strides_of, tile_of
from .linear_features import Features, load_tile, read_state, source_of, store_input_gradient, store_tile


class ReadGradients(NamedTuple):
    """Of everything that a :class:`Reading` holds; None where it holds None."""

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
    linear_weight: torch.Tensor | None
    """float32 (H,)."""
    output_norm: torch.Tensor | None
    """float32 (D,)."""
    gate: torch.Tensor | None
    """(B, N, H, D) in the type of the gate."""


def read_backward(
    reading: Reading, output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None = None
) -> ReadGradients:
    """Gradients of what :func:`mhla_diffusers.attention.triton.linear.read_launch` writes.

    Args:
        reading: what was read.
        output_gradient: (B, N, H, D), contiguous, in the order of the sequence.
        normaliser_gradient: float32 (B, N, H, 1), contiguous, or None.
    """
    launch = query_gradient_launch(reading, output_gradient, normaliser_gradient)
    launch.run()
    of, query = launch.arguments, reading.query
    products = of["product_gradient"], reading.blocks, reading.features, None, reading.sums is not None
    of_states, of_sums = states_of(states_launch(query, *products, of["product_normaliser_gradient"]))
    of_weight, of_norm = of["linear_weight_gradients"], of["norm_gradients"]
    return ReadGradients(
        of["query_gradient"],
        of_states,
        of_sums,
        of["listed_gradient"],
        of["listed_lse_gradient"],
        of["pooled_gradient"],
        of["pooled_lse_gradient"],
        None if of_weight is None else of_weight.view(len(query), query.shape[2], -1).sum((0, 2)),
        None if of_norm is None else of_norm.sum((0, 1, 2)),
        of["gate_gradient"],
    )


def query_gradient_launch(
    reading: Reading,
    output_gradient: torch.Tensor,
    normaliser_gradient: torch.Tensor | None = None,
    architecture: str | None = None,
) -> Launch:
    """A tile of one block's queries each: see :func:`read_backward`."""
    query, blocks, branches, gate = reading.query, reading.blocks, reading.branches, reading.gate
    architecture = architecture or architecture_of(query.device)
    arguments, tile, programs = reading.arguments("query_gradient", architecture)

    def by_token(wanted: bool) -> torch.Tensor | None:
        return allocate((programs[0], len(blocks.members)), torch.float32, query.device) if wanted else None

    query_gradient = rows_like(query, blocks, query.dtype)
    by_row = {name: x for name, x in branches._asdict().items() if name != "linear_weight"}
    norm_shape = (*programs, query.shape[-1])
    arguments |= {
        "output_gradient": output_gradient,
        "of_normalisers": normaliser_gradient,
        "query_gradient": query_gradient,
        "product_gradient": rows_like(query, blocks, reading.states.dtype),
        "product_normaliser_gradient": by_token(reading.sums is not None),
        **{f"{name}_gradient": None if x is None else filled(x, blocks) for name, x in by_row.items()},
        "linear_weight_gradients": by_token(branches.linear_weight is not None),
        "norm_gradients": None if reading.output_norm is None else allocate(norm_shape, torch.float32, query.device),
        "gate_gradient": None if gate is None else allocate(gate.shape, gate.dtype, gate.device),
        **strides_of(query=query, gradient=query_gradient),
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
    """Gradients of key and value from those of :func:`mhla_diffusers.attention.triton.linear.states_launch`.

    Args:
        states_gradient: (B, H, M, D, D) in the type of the states, contiguous.
        sums_gradient: float32 (B, H, M, D), contiguous, or None.
        key: as there, and so all others.
        value: likewise.
        blocks: likewise.
        features: likewise.
        key_mask: likewise.
        architecture: likewise.

    Returns:
        The launch that writes ``key_gradient`` and ``value_gradient``, in the type of the key and the order of its
        axes in memory; rows without a token are 0.
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
def query_gradient_kernel(
    output_gradient,
    of_normalisers,
    query,
    states,
    sums,
    listed,
    listed_lse,
    pooled,
    pooled_lse,
    linear_weight,
    output_norm,
    gate,
    query_gradient,
    product_gradient,
    product_normaliser_gradient,
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
    angles,
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
    angle_tokens,
    eps,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one tile of the queries of one block, and of all that is read with them."""
    NORMALIZE: tl.constexpr = sums is not None
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
        at = query + (batch * query_batch + head * query_head + member * query_token) * ALIGNMENT
        turn = at
        if angles is not None:
            turn = angles + (batch * angle_tokens + place) * HEAD_DIM
        source = source_of(at, turn, there, eps, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE)
        base, row = whole * blocks + block, whole * rows + member
        product, normaliser = read_state(
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION
        )
        branches = (listed, listed_lse, pooled, pooled_lse, linear_weight)
        values, slope, of_listed, of_pooled, lse = merge(
            product, normaliser, *branches, row, head, there, NORMALIZE, HEAD_DIM, BLOCK_D
        )

        # through gate and norm
        here = (batch * tokens + place) * heads + head
        gradient = load_tile(output_gradient + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
        if output_norm is not None:
            weight = tl.load(output_norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + norm_eps)
        if gate is not None:
            gates = load_tile(gate + here * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            sigmoid = tl.sigmoid(gates)
            of_gate = gradient * values * sigmoid * (1.0 + gates * (1.0 - sigmoid))
            if output_norm is not None:
                of_gate *= root[:, None] * weight[None, :]
            store_tile(gate_gradient + here * HEAD_DIM, there, d, of_gate, HEAD_DIM)
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
        if of_normalisers is not None:
            of_normaliser += tl.load(of_normalisers + here, mask=there, other=0.0)
        if listed is not None:
            near = load_tile(listed + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            store_tile(listed_gradient + row * HEAD_DIM, there, d, gradient * of_listed[:, None], HEAD_DIM)
            of_lse = of_listed * (tl.sum(gradient * near, 1) - along)
            tl.store(listed_lse_gradient + row, of_lse, mask=there)
            if pooled is not None:
                means = load_tile(pooled + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
                store_tile(pooled_gradient + row * HEAD_DIM, there, d, gradient * of_pooled[:, None], HEAD_DIM)
                of_lse = of_pooled * (tl.sum(gradient * means, 1) - along)
                tl.store(pooled_lse_gradient + row, of_lse, mask=there)
            # not divided by the weight, which may be 0
            of_weight = tl.exp(tl.minimum(-lse, 80.0)) * (of_product - normaliser * along)
            tl.store(linear_weight_gradients + whole * tokens + index, of_weight, mask=there)
        row_product = slope * of_product
        if NORMALIZE:
            tl.store(product_normaliser_gradient + whole * tokens + index, of_normaliser, mask=there)
            row_product += of_normaliser * normaliser
        gradient = (gradient * slope[:, None]).to(states.dtype.element_ty)
        out = (batch * gradient_batch + head * gradient_head + member * gradient_token) * ALIGNMENT
        store_tile(product_gradient + out, there, d, gradient, HEAD_DIM)
        out += query_gradient
        of_read = (out, source, gradient, of_normaliser, row_product, states, sums, base)
        store_input_gradient(*of_read, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION)
    if output_norm is not None:
        program = (whole * tl.num_programs(1) + tl.program_id(1)) * blocks + block
        tl.store(norm_gradients + program * HEAD_DIM + d, norm_gradient, mask=d < HEAD_DIM)


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
        index = begin + tl.arange(0, BLOCK_T)
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
