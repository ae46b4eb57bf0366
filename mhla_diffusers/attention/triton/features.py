"""Shared by the linear kernels: token tables, and feature maps with RoPE and their gradients."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..layout import Shape, blocks_of_range, kept_tensors, tokens_by_block
from .operators import padded
from .tiles import Tile, constants_of, power_of_two, tile_of

PLACE = "SymInt[] grid, SymInt[] blocks, SymInt first, str feature_map, float eps, bool rope_before"
"""Arguments by which an operator finds its tokens, from the place ``first`` on the grid on, and their features."""

SIZES = [
    *("heads", "tokens", "blocks", "splits", "angle_tokens"),
    *(f"{name}_{axis}" for name in ("x", "key", "value", "gradient") for axis in ("batch", "token", "head")),
]
"""Arguments that change with the resolution; specialising on them would recompile kernels for every size."""


class Tables(NamedTuple):
    """Which tokens belong to which MHLA block, int32."""

    members: torch.Tensor
    """(N,): tokens, MHLA block after MHLA block."""
    starts: torch.Tensor
    """(M + 1,): where each block begins in ``members``, and where the last one ends."""
    longest: int
    """Tokens in the longest block."""

    @property
    def blocks(self) -> int:
        """M."""
        return len(self.starts) - 1

    def tile_of(self, kernel: str, x: torch.Tensor) -> Tile:
        """The tile of a kernel over tokens ``x`` (..., D), no larger than a block or a state."""
        return tile_of(kernel, x, power_of_two(self.longest), power_of_two(x.shape[-1]))


def tables_of(x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], first: int) -> tuple[Tables, Tables]:
    """Tables of all MHLA blocks, and of those that an operator's tokens ``x`` (B, N, H, D) may lie in."""
    return _tables(tuple(grid), tuple(blocks), first, x.shape[1], x.device)


@lru_cache(maxsize=64)
def _tables(grid: Shape, blocks: Shape, first: int, count: int, device: torch.device) -> tuple[Tables, Tables]:
    with kept_tensors():
        members, starts = tokens_by_block(grid, blocks, first, count)
        longest = int(starts.diff().max())
        members, starts = (x.to(torch.int32).to(device) for x in (members, starts))
    own = blocks_of_range(grid, blocks, first, count)
    whole = Tables(members, starts, longest)
    return whole, whole._replace(starts=starts[own.start : own.stop + 1])


def shared_arguments(
    x: torch.Tensor, tables: Tables, angles: torch.Tensor | None, feature_map: str, eps: float, rope_before: bool
) -> dict[str, Any]:
    """Arguments that all kernels over tokens ``x`` (B, N, H, D) take; ``angles`` (1 or B, N, 1, D), contiguous, are the
    cosine of a channel pair at its first channel and its sine at the second.
    """
    return constants_of(x) | {
        "members": tables.members,
        "starts": tables.starts,
        "heads": x.shape[2],
        "tokens": len(tables.members),
        "blocks": tables.blocks,
        "angles": angles,
        "angle_tokens": 0 if angles is None or len(angles) == 1 else angles.shape[1],
        "eps": eps,
        "FEATURE_MAP": feature_map,
        "ROPE": "none" if angles is None else "before" if rope_before else "after",
    }


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """Strides of (B, N, H, D) in units of ALIGNMENT channels, so that the compiler sees how far a thread may read."""
    strides = {
        f"{name}_{axis}": x.stride(i)
        for name, x in tensors.items()
        for i, axis in enumerate(("batch", "token", "head"))
    }
    head_dims = [x.shape[-1] for x in tensors.values()]
    alignment = 8 if all(stride % 8 == 0 for stride in (*strides.values(), *head_dims)) else 1
    return {name: stride // alignment for name, stride in strides.items()} | {"ALIGNMENT": alignment}


class Source(NamedTuple):
    """A tile of query or key: pointers to the first channel and angle of each token, and whether it is there."""

    x: Any
    angles: Any
    there: Any
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
def load_tokens(members, x, angles, first, end, token_stride, eps, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a table from ``first`` on, their tokens, and a tile of these in ``x`` of one sample and head."""
    index = first + tl.arange(0, BLOCK_M)
    there = index < end
    token = tl.load(members + index, mask=there, other=0).to(tl.int64)
    at = x + token * token_stride
    turn = at
    if angles is not None:
        turn = angles + token * HEAD_DIM
    return index, token, Source(at, turn, there, eps)


@triton.jit
def rotate_pairs(x, cos, sin):
    """Channel pairs (2i, 2i + 1) of ``x`` (tokens, channels), float32, rotated by angles (tokens, channels / 2)."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@triton.jit
def rotate(x, source, channels, HEAD_DIM: tl.constexpr, BACK: tl.constexpr):
    """Channel pairs rotated by their angles, or back: float32 (tokens, channels)."""
    angles = load_tile(source.angles, source.there, channels, HEAD_DIM).to(tl.float32)
    cos, sin = tl.split(tl.reshape(angles, (x.shape[0], x.shape[1] // 2, 2)))
    return rotate_pairs(x, cos, -sin if BACK else sin)


@triton.jit
def load_input(source, channels, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr):
    """Some channels of query or key, rotated if RoPE comes before the feature map: float32."""
    values = load_tile(source.x, source.there, channels, HEAD_DIM).to(tl.float32)
    return rotate(values, source, channels, HEAD_DIM, False) if ROPE == "before" else values


@triton.jit
def load_features(source, channels, HEAD_DIM: tl.constexpr, MAP: tl.constexpr, ROPE: tl.constexpr, TYPE: tl.constexpr):
    """Features of a tile for the state, rounded to TYPE, and for the normaliser, float32, not rotated after the map."""
    plain = load_input(source, channels, HEAD_DIM, ROPE)
    if MAP == "relu":
        plain = tl.where(plain < 0, 0.0, plain) + source.eps
    elif MAP == "elu+1":
        plain = tl.where(plain > 0, plain + 1, tl.exp(plain)) + source.eps
    else:
        tl.static_assert(MAP == "identity", "a feature map that the kernels do not know")
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
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features times the state of number ``base``, float32 (tokens, channels), and times its normaliser state, or 1."""
    BLOCK_M: tl.constexpr = source.there.shape[0]
    e = tl.arange(0, padded(HEAD_DIM))
    product = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_N):
        c = first + tl.arange(0, BLOCK_N)
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
    states,
    sums,
    base,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of query or key, to pointers ``out``: ``upstream`` (tokens, channels) times the state of number ``base``
    and ``of_normaliser`` (tokens,) times its normaliser state, through RoPE and feature map.
    """
    d = tl.arange(0, padded(HEAD_DIM))
    for first in range(0, HEAD_DIM, BLOCK_N):
        c = first + tl.arange(0, BLOCK_N)
        state = load_state(states, base, c, d, HEAD_DIM)
        gradient = tl.dot(upstream, tl.trans(state), input_precision=PRECISION)
        if ROPE == "after":
            gradient = rotate(gradient, source, c, HEAD_DIM, True)
        if sums is not None:
            normaliser_state = tl.load(sums + base * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
            gradient += of_normaliser[:, None] * normaliser_state[None, :]
        values = load_input(source, c, HEAD_DIM, ROPE)
        if MAP == "relu":
            gradient = tl.where(values < 0, 0.0, gradient)
        elif MAP == "elu+1":
            gradient = tl.where(values > 0, gradient, gradient * tl.exp(values))
        if ROPE == "before":
            gradient = rotate(gradient, source, c, HEAD_DIM, True)
        store_tile(out, source.there, c, gradient, HEAD_DIM)
