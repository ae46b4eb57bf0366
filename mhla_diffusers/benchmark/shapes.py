"""Attentions by themselves: shapes of real models, what each costs, and softmax through PyTorch's backends."""

import math
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention.costs import AttentionSizes
from ..config import DEFAULT_DENSITY
from ..families import Model
from .models import family_of_model, models, models_unasked
from .timing import free_bytes


@dataclass(frozen=True)
class Shape:
    """An attention by itself."""

    name: str
    grid: tuple[int, ...]
    """Tokens per axis."""
    blocks: tuple[int, ...]
    heads: int
    head_dim: int
    tiles: tuple[int, ...] | None = None
    """Tile counts of exact tiles; None where there are none."""
    share: float = DEFAULT_DENSITY
    """Part of all pairs of tiles that is exact."""
    pooled: bool = True
    """Whether the other tiles take part through their means."""
    rotary_axes: tuple[int, ...] | None = None
    """Channels that RoPE turns with each axis of the grid; None where the model has none."""

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def sizes(self) -> AttentionSizes:
        """What its cost depends on; where tiles differ in length, on average."""
        sizes = AttentionSizes(self.tokens, self.heads, self.head_dim, math.prod(self.blocks))
        if self.tiles is None:
            return sizes
        return sizes.with_exact_tiles(math.prod(self.tiles), self.share, pooled=self.pooled)


TINY = Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16, tiles=(2, 3, 3), rotary_axes=(8, 4, 4))
"""For trying the command out."""


def shapes() -> dict[str, Shape]:
    """Name → attention: the tiny one, and those of the models of all families, such as wan2.1-1.3b-480p."""
    found = [
        Shape(
            f"{model.name}-{label}",
            grid,
            model.blocks,
            model.heads,
            model.head_dim,
            exact_tiles(model, grid),
            rotary_axes=family_of_model(model).rotary_axes(model.head_dim),
        )
        for model in models().values()
        for label, grid in model.grids.items()
    ]
    return {shape.name: shape for shape in (TINY, *found)}


def exact_tiles(model: Model, grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """Tile counts that a model is measured with; None for one whose own attention is not softmax."""
    family = family_of_model(model)
    return family.exact_tiles(grid) if family.own_attention == "softmax" else None


def choose_shapes(names: list[str] | None, device_type: str) -> list[Shape]:
    """Shapes by name; for None on a GPU those of the models that need not be asked for, on a CPU the cheapest of them.

    Raises:
        ValueError: unknown name.
    """
    known = shapes()
    for name in names or ():
        if name not in known:
            raise ValueError(f"Unknown shape {name!r}; allowed: {', '.join(known)}.")
    if names:
        return [known[name] for name in names]
    real = [known[f"{model.name}-{label}"] for model in models_unasked() for label in model.grids]
    return real if device_type != "cpu" else [min(real, key=lambda shape: softmax_cost(shape, 1, False).flops)]


# Costs. The backward pass counts twice the forward, for every attention
# alike; what a kernel computes again is not counted.


@dataclass(frozen=True)
class Cost:
    """Of one forward, or one forward and backward."""

    flops: int
    bytes: int
    """The least that must move: inputs are read once and outputs written once, and so are KV summaries."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def softmax_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """Two products of N x D with D x N for each head.

    Args:
        shape: the attention.
        itemsize: bytes per element of query, key and value.
        backward: count forward and backward.
    """
    return Cost(shape.sizes.softmax_flops * _passes(backward), _moved(shape, itemsize, backward))


def linear_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """KV summaries, Multi-Head Mixing and reading; plain linear attention has one block and mixes nothing."""
    sizes = shape.sizes
    summaries = 2 * sizes.summary_bytes * (2 if backward else 1)
    return Cost(sizes.linear_flops * _passes(backward), _moved(shape, itemsize, backward) + summaries)


def listed_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """Softmax attention over the exact tiles alone: two products for every pair of a query and a key."""
    return Cost(shape.sizes.listed_flops * _passes(backward), _moved(shape, itemsize, backward))


def exact_cost(shape: Shape, itemsize: int, backward: bool) -> Cost:
    """Exact tiles and the means of all tiles on top of MHLA, whose query, key and value are those that MHLA reads."""
    sizes = shape.sizes
    moved = _moved(shape, itemsize, backward) + sizes.moved_bytes * (2 if backward else 1)
    return Cost(sizes.flops * _passes(backward), moved)


def _passes(backward: bool) -> int:
    return 3 if backward else 1


def _moved(shape: Shape, itemsize: int, backward: bool) -> int:
    """Query, key, value and output; in the backward pass query, key, value and four gradients."""
    return (4 + 7 * backward) * shape.tokens * shape.heads * shape.head_dim * itemsize


SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Of PyTorch's scaled_dot_product_attention."""


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's softmax attention of (B, N, H, D) tensors by one backend.

    Raises:
        RuntimeError: that backend cannot run the call.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return output.transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device, tokens: int, heads: int) -> str | None:
    """Why a backend is not to be tried; None if it is, which does not mean that it can run the call.

    Args:
        backend: key of ``SOFTMAX_BACKENDS``, or flex.
        device: where.
        tokens: N.
        heads: H, times the batch size.
    """
    if device.type != "cpu":
        return None
    if backend in ("cudnn", "efficient"):
        return "PyTorch has this backend on GPUs only"
    # Linux promises memory that it does not have and ends the process that takes it, so this must be told beforehand
    needed, free = 2 * 4 * heads * tokens**2, free_bytes(device)
    if backend in ("math", "flex") and needed > free:
        return f"its N x N weights need {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    return None
