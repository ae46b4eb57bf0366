"""FLOPs and bytes of one attention, counted from its shape.

A multiplication and an addition count two. The backward pass counts twice the forward, for every attention alike; what
a kernel computes again is not counted.
"""

import math
from dataclasses import dataclass

from ..attention.blocks import block_sizes
from .shapes import Shape

_FLOAT32 = 4


@dataclass(frozen=True)
class Cost:
    """Of one forward, or one forward and backward."""

    flops: int
    bytes: int
    """The least that must move: inputs are read once and outputs written once, and so are KV summaries."""


def softmax_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """Two products of N x D with D x N for each head."""
    flops = 4 * shape.tokens**2 * shape.head_dim * shape.heads
    return Cost(flops * _passes(backward), _moved(shape, itemsize, backward))


def linear_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """KV summaries, Multi-Head Mixing and reading, each with the normaliser.

    Args:
        shape: the attention; plain linear attention has one block and mixes nothing.
        itemsize: bytes per element of query, key and value.
        backward: count forward and backward.
    """
    blocks = math.prod(shape.blocks)
    summary = shape.head_dim * (shape.head_dim + 1) * shape.heads
    mixing = 2 * blocks**2 * summary if blocks > 1 else 0
    flops = 4 * shape.tokens * summary + mixing
    summaries = 2 * _FLOAT32 * blocks * summary
    return Cost(flops * _passes(backward), _moved(shape, itemsize, backward) + summaries * (2 if backward else 1))


def near_field_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """Softmax attention inside every block on top of MHLA; its query, key and value are those that MHLA reads."""
    pairs = sum(size**2 for size in block_sizes(shape.grid, shape.blocks))
    far = linear_cost(shape, itemsize, backward)
    return Cost(far.flops + 4 * pairs * shape.head_dim * shape.heads * _passes(backward), far.bytes)


def _passes(backward: bool) -> int:
    return 3 if backward else 1


def _moved(shape: Shape, itemsize: int, backward: bool) -> int:
    """Query, key, value and output; in the backward pass query, key, value and four gradients."""
    return (4 + 7 * backward) * shape.tokens * shape.heads * shape.head_dim * itemsize
