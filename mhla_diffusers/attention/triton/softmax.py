"""What the two softmax operators share, :mod:`.listed` and :mod:`.pooled`: tiles, device functions, and registration.

Logits are kept as the products come: without the scale, which one fused multiply and add applies together with the
shift of the exponent.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import EMPTY, LOG2E, refuse_second_derivative

_EMPTY = tl.constexpr(EMPTY)
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)


class Tile(NamedTuple):
    """How one program of a kernel is cut."""

    queries: int
    """Rows of queries at once, at most."""
    keys: int
    """Rows of keys at once, at most."""
    warps: int
    stages: int


_WIDE = {256: Tile(32, 32, 4, 1)}
_FLOAT32 = {128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)}
_FORWARD, _DQ, _DKV = (
    {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
    {128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    {128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
)
TILES: dict[str, dict[str, dict[int, Tile]]] = {
    "forward": {"sm_90": _FORWARD, "sm_100": _FORWARD, "": {128: Tile(64, 64, 4, 2), **_WIDE}},
    "forward of 128": {
        "sm_90": {128: Tile(128, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
        "": {128: Tile(128, 64, 8, 2), **_WIDE},
    },
    "dq": {
        "sm_90": _DQ,
        "sm_100": _DQ,
        "gfx942": {128: Tile(64, 32, 4, 2), **_WIDE},
        "": {128: Tile(64, 64, 4, 2), **_WIDE},
    },
    "dkv": {
        "sm_90": _DKV,
        "sm_100": _DKV,
        "gfx942": {128: Tile(32, 64, 4, 2), **_WIDE},
        "": {128: Tile(64, 64, 8, 2), **_WIDE},
    },
}
"""Kernel, architecture ("" stands for those without their own), and the largest head dim of an entry."""


def tile_for(kernel: str, architecture: str, rows: torch.Tensor) -> Tile:
    """The entry of a kernel for rows (..., D).

    Raises:
        ValueError: heads with so many channels have no entry.
    """
    head_dim, tiles = rows.shape[-1], TILES[kernel]
    entries = _FLOAT32 if rows.dtype == torch.float32 else tiles.get(architecture, tiles[""])
    for most, tile in entries.items():
        if head_dim <= most:
            return tile
    raise ValueError(f"head_dim is {head_dim}; the kernels take at most {max(entries)}. Use backend='eager'.")


@triton.jit
def load_rows(pointer, rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D), 0 beyond HEAD_DIM and in rows that are not inside (None: all are)."""
    channels = tl.arange(0, BLOCK_D)
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    if BLOCK_D == HEAD_DIM:
        if inside is None:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
    elif inside is None:
        return tl.load(pointers, mask=(channels < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=inside[:, None] & (channels < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, rows, inside, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write (rows, BLOCK_D) in the type of the pointer."""
    channels = tl.arange(0, BLOCK_D)
    pointers = pointer + rows[:, None] * HEAD_DIM + channels[None, :]
    tile = tile.to(pointer.dtype.element_ty)
    if BLOCK_D == HEAD_DIM:
        if inside is None:
            tl.store(pointers, tile)
        else:
            tl.store(pointers, tile, mask=inside[:, None])
    elif inside is None:
        tl.store(pointers, tile, mask=(channels < HEAD_DIM)[None, :])
    else:
        tl.store(pointers, tile, mask=inside[:, None] & (channels < HEAD_DIM)[None, :])


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
    return sums * (1 / total)[:, None], tl.where(something, (top + tl.math.log2(total)) * _LN2, _EMPTY)


@triton.jit
def load_upstream(
    output,
    output_gradient,
    lse,
    lse_gradient,
    shift,
    delta,
    first,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    s = tl.where(log_sum > 0.5 * _EMPTY, -log_sum * _LOG2E, float("-inf"))
    tl.store(delta + first + rows, d)
    tl.store(shift + first + rows, s)
    return do, s, d


def register_branch(operator: Any, backward: Any) -> None:
    """Shapes and autograd of a branch: operator(query (G, Q, D), key, value, ...) to output (G, Q, D) and LSE (G, Q).

    ``backward`` takes output gradient, LSE gradient or None, output, LSE, and the inputs of the operator, and returns
    the gradients of query, key and value. The LSE is float32.
    """
    operator.register_fake(
        lambda query, *_: (query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32))
    )
    backward.register_fake(lambda *arguments: tuple(torch.empty_like(x) for x in arguments[4:7]))
    operator.register_autograd(partial(_differentiate, backward), setup_context=_save)
    backward.register_autograd(refuse_second_derivative)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors = [x for x in inputs if x is None or isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)


def _differentiate(
    backward: Callable[..., tuple[torch.Tensor, ...]],
    ctx: Any,
    output_gradient: torch.Tensor | None,
    lse_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    output, lse, *inputs = ctx.saved_tensors
    others = (None,) * (len(inputs) + len(ctx.settings) - 3)
    if output_gradient is None and lse_gradient is None:
        return None, None, None, *others
    output_gradient = torch.zeros_like(output) if output_gradient is None else output_gradient.contiguous()
    lse_gradient = None if lse_gradient is None else lse_gradient.contiguous()
    return *backward(output_gradient, lse_gradient, output, lse, *inputs, *ctx.settings), *others
