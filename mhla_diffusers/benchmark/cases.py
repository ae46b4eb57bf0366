"""What is measured: a model with random weights at one size, and its self-attention by itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch

from ..attention.layout import check_layout
from ..config import MHLAConfig, SparseConfig
from ..errors import check_names
from ..families import Family, Model, families, get_family
from ..reporting import parse_size, times

Work = Literal["softmax", "linear", "sparse"]
"""Softmax over all pairs, MHLA, or sparse attention."""
BLOCK_SIZE = 64
"""Tokens per query block with which sparse attention is measured."""


@dataclass(frozen=True)
class Shape:
    """A self-attention by itself."""

    name: str
    grid: tuple[int, ...]
    """Tokens per axis."""
    blocks: tuple[int, ...]
    """MHLA blocks per axis."""
    heads: int
    head_dim: int
    block_size: int | None = None
    """Tokens per query block of sparse attention; None where the model's own attention is linear."""
    density: float = SparseConfig.density
    rope: bool = False
    """Whether MHLA is called with RoPE, as the model calls it."""

    def __post_init__(self) -> None:
        check_layout(self.grid, self.blocks)

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def plain(self) -> "Shape":
        """The same with one block, which makes MHLA plain linear attention."""
        return replace(self, blocks=(1,) * len(self.blocks))

    @property
    def sparse_config(self) -> SparseConfig:
        """Settings of sparse attention; key blocks have at most 32 tokens, as by default."""
        size = self.block_size or BLOCK_SIZE
        return SparseConfig(density=self.density, block_size=size, key_block_size=min(32, size))

    def flops(self, work: Work) -> int:
        """Count the FLOPs of a forward."""
        config = MHLAConfig(blocks=self.blocks) if work == "linear" else self.sparse_config
        sizes = config.sizes_on(self.grid, self.heads, self.head_dim)
        return sizes.softmax_flops if work == "softmax" else sizes.flops

    def draw_inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Draw seeded query, key and value, each (1, N, H, D)."""
        generator = torch.Generator(device).manual_seed(0)
        size = (1, self.tokens, self.heads, self.head_dim)
        return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))

    def draw_rotary(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) of random angles, each (1, N, 1, D)."""
        angles = torch.randn(1, self.tokens, 1, self.head_dim // 2, device=device).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Case:
    """A model with random weights at one size; ValueError for a size that it does not take."""

    model: Model
    height: int
    width: int
    frames: int | None = None
    """None for an image."""
    batch: int = 1
    layers: int | None = None
    """Number of layers to build, for counting; None for all."""

    def __post_init__(self) -> None:
        model = self.model
        side = model.stride * model.patch
        sides = ("height", self.height, side, 0), ("width", self.width, side, 0)
        for name, given, step, more in (*sides, ("frames", self.frames, model.temporal_stride, 1)):
            if given is not None and (given < max(1, step * (not more)) or (given - more) % step):
                below = max(1 - more, (given - more) // step) * step + more
                multiple = f"a multiple of {step}{' and 1 more' if more else ''} for {model.name}"
                raise ValueError(f"{name}={given} must be {multiple}; near it are {below} and {below + step}.")
        if self.family.squares_only and self.height != self.width:
            raise ValueError(f"{model.name} takes square images only; got {self.height}x{self.width}.")

    @property
    def family(self) -> Family:
        """The family that the model belongs to."""
        return next(family for family in families() if self.model.transformer in family.transformers)

    @property
    def size(self) -> str:
        """Height, width and frames, such as "480x832x81"."""
        return times([side for side in (self.height, self.width, self.frames) if side is not None])

    @property
    def name(self) -> str:
        """Model, size and batch."""
        return f"{self.model.name} {self.size}" + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis; those of one frame where frames attend by themselves."""
        model, frames = self.model, []
        if self.frames is not None:
            config = SimpleNamespace(patch_size_t=model.temporal_patch)  # all that a family reads of it
            latents = self.family.latent_frames(config, self.frames, model.temporal_stride)
            frames.append(latents // model.temporal_patch)
        side = model.stride * model.patch
        return (*frames, self.height // side, self.width // side)[-len(model.blocks) :]

    @property
    def shape(self) -> Shape:
        """The self-attention with most tokens, and the block counts with which it is measured."""
        model, grid = self.model, self.grid
        blocks = tuple(min(pair) for pair in zip(model.blocks, grid, strict=True))
        block_size = BLOCK_SIZE if self.family.computes == "softmax" else None
        name, rope = f"{model.name} {self.size}", self.model.has_rope
        return Shape(name, grid, blocks, model.heads, model.head_dim, block_size, rope=rope)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Build the transformer in eval mode with seeded random weights, and the float32 parts that diffusers keeps."""
        settings = self.family.class_settings(self.model, self.height, self.frames, self.layers)
        torch.manual_seed(0)
        with device:
            transformer = self.family.transformer_class(self.model.transformer)(**settings).to(device)
        kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()
        for name, weight in transformer.named_parameters():
            if weight.is_floating_point() and not any(part in kept for part in name.split(".")):
                weight.data = weight.data.to(dtype)
        return transformer.eval()

    def inputs(self, transformer: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Make the arguments of the transformer's forward, on its device: random latents, and conditioning."""
        family, device = get_family(transformer), next(transformer.parameters()).device
        latents = [self.height // self.model.stride, self.width // self.model.stride]
        if self.frames is not None:
            latents.insert(0, family.latent_frames(transformer.config, self.frames, self.model.temporal_stride))

        def fill(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
            if like.is_floating_point:
                return torch.randn(self.batch, *shape, device=device, dtype=dtype)
            return torch.ones(self.batch, *shape, device=device, dtype=like)  # masks, and classes

        shapes = family.inputs.conditioning_shapes(transformer.config)
        conditioning = {name: fill(*tensor.shape, like=tensor.dtype) for name, tensor in shapes.items()}
        sample = fill(family.inputs.channels(transformer.config), *latents)
        timestep = torch.full((self.batch,), 500, device=device)
        return {**family.inputs.arguments(transformer, sample, timestep, conditioning), "return_dict": False}


def models() -> dict[str, Model]:
    """Return the configurations of all registered families, by name."""
    return {model.name: model for family in families() for model in family.models}


def choose_cases(
    names: Sequence[str],
    sizes: Sequence[str] | None = None,
    frames: Sequence[int] | None = None,
    *,
    smallest: bool = False,
    batch: int = 1,
) -> list[Case]:
    """Return every model at every size, such as "480x832" or "512", and number of frames; by default the model's own.

    With ``smallest`` the first of its sizes alone. ValueError for an unknown model, or a size that it does not take.
    """
    cases = []
    known = models()
    check_names(names, list(known), "model", listed_by="mhla info")
    for model in (known[name] for name in names):
        if frames and not model.is_video:
            raise ValueError(f"--frames {frames[0]} is for videos, and {model.name} takes none; leave it out.")
        counts = (frames or (model.frames,)) if model.is_video else (None,)
        pixels = [parse_size(text) for text in sizes] if sizes else model.sizes[: 1 if smallest else None]
        cases += [Case(model, *size, count, batch) for size in pixels for count in counts]
    return cases


def small_case(model: Model) -> Case:
    """Return a case of about two tokens per MHLA block and axis, to check correctness on."""
    height, width = (2 * count * model.stride * model.patch for count in model.blocks[-2:])
    frames = None
    if model.is_video:  # one frame where frames attend by themselves
        frames = 1 if len(model.blocks) == 2 else model.temporal_stride * (2 * model.blocks[0] - 1) + 1
    return Case(model, height, width, frames)
