"""Listed and pooled keys under one denominator, taken from the rows of the blocks back to the order of the sequence."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .operators import allocate, operator, refuse_second_derivative
from .prepare import layout_for
from .softmax import load_rows, store_rows
from .tiles import constants_of

_ROWS = 16
"""Rows of a program: as many as the smallest block has."""


@triton.jit(do_not_specialize=["tokens", "heads", "rows"])
def merge_kernel(
    near,
    near_lse,
    far,
    far_lse,
    order,
    output,
    tokens,
    heads,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one head."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.load(order + row)
    at = group * rows + row
    share = tl.sigmoid(tl.load(near_lse + at) - tl.load(far_lse + at))[:, None]
    merged = share * load_rows(near, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    merged += (1 - share) * load_rows(far, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    out = (group // heads * tokens + token) * heads + group % heads
    store_rows(output, out, token >= 0, merged, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "heads", "rows"])
def merge_backward_kernel(
    output_gradient,
    near,
    near_lse,
    far,
    far_lse,
    order,
    near_gradient,
    near_lse_gradient,
    far_gradient,
    far_lse_gradient,
    tokens,
    heads,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of ROWS rows of one head, 0 of padding."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.load(order + row)
    at = group * rows + row
    share = tl.sigmoid(tl.load(near_lse + at) - tl.load(far_lse + at))
    apart = load_rows(near, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    apart -= load_rows(far, at, None, HEAD_DIM, BLOCK_D).to(tl.float32)
    upstream_at = (group // heads * tokens + token) * heads + group % heads
    upstream = load_rows(output_gradient, upstream_at, token >= 0, HEAD_DIM, BLOCK_D).to(tl.float32)
    of_lse = share * (1 - share) * tl.sum(upstream * apart, 1)
    store_rows(near_gradient, at, None, share[:, None] * upstream, HEAD_DIM, BLOCK_D)
    store_rows(far_gradient, at, None, (1 - share)[:, None] * upstream, HEAD_DIM, BLOCK_D)
    tl.store(near_lse_gradient + at, of_lse)
    tl.store(far_lse_gradient + at, -of_lse)


_INPUTS = "Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, SymInt[] grid, SymInt block_size, SymInt heads"


def _arguments(near, grid, block_size, heads) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs and arguments of both kernels."""
    order = layout_for(grid, block_size, 0, near.device).order
    constants = constants_of(near)
    sizes = {"order": order, "tokens": math.prod(grid), "heads": heads, "rows": near.shape[1], "ROWS": _ROWS}
    constants = {name: constants[name] for name in ("HEAD_DIM", "BLOCK_D")}
    return (near.shape[1] // _ROWS, len(near)), sizes | constants | {"num_warps": 4, "num_stages": 1}


@operator(f"({_INPUTS}) -> Tensor")
def merge(near, near_lse, far, far_lse, grid, block_size, heads):
    """Add two outputs under the sum of their denominators: (B, N, H, D) of the grid's tokens.

    Args:
        near: (B H, R, D), contiguous, rows of the blocks of the grid.
        near_lse: float32 (B H, R), natural.
        far: like ``near``.
        far_lse: like ``near_lse``.
        grid: token grid.
        block_size: rows of a block, 16 at least.
        heads: H.
    """
    programs, shared = _arguments(near, grid, block_size, heads)
    output = allocate((len(near) // heads, math.prod(grid), heads, near.shape[2]), near.dtype, near.device)
    merge_kernel[programs](near=near, near_lse=near_lse, far=far, far_lse=far_lse, output=output, **shared)
    return output


@operator(f"(Tensor output_gradient, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def merge_backward(output_gradient, near, near_lse, far, far_lse, grid, block_size, heads):
    """Gradients of both outputs, in their types, and of their LSE, float32."""
    programs, shared = _arguments(near, grid, block_size, heads)
    inputs = {"near": near, "near_lse": near_lse, "far": far, "far_lse": far_lse}
    gradients = {f"{name}_gradient": allocate(x.shape, x.dtype, x.device) for name, x in inputs.items()}
    merge_backward_kernel[programs](output_gradient=output_gradient, **inputs, **gradients, **shared)
    return tuple(gradients.values())


@merge.register_fake
def _(near, near_lse, far, far_lse, grid, block_size, heads):
    return near.new_empty(near.shape[0] // heads, math.prod(list(grid)), heads, near.shape[2])


@merge_backward.register_fake
def _(output_gradient, *inputs: Any):
    return tuple(torch.empty_like(x) for x in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.place = inputs[4:]


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    return *merge_backward(upstream.contiguous(), *ctx.saved_tensors, *ctx.place), None, None, None


merge.register_autograd(_differentiate, setup_context=_save)
merge_backward.register_autograd(refuse_second_derivative)
