"""What queries read from the mixed states of their blocks, merged with the sparse branches: forward and backward.

With f = φ(q), S and z the mixed KV state and normaliser state of the query's block, the output is fᵀS / fᵀz. Beside
block-sparse attention it is one of up to three branches under one denominator: with n = fᵀS and d = fᵀz,

    o = (exp(lse_listed) o_listed + exp(lse_pooled) o_pooled + λ n) / (exp(lse_listed) + exp(lse_pooled) + λ d)

Then come output norm and gate. For the gradients, with L the logarithm of the common denominator, o = near + s n, where
s is 1 / d for MHLA alone and λ exp(-L) beside block-sparse attention; a gradient g of o gives ∂n = s g and ∂d = -s (g ·
o). A kernel forms both for every query, and that of :mod:`.states` adds them up to gradients of the mixed states.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..precision import OUTPUT_NORM_EPS
from .features import (
    PLACE,
    SIZES,
    Blocks,
    Features,
    Tile,
    constants_of,
    filled,
    load_tile,
    open_tile,
    read_state,
    rows_like,
    store_input_gradient,
    store_tile,
    strides_of,
    tables_and_features,
    tile_of,
    tokens_first,
)
from .launch import Launch, allocate, architecture_of, refuse_second_derivative
from .states import states_launch, states_of


class Branches(NamedTuple):
    """What the linear branch is merged with: block-sparse attention's branches by row; outputs contiguous."""

    listed: torch.Tensor | None = None
    """(B * H, R, D) like the query; None where MHLA is alone."""
    listed_lse: torch.Tensor | None = None
    """float32 (B * H, R), natural logarithm."""
    pooled: torch.Tensor | None = None
    """Like ``listed``, or None."""
    pooled_lse: torch.Tensor | None = None
    """Like ``listed_lse``, with β in it."""
    linear_weight: torch.Tensor | None = None
    """λ: float32 (H,), not negative."""


@dataclass(frozen=True)
class Reading:
    """What queries read, and what becomes of it."""

    query: torch.Tensor
    """(B, N, H, D) of any strides but the last, which is 1."""
    states: torch.Tensor
    """Mixed, (B, H, M, D, D), contiguous."""
    sums: torch.Tensor | None
    """Mixed normaliser states, float32 (B, H, M, D), contiguous; None for no normaliser, which the merge needs."""
    blocks: Blocks
    features: Features
    """Of the query."""
    branches: Branches = Branches()
    output_norm: torch.Tensor | None = None
    """Weight of an RMSNorm over channels, (D,)."""
    gate: torch.Tensor | None = None
    """(B, N, H, D), contiguous: the output is multiplied by its SiLU."""

    def arguments(self, kernel: str, architecture: str) -> tuple[dict[str, Any], Tile, tuple[int, int, int]]:
        """What reading and its backward share: arguments, tile and programs."""
        tile = tile_of(kernel, self.query, self.blocks.longest, architecture)
        batch, rows, heads, _ = self.query.shape
        arguments = {
            **{"query": self.query, "states": self.states, "sums": self.sums, **self.branches._asdict()},
            **{"output_norm": self.output_norm, "norm_eps": OUTPUT_NORM_EPS, "gate": self.gate},
            **{"heads": heads, "rows": rows, "BLOCK_T": tile.tokens, "BLOCK_C": tile.channels},
            **self.blocks.arguments,
            **self.features.arguments,
            **constants_of(self.query, architecture),
        }
        return arguments, tile, (batch * heads, triton.cdiv(self.blocks.longest, tile.tokens), len(self.blocks))


def read_launch(reading: Reading, with_normaliser: bool = False, architecture: str | None = None) -> Launch:
    """What the queries read from the mixed states of their blocks, merged with the sparse branches.

    Returns:
        The launch that writes ``output`` (B, N, H, D) like the query, in the order of the sequence, contiguous, and
        ``normalisers``, d of the linear branch alone, float32 (B, N, H, 1), or None.

    Raises:
        ValueError: branches without a normaliser.
    """
    if reading.branches.listed is not None and reading.sums is None:
        raise ValueError("The linear branch beside block-sparse attention needs its normaliser: pass sums.")
    query, device = reading.query, reading.query.device
    architecture = architecture or architecture_of(device)
    arguments, tile, programs = reading.arguments("read", architecture)
    shape = len(query), len(reading.blocks.members), query.shape[2]
    arguments["output"] = allocate((*shape, query.shape[3]), query.dtype, device)
    arguments["normalisers"] = allocate((*shape, 1), torch.float32, device) if with_normaliser else None
    return Launch(read_kernel, programs, arguments | strides_of(query=query), tile.warps, tile.stages)


def query_gradient_launch(
    reading: Reading,
    output_gradient: torch.Tensor,
    normaliser_gradient: torch.Tensor | None = None,
    architecture: str | None = None,
) -> Launch:
    """The launch that writes gradients by query; those of the mixed states are sums of ``product_gradient``.

    Those of output (B, N, H, D) and normaliser, float32 (B, N, H, 1), are contiguous, in the order of the sequence.
    """
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


@triton.jit
def merge(
    product,
    normaliser,
    listed,
    listed_lse,
    pooled,
    pooled_lse,
    linear_weight,
    row,
    head,
    there,
    NORMALIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All branches under one denominator.

    Args:
        row: of the tokens in the branches' outputs, (tokens,).

    Returns:
        Output float32 (tokens, channels), and of each token: what ``product`` was multiplied by, the weights of the
        listed and the pooled branch, and the logarithm of the denominator.
    """
    slope = tl.full(normaliser.shape, 1.0, tl.float32)
    of_listed, of_pooled, lse = slope, slope, slope
    if listed is None:
        if NORMALIZE:
            slope = 1.0 / normaliser
        output = product * slope[:, None]
    else:
        d = tl.arange(0, BLOCK_D)
        log_weight = tl.log(tl.load(linear_weight + head))
        log_linear = log_weight + tl.log(tl.maximum(normaliser, 1e-37))
        near = tl.load(listed_lse + row, mask=there, other=0.0)
        largest = tl.maximum(log_linear, near)
        if pooled is not None:
            means = tl.load(pooled_lse + row, mask=there, other=0.0)
            largest = tl.maximum(largest, means)
        of_listed = tl.exp(near - largest)
        total = of_listed + tl.exp(log_linear - largest)
        if pooled is not None:
            of_pooled = tl.exp(means - largest)
            total += of_pooled
        of_listed /= total
        slope = tl.exp(log_weight - largest) / total
        output = product * slope[:, None]
        output += load_tile(listed + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32) * of_listed[:, None]
        if pooled is not None:
            of_pooled /= total
            output += load_tile(pooled + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32) * of_pooled[:, None]
        lse = largest + tl.log(total)
    return output, slope, of_listed, of_pooled, lse


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
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
    output,
    normalisers,
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
    """Output of one tile of the queries of one block."""
    NORMALIZE: tl.constexpr = sums is not None
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_T, tl.load(starts + block + 1)
    if begin < end:
        strides = (query_batch, query_head, query_token)
        of_tile = (query, strides, batch, head, angles, angle_tokens, members, places, begin, end, eps)
        _, member, place, source = open_tile(*of_tile, HEAD_DIM, BLOCK_D, BLOCK_T, FEATURE_MAP, ROPE, ALIGNMENT)
        there = source.there
        base, row = whole * blocks + block, whole * rows + member
        product, normaliser = read_state(
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION
        )
        branches = (listed, listed_lse, pooled, pooled_lse, linear_weight)
        values, _, _, _, _ = merge(product, normaliser, *branches, row, head, there, NORMALIZE, HEAD_DIM, BLOCK_D)
        d = tl.arange(0, BLOCK_D)
        here = (batch * tokens + place) * heads + head
        if normalisers is not None:
            tl.store(normalisers + here, normaliser, mask=there)
        here *= HEAD_DIM
        if output_norm is not None:
            weight = tl.load(output_norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + norm_eps)
            values = values * root[:, None] * weight[None, :]
        if gate is not None:
            gates = load_tile(gate + here, there, d, HEAD_DIM).to(tl.float32)
            values *= gates * tl.sigmoid(gates)
        store_tile(output + here, there, d, values, HEAD_DIM)


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
        strides = (query_batch, query_head, query_token)
        of_tile = (query, strides, batch, head, angles, angle_tokens, members, places, begin, end, eps)
        index, member, place, source = open_tile(*of_tile, HEAD_DIM, BLOCK_D, BLOCK_T, FEATURE_MAP, ROPE, ALIGNMENT)
        there = source.there
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


_SCHEMA = (
    "Tensor query, Tensor states, Tensor? sums, Tensor? listed, Tensor? listed_lse, Tensor? pooled, "
    "Tensor? pooled_lse, Tensor? linear_weight, Tensor? output_norm, Tensor? gate, Tensor? angles, "
    f"{PLACE}, bool with_normaliser"
)
_TENSORS, _DIFFERENTIABLE = 11, 10


@torch.library.custom_op("mhla_diffusers::read_states", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def read_states(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and normaliser of :func:`read_launch`; a normaliser that is not wanted is empty."""
    launch = read_launch(_reading(arguments), arguments[-1])
    launch.run()
    output, normaliser = launch.arguments["output"], launch.arguments["normalisers"]
    return output, output.new_empty(0, dtype=torch.float32) if normaliser is None else normaliser


@torch.library.custom_op(
    "mhla_diffusers::read_states_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? normaliser_gradient, {_SCHEMA}) -> "
    f"({', '.join(['Tensor'] * _DIFFERENTIABLE)})",
)
def read_states_backward(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of the tensors up to ``gate``, contiguous, 0 in rows without a token; an absent one is empty."""
    reading = _reading(arguments)
    launch = query_gradient_launch(reading, output_gradient, normaliser_gradient)
    launch.run()
    of, query = launch.arguments, reading.query
    products = of["product_gradient"], reading.blocks, reading.features, None, reading.sums is not None
    of_mixture = states_of(states_launch(query, *products, of["product_normaliser_gradient"]))
    of_weight, of_norm = of["linear_weight_gradients"], of["norm_gradients"]
    if of_weight is not None:
        of_weight = of_weight.view(len(query), query.shape[2], -1).sum((0, 2))
    if of_norm is not None and reading.output_norm is not None:
        of_norm = of_norm.sum((0, 1, 2)).to(reading.output_norm.dtype)
    of_query = tokens_first(of["query_gradient"], arguments[_TENSORS + 3]).contiguous()
    of_branches = (of[f"{name}_gradient"] for name in ("listed", "listed_lse", "pooled", "pooled_lse"))
    gradients = of_query, *of_mixture, *of_branches, of_weight, of_norm, of["gate_gradient"]
    return tuple(output_gradient.new_empty(0) if x is None else x for x in gradients)


def _reading(arguments: Sequence[Any]) -> Reading:
    query, states, sums, *branches, norm, gate, angles = arguments[:_TENSORS]
    rows, _, blocks, features = tables_and_features(query, angles, arguments[_TENSORS:-1])
    gate = None if gate is None else gate.contiguous()
    return Reading(rows, states, sums, blocks, features, Branches(*branches), norm, gate)


@read_states.register_fake
def _shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    grid, _blocks, _first, block_size, *_, with_normaliser = arguments[_TENSORS - 1 :]
    shape = query.shape
    if block_size:
        shape = torch.Size((shape[0], math.prod(list(grid)), shape[1], shape[3]))
    normaliser = (*shape[:3], 1) if with_normaliser else (0,)
    return query.new_empty(shape), query.new_empty(normaliser, dtype=torch.float32)


@read_states_backward.register_fake
def _gradient_shapes(output_gradient: torch.Tensor, _: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors = arguments[:_DIFFERENTIABLE]
    return tuple(output_gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]
    ctx.mark_non_differentiable(*(() if inputs[-1] else output[1:]))


def _differentiate(ctx: Any, of_output: torch.Tensor, of_normaliser: torch.Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    upstream = of_output.contiguous(), of_normaliser.contiguous() if ctx.settings[-1] else None
    found = read_states_backward(*upstream, *tensors, *ctx.settings)
    present = (None if x is None else gradient for x, gradient in zip(tensors, found, strict=False))
    return *present, *(None,) * (_TENSORS - len(found) + len(ctx.settings))


read_states.register_autograd(_differentiate, setup_context=_save)
read_states_backward.register_autograd(refuse_second_derivative)
