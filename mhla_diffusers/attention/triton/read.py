"""What queries read from the mixed states of their blocks, merged with softmax over extra tokens: forward and backward.

With f = φ(q), S and z the mixed KV state and normaliser state of the query's block, the output is fᵀS / fᵀz. Beside
softmax over extra tokens, whose output is o_near, it stands under one denominator: with n = fᵀS and d = fᵀz,

    o = (exp(lse) o_near + λ n) / (exp(lse) + λ d)

Then come output norm and gate. For the gradients, with L the logarithm of the common denominator, o = near + s n, where
s is 1 / d for MHLA alone and λ exp(-L) beside softmax; a gradient g of o gives ∂n = s g and ∂d = -s (g ·
o). A kernel forms both for every query, and that of :mod:`.states` adds them up to gradients of the mixed states.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..precision import OUTPUT_NORM_EPS
from .features import (
    PLACE,
    SIZES,
    Tables,
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
from .states import sum_states


@triton.jit
def merge(product, normaliser, branch, row, head, there, NORMALIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """MHLA and softmax under one denominator.

    Args:
        product: float32 (tokens, channels), what is read from the states.
        normaliser: (tokens,), its denominator.
        branch: the inputs of the kernel from ``near`` to ``linear_weight``.
        row: of the tokens in the output of softmax, (tokens,).
        head: whose λ.
        there: which tokens there are.

    Returns:
        Output float32 (tokens, channels), and of each token: what ``product`` was multiplied by, the weight of softmax,
        and the logarithm of the denominator.
    """
    near, near_lse, linear_weight = branch
    slope = tl.full(normaliser.shape, 1.0, tl.float32)
    of_near, lse = slope, slope
    if near is None:
        if NORMALIZE:
            slope = 1.0 / normaliser
        output = product * slope[:, None]
    else:
        d = tl.arange(0, product.shape[1])
        log_weight = tl.log(tl.load(linear_weight + head))
        log_linear = log_weight + tl.log(tl.maximum(normaliser, 1e-37))
        log_near = tl.load(near_lse + row, mask=there, other=0.0)
        largest = tl.maximum(log_linear, log_near)
        of_near = tl.exp(log_near - largest)
        total = of_near + tl.exp(log_linear - largest)
        of_near /= total
        slope = tl.exp(log_weight - largest) / total
        output = product * slope[:, None]
        output += load_tile(near + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32) * of_near[:, None]
        lse = largest + tl.log(total)
    return output, slope, of_near, lse


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    query,
    states,
    sums,
    near,
    near_lse,
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
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_M)
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
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_N, FEATURE_MAP, ROPE, PRECISION
        )
        branch = (near, near_lse, linear_weight)
        values, _, _, _ = merge(product, normaliser, branch, row, head, there, NORMALIZE, HEAD_DIM)
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
    near,
    near_lse,
    linear_weight,
    output_norm,
    gate,
    query_gradient,
    product_gradient,
    product_normaliser_gradient,
    near_gradient,
    near_lse_gradient,
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
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_M, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_M)
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
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_N, FEATURE_MAP, ROPE, PRECISION
        )
        branch = (near, near_lse, linear_weight)
        values, slope, of_near, lse = merge(product, normaliser, branch, row, head, there, NORMALIZE, HEAD_DIM)

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
        if near is not None:
            softmax = load_tile(near + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32)
            store_tile(near_gradient + row * HEAD_DIM, there, d, gradient * of_near[:, None], HEAD_DIM)
            of_lse = of_near * (tl.sum(gradient * softmax, 1) - along)
            tl.store(near_lse_gradient + row, of_lse, mask=there)
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
        tile = (out, source, gradient, of_normaliser, row_product, states, sums, base)
        store_input_gradient(*tile, HEAD_DIM, BLOCK_D, BLOCK_N, FEATURE_MAP, ROPE, PRECISION)
    if output_norm is not None:
        program = (whole * tl.num_programs(1) + tl.program_id(1)) * blocks + block
        tl.store(norm_gradients + program * HEAD_DIM + d, norm_gradient, mask=d < HEAD_DIM)


class Reading(NamedTuple):
    """Inputs of the operators; tensors in sequence order have the query's N tokens."""

    query: torch.Tensor
    """(B, N, H, D) of any strides but the last, 1; or rows (B, H, R, D), see PLACE."""
    states: torch.Tensor
    """Mixed, (B, H, M, D, D), contiguous, of the blocks that the tokens may lie in."""
    sums: torch.Tensor | None
    """Mixed normaliser states, float32 (B, H, M, D), contiguous; None for no normaliser, which a merge needs."""
    near: torch.Tensor | None
    """Output of softmax over extra tokens (B H, R, D), contiguous; None where MHLA is alone."""
    near_lse: torch.Tensor | None
    """float32 (B H, R), natural."""
    linear_weight: torch.Tensor | None
    """λ, float32 (H,), not negative."""
    output_norm: torch.Tensor | None
    """Weight of an RMSNorm over channels, (D,)."""
    gate: torch.Tensor | None
    """(B, N, H, D), contiguous: the output is multiplied by its SiLU."""
    angles: torch.Tensor | None
    grid: list[int]
    blocks: list[int]
    first: int
    block_size: int
    feature_map: str
    eps: float
    rope_before: bool
    with_normaliser: bool
    """Whether d of the linear branch alone is wanted too."""

    @property
    def differentiable(self) -> tuple[torch.Tensor | None, ...]:
        """Inputs that have a gradient if they are there."""
        return self[:8]

    def launch(self, kernel: str) -> tuple[torch.Tensor, Tables, tuple[int, ...], dict[str, Any], dict[str, Any]]:
        """Return what both kernels are launched with.

        Returns:
            Query (B, N, H, D), tables, programs, arguments that all kernels of the linear branch take, and further ones
            that both kernels take.
        """
        query = tokens_first(self.query, self.block_size)
        _, tables = tables_of(query, self.grid, self.blocks, self.first, self.block_size)
        tile = tables.tile_of(kernel, query)
        programs = len(query) * query.shape[2], triton.cdiv(tables.longest, tile.m), tables.blocks
        shared = shared_arguments(query, tables, self.angles, self.feature_map, self.eps, self.rope_before)
        inputs = dict(zip(self._fields[1:8], self[1:8], strict=True)) | {"query": query, "rows": query.shape[1]}
        return query, tables, programs, shared, inputs | tile.arguments | {"norm_eps": OUTPUT_NORM_EPS}


_INPUTS = (
    "Tensor query, Tensor states, Tensor? sums, Tensor? near, Tensor? near_lse, Tensor? linear_weight, "
    "Tensor? output_norm, Tensor? gate, Tensor? angles, "
    f"{PLACE}, bool with_normaliser"
)


@operator(f"({_INPUTS}) -> (Tensor, Tensor)")
def read_states(*inputs: Any):
    """What the queries read from the mixed states of their blocks, merged with softmax over extra tokens.

    Takes the fields of :class:`Reading`.

    Returns:
        Output (B, N, H, D) in the order of the sequence, contiguous; and d, float32 (B, N, H, 1), empty where it is not
        wanted.
    """
    reading = Reading(*inputs)
    query, tables, programs, shared, arguments = reading.launch("read")
    shape = len(query), len(tables.members), query.shape[2]
    output = allocate((*shape, query.shape[3]), query.dtype, query.device)
    normalisers = allocate((*shape, 1) if reading.with_normaliser else (0,), torch.float32, query.device)
    read_kernel[programs](
        output=output,
        normalisers=normalisers if reading.with_normaliser else None,
        **strides_of(query=query),
        **shared,
        **arguments,
    )
    return output, normalisers


@operator(f"(Tensor output_gradient, Tensor normaliser_gradient, {_INPUTS}) -> Tensor[]")
def read_states_backward(output_gradient, normaliser_gradient, *inputs: Any):
    """Gradients of those of :attr:`Reading.differentiable` that are there, contiguous; 0 in rows without a token."""
    reading = Reading(*inputs)
    query, tables, programs, shared, arguments = reading.launch("query_gradient")
    normalize, weight, norm = reading.sums is not None, reading.linear_weight, reading.output_norm
    query_gradient = rows_like(query, tables, query.dtype)
    product_gradient = rows_like(query, tables, reading.states.dtype)
    new = allocate if query.shape[1] == len(tables.members) else torch.zeros
    near, near_lse = (None if x is None else new(x.shape, dtype=x.dtype, device=x.device) for x in reading[3:5])

    def float32(wanted: bool, *shape: int) -> torch.Tensor | None:
        return allocate(shape, torch.float32, query.device) if wanted else None

    by_token = programs[0], len(tables.members)
    sum_weight = float32(normalize, *by_token)
    weight_gradients = float32(weight is not None, *by_token)
    norm_gradients = float32(norm is not None, *programs, query.shape[3])
    gate_gradient = None if reading.gate is None else allocate(reading.gate.shape, reading.gate.dtype, query.device)
    query_gradient_kernel[programs](
        output_gradient=output_gradient,
        of_normalisers=normaliser_gradient if reading.with_normaliser else None,
        query_gradient=query_gradient,
        product_gradient=product_gradient,
        product_normaliser_gradient=sum_weight,
        near_gradient=near,
        near_lse_gradient=near_lse,
        linear_weight_gradients=weight_gradients,
        norm_gradients=norm_gradients,
        gate_gradient=gate_gradient,
        **strides_of(query=query, gradient=query_gradient),
        **shared,
        **arguments,
    )
    gradients = (
        tokens_first(query_gradient, reading.block_size).contiguous(),
        *sum_states(query, product_gradient, tables, shared, normalize, sum_weight=sum_weight),
        *(near, near_lse),
        None if weight_gradients is None else weight_gradients.view(len(query), query.shape[2], -1).sum((0, 2)),
        None if norm is None or norm_gradients is None else norm_gradients.sum((0, 1, 2)).to(norm.dtype),
        gate_gradient,
    )
    return [x for x in gradients if x is not None]


@read_states.register_fake
def _(*inputs: Any):
    reading = Reading(*inputs)
    query = reading.query
    batch, tokens, heads, head_dim = query.shape
    if reading.block_size:
        tokens, heads = math.prod(list(reading.grid)), query.shape[1]
    normaliser = (batch, tokens, heads, 1) if reading.with_normaliser else (0,)
    return query.new_empty(batch, tokens, heads, head_dim), query.new_empty(normaliser, dtype=torch.float32)


@read_states_backward.register_fake
def _(output_gradient, normaliser_gradient, *inputs: Any):
    return [x.new_empty(x.shape) for x in Reading(*inputs).differentiable if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, ctx.settings = inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, of_output: torch.Tensor, of_normaliser: torch.Tensor) -> tuple[Any, ...]:
    reading = Reading(*ctx.saved_tensors, *ctx.settings)
    found = iter(read_states_backward(of_output.contiguous(), of_normaliser.contiguous(), *reading))
    gradients = (None if x is None else next(found) for x in reading.differentiable)
    return *gradients, None, *[None] * len(ctx.settings)


read_states.register_autograd(_differentiate, setup_context=_save)
read_states_backward.register_autograd(refuse_second_derivative)
