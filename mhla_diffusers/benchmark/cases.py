"""Benchmark cases: a model with random weights at one size, and its self-attention alone."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..attention.costs import AttentionSizes
from ..config import LinearConfig, PatchConfig, SparseConfig
from ..errors import check_names
from ..families import Family, Model, families, get_family
from ..patching.describe import forward_flops
from ..patching.patch import patched_layers
from ..reporting import parse_size, times


@dataclass(frozen=True)
class Shape:
    """One self-attention."""

    name: str
    grid: tuple[int, ...]
    blocks: tuple[int, ...]
    """MHLA blocks per axis."""
    heads: int
    head_dim: int
    sparse: SparseConfig | None = None
    """None where the model's own attention is linear."""
    rope: bool = False
    """Whether MHLA is called with RoPE, as the model calls it."""

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    def sizes(self, config: PatchConfig) -> AttentionSizes:
        """Return what the cost of an attention depends on here."""
        return config.sizes_on(self.grid, self.heads, self.head_dim)

    def draw_inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Draw seeded query, key and value, each (1, N, H, D)."""
        generator = torch.Generator(device).manual_seed(0)
        size = (1, self.tokens, self.heads, self.head_dim)
        return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))

    def draw_rotary(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (cos, sin) of random angles, each (1, N, 1, D); None without RoPE."""
        if not self.rope:
            return None
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

    def __post_init__(self) -> None:
        model, side = self.model, self.model.stride * self.model.patch
        sides = ("height", self.height, side, 0), ("width", self.width, side, 0)
        for name, given, step, more in (*sides, ("frames", self.frames, model.temporal_stride, 1)):
            if given is not None and (given < 1 or (given - more) % step):
                below = max((given - more) // step * step, 0 if more else step) + more
                multiple = f"a multiple of {step}{', plus 1,' if more else ''} for {model.name}"
                raise ValueError(f"{name}={given} must be {multiple}; the nearest are {below} and {below + step}.")
        if self.family.squares_only and self.height != self.width:
            raise ValueError(f"{model.name} takes square images only; got {self.height}x{self.width}.")

    @property
    def family(self) -> Family:
        """The family that the model belongs to."""
        return get_family(self.model.transformer)

    @property
    def size(self) -> str:
        """Height, width and frames, such as "480x832x81"."""
        return times([side for side in (self.height, self.width, self.frames) if side is not None])

    @property
    def name(self) -> str:
        """Model and size."""
        return f"{self.model.name} {self.size}"

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
        # blocks as long sequences have them, which every kernel takes at short ones too
        sparse = SparseConfig(block_size=64, key_block_size=32) if self.family.computes == "softmax" else None
        return Shape(self.name, grid, blocks, model.heads, model.head_dim, sparse, model.has_rope)

    def flops(self, config: PatchConfig | None = None) -> dict[str, int]:
        """Return the FLOPs of one forward by part, as :func:`forward_flops`; ValueError for blocks that do not fit."""
        if isinstance(config, LinearConfig):
            config.layout_on(self.grid)
        transformer = self.build(torch.device("meta"), torch.bfloat16)
        names = list(self.family.self_attentions(transformer))
        chosen = [] if config is None else [names[index] for index in patched_layers(config, len(names))]
        return forward_flops(transformer, self.family, self.grid, config, chosen)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Build the transformer in eval mode with seeded random weights.

        The parts that diffusers keeps in float32 are in float32.
        """
        settings = self.family.class_settings(self.model, self.height, self.frames)
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
                return torch.randn(1, *shape, device=device, dtype=dtype)
            return torch.ones(1, *shape, device=device, dtype=like)  # masks, and classes

        shapes = family.inputs.conditioning_shapes(transformer.config)
        conditioning = {name: fill(*tensor.shape, like=tensor.dtype) for name, tensor in shapes.items()}
        sample = fill(family.inputs.channels(transformer.config), *latents)
        timestep = torch.full((1,), 500, device=device)
        return {**family.inputs.arguments(transformer, sample, timestep, conditioning), "return_dict": False}


def models() -> dict[str, Model]:
    """Return the configurations of all registered families, by name."""
    return {model.name: model for family in families() for model in family.models}


def choose_cases(name: str, size: str | None = None, frames: int | None = None) -> list[Case]:
    """Return a model at a size, such as "480x832" or "512", and number of frames; by default at each of its own sizes.

    ValueError for an unknown model, or a size that it does not take.
    """
    known = models()
    check_names([name], list(known), "model", listed_by="mhla info")
    model = known[name]
    if frames and not model.is_video:
        raise ValueError(f"--frames {frames} is for video models, but {name} makes images; leave it out.")
    sizes = model.sizes if size is None else [parse_size(size)]
    return [Case(model, *one, (frames or model.frames) if model.is_video else None) for one in sizes]
