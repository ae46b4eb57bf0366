"""Attentions by themselves: shapes of real models, what they cost, and seeded inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..attention import BlockLists
from ..attention.call import list_length
from ..attention.layout import block_count, check_grid
from ..config import MHLAConfig, SparseConfig
from ..families import Model
from ..settings import check_names, check_value
from .models import family_of_model, models

_DEFAULT = {"cpu": "dit-xl-2-512px", "cuda": "wan2.1-1.3b-480p"}
"""Shape that is measured where none is named."""


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
    """Tokens of a query block of sparse attention; None where it is not measured."""
    density: float = SparseConfig.density
    """Part of all pairs of uniform blocks that is in the lists."""
    rope: bool = False
    """Whether MHLA is called with RoPE, as the model calls it."""

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def plain(self) -> "Shape":
        """The same of one block, which makes MHLA plain linear attention."""
        return replace(self, blocks=(1,) * len(self.blocks))


Work = Literal["softmax", "linear", "lists", "sparse"]
"""Softmax over all pairs, MHLA, softmax over listed pairs alone, or sparse attention."""
BLOCK_SIZE = 64
"""Tokens of a block, of the usual sizes."""
TINY = Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16, block_size=16, rope=True)
"""For trying the command out."""


def flops_of(shape: Shape, work: Work, *, backward: bool = False) -> int:
    """Count an attention from its shape; the backward pass counts twice the forward."""
    config = MHLAConfig(blocks=shape.blocks) if work == "linear" else sparse_config(shape)
    sizes = config.sizes_on(shape.grid, shape.heads, shape.head_dim)
    forward = {"softmax": sizes.softmax_flops, "lists": sizes.listed_flops}.get(work, sizes.flops)
    return 3 * forward if backward else forward


def shape_of(model: Model, grid: tuple[int, ...], name: str) -> Shape:
    """Return the self-attention of a model on a token grid, with the block counts that it is measured with."""
    family = family_of_model(model)
    blocks = tuple(min(pair) for pair in zip(model.blocks, grid, strict=True))
    size = BLOCK_SIZE if family.own_attention == "softmax" else None
    return Shape(name, grid, blocks, model.heads, model.head_dim, size, rope=family.has_rope)


def choose_shapes(names: Sequence[str] | None, device_type: str) -> list[Shape]:
    """Return shapes by name: tiny, or a model and one of its sizes such as wan2.1-1.3b-480p; None for a default.

    Raises:
        ValueError: unknown name.
    """
    known = {"tiny": TINY} | {
        name: shape_of(model, grid, name)
        for model in models().values()
        for label, grid in model.grids.items()
        for name in [f"{model.name}-{label}"]
    }
    chosen = names or [_DEFAULT.get(device_type, _DEFAULT["cuda"])]
    check_names(chosen, list(known), "shape")
    return [known[name] for name in chosen]


def shape_on(grid: Sequence[int], blocks: Sequence[int], heads: int, head_dim: int) -> Shape:
    """Return a shape that belongs to no model, such as one of a row that varies N or M.

    Raises:
        ValueError: other axes of blocks than of the grid, more blocks than tokens, or numbers below 1.
    """
    check_grid(grid, "grid")
    if len(blocks) != len(grid) or not all(1 <= count <= size for count, size in zip(blocks, grid, strict=True)):
        raise ValueError(f"blocks={tuple(blocks)} must be from 1 to the tokens of each axis of grid={tuple(grid)}.")
    for name, number in (("heads", heads), ("head_dim", head_dim)):
        check_value(name, number, int, above=0)
    name = f"grid {'x'.join(map(str, grid))}, {math.prod(blocks)} blocks, {heads} heads of {head_dim}"
    return Shape(name, tuple(grid), tuple(blocks), heads, head_dim, BLOCK_SIZE)


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw seeded query, key and value, each (1, N, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))


def sparse_config(shape: Shape) -> SparseConfig:
    """Return the settings with which sparse attention is measured; key blocks are 32 tokens at most, as by default."""
    size = shape.block_size or BLOCK_SIZE
    return SparseConfig(density=shape.density, block_size=size, key_block_size=min(32, size))


def random_rotary(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of random angles, each (1, N, 1, D)."""
    angles = torch.randn(1, shape.tokens, 1, shape.head_dim // 2, device=device).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def draw_lists(shape: Shape, device: torch.device) -> BlockLists:
    """Draw lists from a seed, every query block with as many key blocks and at least one."""
    rule = sparse_config(shape).rule_on(shape.grid)
    queries, keys = (block_count(shape.grid, size) for size in rule.sizes)
    order = torch.rand(shape.heads, queries, keys, generator=torch.Generator().manual_seed(0))
    chosen = order.topk(list_length(shape.density, keys), dim=-1).indices
    mask = torch.zeros(order.shape, dtype=torch.bool).scatter_(-1, chosen, value=True)
    return BlockLists.from_mask(rule.block_size, mask.to(device), key_block_size=rule.key_block_size)
