"""Attentions by themselves: shapes of real models, what each costs, and softmax through PyTorch's backends."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention.costs import AttentionSizes
from ..attention.layout import block_count
from ..config import DEFAULT_BLOCK_SIZE, DEFAULT_DENSITY, MHLAConfig
from ..families import Model
from ..patching.costs import attention_sizes
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
    block_size: int | None = None
    """Tokens of the uniform blocks of the sparse branch; None where it is not measured."""
    density: float = DEFAULT_DENSITY
    """Part of all pairs of uniform blocks that is in the lists."""
    rotary_axes: tuple[int, ...] | None = None
    """Channels that RoPE turns with each axis of the grid; None where the model has none."""

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def uniform_blocks(self) -> int:
        """T.

        Raises:
            ValueError: the shape has no uniform blocks.
        """
        if self.block_size is None:
            raise ValueError(f"Shape {self.name!r} has no sparse branch; give it a block_size, such as 64.")
        return block_count(self.grid, self.block_size)

    @property
    def config(self) -> MHLAConfig:
        """The patch that has this attention."""
        if self.block_size is None:
            return MHLAConfig(self.blocks)
        return MHLAConfig(self.blocks, sparse="content", density=self.density, block_size=self.block_size)

    @property
    def sizes(self) -> AttentionSizes:
        """What its cost depends on."""
        return attention_sizes(self.config, self.grid, self.heads, self.head_dim)


TINY = Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16, block_size=16, rotary_axes=(8, 4, 4))
"""For trying the command out."""


def shapes() -> dict[str, Shape]:
    """Name → attention: the tiny one, and those of the models of all families, such as wan2.1-1.3b-480p."""
    found = [
        shape_of(model, grid, f"{model.name}-{label}")
        for model in models().values()
        for label, grid in model.grids.items()
    ]
    return {shape.name: shape for shape in (TINY, *found)}


def shape_of(model: Model, grid: tuple[int, ...], name: str) -> Shape:
    """The self-attention of a model on a token grid, with the block counts that it is measured with."""
    family = family_of_model(model)
    return Shape(
        name,
        grid,
        tuple(min(pair) for pair in zip(model.blocks, grid, strict=True)),
        model.heads,
        model.head_dim,
        DEFAULT_BLOCK_SIZE if family.own_attention == "softmax" else None,
        rotary_axes=family.rotary_axes(model.head_dim),
    )


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
    return real if device_type != "cpu" else [min(real, key=lambda shape: shape.sizes.softmax_flops)]


@dataclass(frozen=True)
class Cost:
    """Of one forward, or one forward and backward."""

    flops: int
    bytes: int
    """The least that must move: inputs are read once and outputs written once, and so are block states."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, factor: float) -> "Cost":
        """Of so many."""
        return Cost(round(factor * self.flops), round(factor * self.bytes))


Work = Literal["softmax", "linear", "lists", "sparse"]
"""Softmax over all pairs, the linear branch, softmax over listed pairs alone, or sparse and linear branch together."""


def cost_of(shape: Shape, work: Work, itemsize: int, backward: bool) -> Cost:
    """Count an attention. The backward pass counts twice the forward; what a kernel computes again is not counted.

    Args:
        shape: the attention; with a block size for lists and sparse.
        work: what is computed.
        itemsize: bytes per element of query, key and value.
        backward: count forward and backward.
    """
    sizes, ends = shape.sizes, shape.tokens * shape.heads * shape.head_dim * itemsize
    flops = {
        "softmax": sizes.softmax_flops,
        "linear": sizes.linear_flops,
        "lists": sizes.listed_flops,
        "sparse": sizes.flops,
    }[work]
    between = {"linear": 2 * sizes.state_bytes, "sparse": sizes.moved_bytes}.get(work, 0)
    # query, key, value and output; in the backward pass query, key, value and four gradients
    return Cost(flops * (3 if backward else 1), (11 if backward else 4) * ends + between * (2 if backward else 1))


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
