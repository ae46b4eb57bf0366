"""What the two softmax operators share, :mod:`.listed` and :mod:`.pooled`: device functions, shapes and autograd.

Logits are kept as the products come: without the scale, which one fused multiply and add applies together with the
shift of the exponent.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from typing import Any

import torch
import triton
import triton.language as tl

from ..precision import EMPTY as NOTHING
from .operators import refuse_second_derivative

LOG2E = tl.constexpr(1.4426950408889634)
"""Kernels compute exponentials to the base 2: exp(x) = exp2(LOG2E x)."""
LN2 = tl.constexpr(1 / LOG2E.value)
EMPTY = tl.constexpr(NOTHING)
"""LSE of a query that attends to nothing."""


@triton.jit
def load_rows(pointer, rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D), 0 beyond HEAD_DIM and in rows that are not inside (None: all are)."""
    channels = tl.arange(0, BLOCK_D)
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    mask = None
    if BLOCK_D != HEAD_DIM:
        mask = (channels < HEAD_DIM)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    return tl.load(pointers, mask=mask, other=None if mask is None else 0.0)


@triton.jit
def store_rows(pointer, rows, inside, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write (rows, BLOCK_D) in the type of the pointer."""
    channels = tl.arange(0, BLOCK_D)
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    mask = None
    if BLOCK_D != HEAD_DIM:
        mask = (channels < HEAD_DIM)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def softmax_step(logits, value, top, total, sums, scale, PRECISION: tl.constexpr):
    """Add the keys of one tile: (largest logit, sum of exponentials, weighted sum of values), base 2 and scaled."""
    largest = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.math.exp2(tl.fma(logits, scale, -largest[:, None]))
    shrunk = tl.math.exp2(top - largest)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrunk[:, None], input_precision=PRECISION)
    return largest, total * shrunk + tl.sum(weights, 1), sums


@triton.jit
def softmax_end(top, total, sums):
    """(output, natural log-sum-exp) of rows; 0 and EMPTY where there was nothing to attend to."""
    something = total > 0
    total = tl.where(something, total, 1.0)
    return sums * (1 / total)[:, None], tl.where(something, (top + tl.math.log2(total)) * LN2, EMPTY)


@triton.jit
def load_upstream(
    output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """What comes from above for rows first + rows: the output's gradient, shift and delta; writes the last two.

    A weight is exp2(logit * scale + shift), 0 in empty rows; the gradient of its logit is weight * (its product with
    the output's gradient - delta), where delta holds the gradient of the log-sum-exp too.
    """
    do = load_rows(output_gradient + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    out = load_rows(output + first * HEAD_DIM, rows, None, HEAD_DIM, BLOCK_D)
    d = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if lse_gradient is not None:
        d -= tl.load(lse_gradient + first + rows)
    log_sum = tl.load(lse + first + rows)
    s = tl.where(log_sum > 0.5 * EMPTY, -log_sum * LOG2E, float("-inf"))
    tl.store(delta + first + rows, d)
    tl.store(shift + first + rows, s)
    return do, s, d


def register_branch(operator: Any, backward: Any, differentiable: int = 3) -> None:
    """Register shapes and autograd of a branch: operator(query (G, Q, D), key, value, ...) to output and LSE (G, Q).

    ``backward`` takes output gradient, LSE gradient or None, output, LSE, and the inputs of the operator, and returns
    the gradients of the ``differentiable`` first inputs, but for one that is None. The LSE is float32.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensors = [x for x in inputs if x is None or isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*output, *tensors)
        ctx.settings = inputs[len(tensors) :]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, of_output: torch.Tensor | None, of_lse: torch.Tensor | None) -> tuple[Any, ...]:
        output, lse, *tensors = ctx.saved_tensors
        count = len(tensors) + len(ctx.settings)
        if of_output is None and of_lse is None:
            return (None,) * count
        of_output = torch.zeros_like(output) if of_output is None else of_output.contiguous()
        of_lse = None if of_lse is None else of_lse.contiguous()
        found = backward(of_output, of_lse, output, lse, *tensors, *ctx.settings)
        return *found, *(None,) * (count - len(found))

    operator.register_fake(
        lambda query, *_: (query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32))
    )
    backward.register_fake(
        lambda *arguments: [torch.empty_like(x) for x in arguments[4 : 4 + differentiable] if x is not None]
    )
    operator.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse_second_derivative)
