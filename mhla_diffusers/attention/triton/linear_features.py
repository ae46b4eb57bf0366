"""Tiles of tokens in the kernels of the linear branch: loading them, RoPE, feature maps, and their gradients."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Features:
    """The feature map of query and key, and their RoPE."""

    name: str
    """"relu", "elu+1", "softmax" or "identity"."""
    eps: float = 1e-6
    """Added to every feature of "relu" and "elu+1"."""
    cos: torch.Tensor | None = None
    """(1 or B, N, 1, D), or None where nothing is to be rotated; the even channels are read."""
    sin: torch.Tensor | None = None
    """Likewise; the odd channels are read."""
    rope_before: bool = False
    """Rotate before the feature map; after it the normaliser reads features that are not rotated."""

    def __post_init__(self) -> None:
        """Give both angles the same strides, which the kernels take once."""
        cos, sin = self.cos, self.sin
        if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
            object.__setattr__(self, "cos", cos.contiguous())
            object.__setattr__(self, "sin", sin.contiguous())

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the kernels."""
        return {
            "cos": self.cos,
            "sin": self.sin,
            "eps": self.eps,
            "FEATURE_MAP": self.name,
            "ROPE_BEFORE": self.rope_before,
        }


@triton.jit
def load_tile(pointer, rows, there, channels, HEAD_DIM: tl.constexpr):
    """Some channels of some rows (tokens, channels), which begin at ``pointer + rows``; 0 where there is no row."""
    mask = there[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(pointer + rows[:, None] + channels[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, rows, there, channels, values, HEAD_DIM: tl.constexpr):
    """The reverse of ``load_tile``, in the type of what is written to."""
    mask = there[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(pointer + rows[:, None] + channels[None, :], values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(states, base, rows, columns, HEAD_DIM: tl.constexpr):
    """Some rows and columns of the state of number ``base``, 0 outside."""
    mask = (rows < HEAD_DIM)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(states + base * HEAD_DIM * HEAD_DIM + rows[:, None] * HEAD_DIM + columns[None, :], mask, other=0.0)


@triton.jit
def rotate(x, cos, sin, angle_rows, there, channels, HEAD_DIM: tl.constexpr, BACK: tl.constexpr):
    """Channel pairs (2i, 2i + 1) turned by their angles, or back: float32 (tokens, channels)."""
    PAIRS: tl.constexpr = (x.shape[0], x.shape[1] // 2, 2)
    c, _ = tl.split(tl.reshape(load_tile(cos, angle_rows, there, channels, HEAD_DIM).to(tl.float32), PAIRS))
    _, s = tl.split(tl.reshape(load_tile(sin, angle_rows, there, channels, HEAD_DIM).to(tl.float32), PAIRS))
    if BACK:
        s = -s
    even, odd = tl.split(tl.reshape(x, PAIRS))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), x.shape)


@triton.jit
def load_input(
    x, rows, cos, sin, angle_rows, there, channels, HEAD_DIM: tl.constexpr, MAP: tl.constexpr, BEFORE: tl.constexpr
):
    """What the feature map is applied to: some channels of query or key, rotated if BEFORE: float32."""
    values = load_tile(x, rows, there, channels, HEAD_DIM).to(tl.float32)
    if cos is not None and BEFORE:
        values = rotate(values, cos, sin, angle_rows, there, channels, HEAD_DIM, False)
    if MAP == "softmax":  # a padded channel has no exponential: 0 may lie far above the largest
        values = tl.where((channels < HEAD_DIM)[None, :], values, float("-inf"))
    return values


@triton.jit
def softmax_scale(
    x,
    rows,
    cos,
    sin,
    angle_rows,
    there,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """Largest channel and sum of exponentials of each token; maps other than softmax do not use them."""
    if MAP == "softmax":
        values = load_input(x, rows, cos, sin, angle_rows, there, tl.arange(0, BLOCK_D), HEAD_DIM, MAP, BEFORE)
        largest = tl.max(values, 1)
        return largest, tl.sum(tl.exp(values - largest[:, None]), 1)
    else:
        return 0.0, 0.0


@triton.jit
def apply_map(values, largest, total, eps, MAP: tl.constexpr):
    """φ of a tile, float32."""
    if MAP == "relu":
        return tl.where(values < 0, 0.0, values) + eps
    elif MAP == "elu+1":
        return tl.where(values > 0, values + 1, tl.exp(values)) + eps
    elif MAP == "softmax":
        return tl.exp(values - largest[:, None]) / total[:, None]
    else:
        return values


@triton.jit
def load_features(
    x,
    rows,
    cos,
    sin,
    angle_rows,
    there,
    channels,
    largest,
    total,
    eps,
    HEAD_DIM: tl.constexpr,
    MAP: tl.constexpr,
    BEFORE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Features of a tile for the state, rounded to TYPE, and for the normaliser, float32.

    They differ otherwise by RoPE after the map alone.
    """
    values = load_input(x, rows, cos, sin, angle_rows, there, channels, HEAD_DIM, MAP, BEFORE)
    plain = apply_map(values, largest, total, eps, MAP)
    features = plain
    if cos is not None and not BEFORE:
        features = rotate(plain, cos, sin, angle_rows, there, channels, HEAD_DIM, False)
    return features.to(TYPE), plain


@triton.jit
def input_gradient(
    x,
    rows,
    cos,
    sin,
    angle_rows,
    there,
    channels,
    largest,
    total,
    of_features,
    of_plain,
    row_product,
    HEAD_DIM: tl.constexpr,
    MAP: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """Gradient of some channels of query or key: float32 (tokens, channels).

    ``of_features`` and ``of_plain`` are the gradients of what ``load_features`` returns, (tokens, channels), and
    ``row_product`` is the sum of features times gradients over all channels, (tokens,), which the softmax map needs.
    """
    if cos is not None and not BEFORE:
        of_features = rotate(of_features, cos, sin, angle_rows, there, channels, HEAD_DIM, True)
    gradient = of_features + of_plain
    values = load_input(x, rows, cos, sin, angle_rows, there, channels, HEAD_DIM, MAP, BEFORE)
    if MAP == "relu":
        gradient = tl.where(values < 0, 0.0, gradient)
    elif MAP == "elu+1":
        gradient = tl.where(values > 0, gradient, gradient * tl.exp(values))
    elif MAP == "softmax":
        gradient = apply_map(values, largest, total, 0.0, MAP) * (gradient - row_product[:, None])
    if cos is not None and BEFORE:
        gradient = rotate(gradient, cos, sin, angle_rows, there, channels, HEAD_DIM, True)
    return gradient


@triton.jit
def read_state(
    x,
    rows,
    cos,
    sin,
    angle_rows,
    there,
    largest,
    total,
    states,
    sums,
    base,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MAP: tl.constexpr,
    BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features times the state of number ``base``, float32 (tokens, channels), and times its normaliser state, or 1."""
    e = tl.arange(0, BLOCK_D)
    product = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    normaliser = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        state = load_state(states, base, c, e, HEAD_DIM)
        features, plain = load_features(
            x, rows, cos, sin, angle_rows, there, c, largest, total, eps, HEAD_DIM, MAP, BEFORE, state.dtype
        )
        product = tl.dot(features, state, product, input_precision=PRECISION)
        if sums is not None:
            normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
            normaliser += tl.sum(plain * normaliser_state[None, :], 1)
    if sums is None:
        normaliser += 1.0
    return product, tl.where(there, normaliser, 1.0)  # where there is no token, 0 / 0 would spoil sums over tokens
