"""Models and sizes by name: transformers with random weights, and inputs for them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from ..config import load_patch, patch_names
from ..families import Family, Model, families, get_family
from ..settings import Settings, allow


@dataclass(frozen=True)
class Size(Settings):
    """What one forward works on; ValueError for a batch of no samples."""

    height: int
    width: int
    frames: int | None
    batch: int = field(default=1, metadata=allow(above=0))

    def __str__(self) -> str:
        frames = f"x{self.frames}" if self.frames is not None else ""
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"{self.height}x{self.width}{frames}{batch}"


def models() -> dict[str, Model]:
    """Return the configurations of all registered families, by name."""
    return {model.name: model for family in families() for model in family.models}


def family_of_model(model: Model) -> Family:
    """Return the family that a configuration belongs to."""
    return next(family for family in families() if model.transformer in family.transformers)


def find_models(names: Sequence[str], others: Mapping[str, Model] = MappingProxyType({})) -> list[Model]:
    """Find models by name.

    Args:
        names: of models.
        others: name → model that is allowed too and belongs to no family.

    Raises:
        ValueError: unknown name, with the nearest ones, or that of a preset.
    """
    known = {**models(), **others}
    for name in names:
        if name not in known and name in patch_names():
            family = next(family for family in families() if family.name == load_patch(name).family)
            own = ", ".join(model.name for model in family.models)
            raise ValueError(
                f"{name!r} is a preset, which --patch takes, and no model; models of its family are {own}."
            )
        if name not in known:
            begin = [one for one in known if one.startswith(name)] if name else []
            near = dict.fromkeys([*begin, *get_close_matches(name, known, n=3, cutoff=0.4)])
            hint = f"; the nearest names are {', '.join(list(near)[:5])}" if near else ""
            raise ValueError(f"Unknown model {name!r}{hint}; mhla info lists all.")
    return [known[name] for name in names]


def choose_sizes(
    model: Model, sizes: Sequence[str] | None, frames: Sequence[int] | None, device_type: str, batch: int = 1
) -> list[Size]:
    """Choose sizes to measure a model at: as asked for, such as "480x832", or its own, on a CPU the smallest of them.

    Raises:
        ValueError: a size that cannot be read, or that the model's stride and patch size do not divide, or frames of a
            model that has none.
    """
    if frames and not model.is_video:
        raise ValueError(f"--frames {frames[0]} is for videos, and {model.name} takes none; leave it out.")
    chosen = [parse_size(text) for text in sizes] if sizes else model.sizes[: 1 if device_type == "cpu" else None]
    counts = (frames or (model.frames,)) if model.is_video else (None,)
    step, stride = model.stride * model.patch, model.temporal_stride
    square = {name for family in families() if family.squares_only for name in family.transformers}
    for height, width in chosen:
        for name, pixels in (("height", height), ("width", width)):
            if pixels < step or pixels % step:
                below = max(1, pixels // step) * step
                raise ValueError(
                    f"{name}={pixels} is not divisible by {step} ({model.stride} pixels per latent of {model.name}, "
                    f"patches of {model.patch}); near it are {below} and {below + step}."
                )
        if model.transformer in square and height != width:
            raise ValueError(f"{model.name} takes square images only; got {height}x{width}.")
    for count in counts:
        if count is not None and (count < 1 or (count - 1) % stride):
            below = max(0, count - 1) // stride * stride + 1
            raise ValueError(
                f"frames={count} must be a multiple of {stride} and 1 more; near it are {below} and {below + stride}."
            )
    return [Size(height, width, count, batch) for height, width in chosen for count in counts]


def parse_size(text: str) -> tuple[int, int]:
    """Parse height and width from "480x832", or from "512" for a square; ValueError for anything else."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(part.isdigit() for part in parts):
        raise ValueError(f"size={text!r} is unknown; write HEIGHTxWIDTH such as 480x832, or 512 for a square.")
    return int(parts[0]), int(parts[-1])


def build_transformer(model: Model, size: Size, layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Build a transformer with seeded random weights, in eval mode.

    Weights that diffusers keeps in float32 when it loads a model stay float32 here, and so do positions, which are
    buffers. Some transformers must know the size of their inputs.
    """
    family = family_of_model(model)
    settings = family.class_settings(model, size.height, size.frames, layers)
    torch.manual_seed(0)
    with device:
        transformer = family.build(model.transformer, settings).to(device)
    kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()
    cast_weights(transformer.named_parameters(), dtype, kept)
    return transformer.eval()


def cast_weights(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, kept: Collection[str]) -> None:
    """Give tensors of a model another type, in place, where they are floating-point and no part of a name is kept."""
    for name, tensor in named:
        if tensor.is_floating_point() and not any(part in kept for part in name.split(".")):
            tensor.data = tensor.data.to(dtype)


def make_forward_inputs(
    model: Model, transformer: Any, size: Size, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Make the arguments of the transformer's forward: random latents, and conditioning of the family's shapes.

    Args:
        model: which.
        transformer: of it.
        size: of the picture or video.
        device: where.
        dtype: of all floating-point tensors.

    Raises:
        ValueError: the family does not define its conditioning.
    """
    family = get_family(transformer)
    latents = [size.height // model.stride, size.width // model.stride]
    if size.frames is not None:
        latents.insert(0, family.latent_frames(transformer.config, size.frames, model.temporal_stride))

    def fill(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        if like.is_floating_point:
            return torch.randn(size.batch, *shape, device=device, dtype=dtype)
        return torch.ones(size.batch, *shape, device=device, dtype=like)  # masks, and classes

    shapes = family.conditioning_shapes(transformer.config)
    conditioning = {name: fill(*tensor.shape, like=tensor.dtype) for name, tensor in shapes.items()}
    given, timestep = fill(family.channels(transformer.config), *latents), torch.full((size.batch,), 500, device=device)
    return {**family.forward_arguments(transformer, given, timestep, conditioning), "return_dict": False}


def small_size(model: Model) -> Size:
    """Return a size with about two tokens per block and axis, to check correctness on; square for images.

    One frame, which all of them take, where frames attend by themselves.
    """
    step = model.stride * model.patch
    height, width = (2 * count * step for count in model.blocks[-2:])
    if not model.is_video:
        return Size(height, width, None)
    if len(model.blocks) == 2:
        return Size(height, width, 1)
    return Size(height, width, model.temporal_stride * (2 * model.blocks[0] - 1) + 1)


def token_grid(model: Model, size: Size) -> tuple[int, ...]:
    """Return the token grid of a model at a size; of a single frame where frames attend by themselves."""
    step = model.stride * model.patch
    frames = []
    if size.frames is not None:
        config = SimpleNamespace(patch_size_t=model.temporal_patch)  # all that a family asks of it
        latents = family_of_model(model).latent_frames(config, size.frames, model.temporal_stride)
        frames.append(latents // model.temporal_patch)
    return (*frames, size.height // step, size.width // step)[-len(model.blocks) :]
