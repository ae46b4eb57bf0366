"""Device functions that the two softmax operators share, :mod:`.listed` and :mod:`.pooled`.

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
from .operators import allocate, padded

LOG2E = tl.constexpr(1.4426950408889634)
"""Kernels compute exponentials to the base 2: exp(x) = exp2(LOG2E x)."""
LN2 = tl.constexpr(1 / LOG2E.value)
EMPTY = tl.constexpr(NOTHING)
"""LSE of a query that attends to nothing."""


@triton.jit
def mask_of_rows(inside, HEAD_DIM: tl.constexpr):
    """Mask of (rows, channels) that are inside (None: all rows are) and not padding; None if all are."""
    if padded(HEAD_DIM) != HEAD_DIM:
        mask = (tl.arange(0, padded(HEAD_DIM)) < HEAD_DIM)[None, :]
        return mask if inside is None else inside[:, None] & mask
    else:
        return None if inside is None else inside[:, None]


@triton.jit
def load_rows(pointer, rows, inside, HEAD_DIM: tl.constexpr):
    """Rows and all their channels, padded; 0 beyond HEAD_DIM and in rows that are not inside (None: all are)."""
    mask = mask_of_rows(inside, HEAD_DIM)
    channels = tl.arange(0, padded(HEAD_DIM))
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    return tl.load(pointers, mask=mask, other=None if mask is None else 0.0)


@triton.jit
def store_rows(pointer, rows, inside, tile, HEAD_DIM: tl.constexpr):
    """The reverse of ``load_rows``, in the type of the pointer."""
    channels = tl.arange(0, padded(HEAD_DIM))
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask_of_rows(inside, HEAD_DIM))


@triton.jit
def softmax_step(logits, value, top, total, sums, scale, PRECISION: tl.constexpr):
    """Add the keys of one tile: (largest logit, sum of exponentials, weighted sum of values), base 2 and scaled."""
    largest = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.math.exp2(tl.fma(logits, scale, -largest[:, None]))
    shrunk = tl.math.exp2(top - largest)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrunk[:, None], input_precision=PRECISION)
    return largest, total * shrunk + tl.sum(weights, 1), sums


@triton.jit
def store_softmax(output, lse, first, rows, top, total, sums, HEAD_DIM: tl.constexpr):
    """Write output and natural log-sum-exp of rows; 0 and EMPTY where there was nothing to attend to."""
    something = total > 0
    total = tl.where(something, total, 1.0)
    store_rows(output + first * HEAD_DIM, rows, None, sums * (1 / total)[:, None], HEAD_DIM)
    tl.store(lse + first + rows, tl.where(something, (top + tl.math.log2(total)) * LN2, EMPTY))


@triton.jit
def load_upstream(output, output_gradient, lse, lse_gradient, shift, delta, first, rows, HEAD_DIM: tl.constexpr):
    """Load the upstream gradient of rows first + rows; compute and store their shift and delta.

    A weight is exp2(logit * scale + shift), 0 in empty rows; the gradient of its logit is weight * (its product with
    the output's gradient - delta), where delta holds the gradient of the log-sum-exp too.
    """
    do = load_rows(output_gradient + first * HEAD_DIM, rows, None, HEAD_DIM)
    out = load_rows(output + first * HEAD_DIM, rows, None, HEAD_DIM)
    d = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - tl.load(lse_gradient + first + rows)
    log_sum = tl.load(lse + first + rows)
    s = tl.where(log_sum > 0.5 * EMPTY, -log_sum * LOG2E, float("-inf"))
    tl.store(delta + first + rows, d)
    tl.store(shift + first + rows, s)
    return do, s, d


@triton.jit
def gradient_step(logits, do, k, v, s, d, gradient, scale, PRECISION: tl.constexpr):
    """Add the gradient of the queries by the keys of one tile; and return that of their logits."""
    weights = tl.math.exp2(tl.fma(logits, scale, s[:, None]))
    ds = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])
    return tl.dot(ds.to(k.dtype), k, gradient, input_precision=PRECISION), ds


def outputs_of(query, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the output of rows of queries (G, Q, D), in their type, and its LSE, float32 (G, Q)."""
    shape, device = query.shape, query.device
    return allocate(shape, query.dtype, device), allocate(shape[:2], torch.float32, device)
