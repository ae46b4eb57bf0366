"""Tiles of tokens in the kernels of the linear branch: loading them, RoPE, feature maps, and their gradients."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    angles: torch.Tensor | None = None
    """(1 or B, N, 1, D), contiguous: the cosine of a channel pair at its first channel, its sine at the second; None
    where nothing is to be rotated."""
    rope_before: bool = False
    """Rotate before the feature map; after it the normaliser reads features that are not rotated."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the kernels."""
        angles = self.angles
        return {
            "angles": angles,
            "angle_tokens": 0 if angles is None or len(angles) == 1 else angles.shape[1],
            "eps": self.eps,
            "FEATURE_MAP": self.name,
            "ROPE": "none" if angles is None else "before" if self.rope_before else "after",
        }


class Source(NamedTuple):
    """A tile of query or key with what its features are computed from."""

    x: Any
    """Pointers to the first channel of each token, (tokens,)."""
    angles: Any
    """Likewise, of RoPE; without it they are not read."""
    there: Any
    """Whether there is such a token, (tokens,)."""
    largest: Any
    """Largest channel of each token, which only the softmax map uses."""
    total: Any
    """Sum of its exponentials."""
    eps: Any


@triton.jit
def load_tile(rows, there, channels, HEAD_DIM: tl.constexpr):
    """Some channels (tokens, channels) of the rows that begin at pointers ``rows``; 0 where there is no row."""
    mask = there[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(rows[:, None] + channels[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(rows, there, channels, values, HEAD_DIM: tl.constexpr):
    """The reverse of ``load_tile``, in the type of what is written to."""
    mask = there[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(rows[:, None] + channels[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_state(states, base, rows, columns, HEAD_DIM: tl.constexpr):
    """Some rows and columns of the state of number ``base``, 0 outside."""
    mask = (rows < HEAD_DIM)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(states + base * HEAD_DIM * HEAD_DIM + rows[:, None] * HEAD_DIM + columns[None, :], mask, other=0.0)


@triton.jit
def rotate(x, source, channels, HEAD_DIM: tl.constexpr, BACK: tl.constexpr):
    """Channel pairs (2i, 2i + 1) turned by their angles, or back: float32 (tokens, channels)."""
    PAIRS: tl.constexpr = (x.shape[0], x.shape[1] // 2, 2)
    angles = load_tile(source.angles, source.there, channels, HEAD_DIM).to(tl.float32)
    cos, sin = tl.split(tl.reshape(angles, PAIRS))
    if BACK:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, PAIRS))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@triton.jit
def load_input(source, channels, HEAD_DIM: tl.constexpr, MAP: tl.constexpr, ROPE: tl.constexpr):
    """What the feature map is applied to: some channels of query or key, rotated before it or not: float32."""
    values = load_tile(source.x, source.there, channels, HEAD_DIM).to(tl.float32)
    if ROPE == "before":
        values = rotate(values, source, channels, HEAD_DIM, False)
    if MAP == "softmax":  # a padded channel has no exponential: 0 may lie far above the largest
        values = tl.where((channels < HEAD_DIM)[None, :], values, float("-inf"))
    return values


@triton.jit
def source_of(
    x, angles, there, eps, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MAP: tl.constexpr, ROPE: tl.constexpr
):
    """The tile that begins at pointers ``x``."""
    source = Source(x, angles, there, 0.0, 0.0, eps)
    if MAP == "softmax":
        values = load_input(source, tl.arange(0, BLOCK_D), HEAD_DIM, MAP, ROPE)
        largest = tl.max(values, 1)
        source = Source(x, angles, there, largest, tl.sum(tl.exp(values - largest[:, None]), 1), eps)
    return source


@triton.jit
def apply_map(values, source, MAP: tl.constexpr):
    """φ of a tile, float32."""
    if MAP == "relu":
        return tl.where(values < 0, 0.0, values) + source.eps
    elif MAP == "elu+1":
        return tl.where(values > 0, values + 1, tl.exp(values)) + source.eps
    elif MAP == "softmax":
        return tl.exp(values - source.largest[:, None]) / source.total[:, None]
    else:
        return values


@triton.jit
def load_features(source, channels, HEAD_DIM: tl.constexpr, MAP: tl.constexpr, ROPE: tl.constexpr, TYPE: tl.constexpr):
    """Features of a tile for the state, rounded to TYPE, and for the normaliser, float32.

    They differ otherwise by RoPE after the map alone.
    """
    plain = apply_map(load_input(source, channels, HEAD_DIM, MAP, ROPE), source, MAP)
    features = plain
    if ROPE == "after":
        features = rotate(plain, source, channels, HEAD_DIM, False)
    return features.to(TYPE), plain


@triton.jit
def read_state(
    source,
    states,
    sums,
    base,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features times the state of number ``base``, float32 (tokens, channels), and times its normaliser state, or 1."""
    BLOCK_T: tl.constexpr = source.there.shape[0]
    e = tl.arange(0, BLOCK_D)
    product = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    normaliser = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        state = load_state(states, base, c, e, HEAD_DIM)
        features, plain = load_features(source, c, HEAD_DIM, MAP, ROPE, state.dtype)
        product = tl.dot(features, state, product, input_precision=PRECISION)
        if sums is not None:
            normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
            normaliser += tl.sum(plain * normaliser_state[None, :], 1)
    if sums is None:
        normaliser += 1.0
    return product, tl.where(source.there, normaliser, 1.0)  # without a token, 0 / 0 would spoil sums over tokens


@triton.jit
def store_input_gradient(
    out,
    source,
    upstream,
    of_normaliser,
    row_product,
    states,
    sums,
    base,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of query or key, to pointers ``out``, from that of what was read with them, or was added to a state.

    Args:
        upstream: (tokens, channels), multiplied by the state of number ``base``.
        of_normaliser: (tokens,), multiplied by its normaliser state.
        row_product: (tokens,), sum of features times their gradients over all channels, which the softmax map needs.
    """
    d = tl.arange(0, BLOCK_D)
    for first in range(0, HEAD_DIM, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        state = load_state(states, base, c, d, HEAD_DIM)
        gradient = tl.dot(upstream, tl.trans(state), input_precision=PRECISION)
        if ROPE == "after":
            gradient = rotate(gradient, source, c, HEAD_DIM, True)
        if sums is not None:
            normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
            gradient += of_normaliser[:, None] * normaliser_state[None, :]
        values = load_input(source, c, HEAD_DIM, MAP, ROPE)
        if MAP == "relu":
            gradient = tl.where(values < 0, 0.0, gradient)
        elif MAP == "elu+1":
            gradient = tl.where(values > 0, gradient, gradient * tl.exp(values))
        elif MAP == "softmax":
            gradient = apply_map(values, source, MAP) * (gradient - row_product[:, None])
        if ROPE == "before":
            gradient = rotate(gradient, source, c, HEAD_DIM, True)
        store_tile(out, source.there, c, gradient, HEAD_DIM)
