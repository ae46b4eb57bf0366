"""Transformers of real models with random weights, and inputs for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..families import get_family

_WAN_TEXT_TOKENS = 512
_SANA_TEXT_TOKENS = 300


@dataclass(frozen=True)
class Model:
    """A configuration that can be built without downloading anything."""

    name: str
    transformer: str
    """Class name in diffusers."""
    settings: Mapping[str, Any]
    """Arguments of the class that differ from its defaults."""
    layers: int
    blocks: tuple[int, ...]
    """Block counts of MHLA."""
    stride: int
    """Pixels per latent along height and width."""
    patch: int
    """Latents per token along height and width."""
    sizes: tuple[tuple[int, int], ...]
    """Height and width in pixels that are measured unless others are asked for; the smallest alone on a CPU."""
    frames: int | None = None
    """Of a video; None for an image."""

    @property
    def is_video(self) -> bool:
        """Whether inputs have frames."""
        return self.frames is not None


def _wan(name: str, heads: int, ffn_dim: int, layers: int) -> Model:
    settings = {"num_attention_heads": heads, "ffn_dim": ffn_dim}
    sizes = ((480, 832), (720, 1280))
    return Model(name, "WanTransformer3DModel", settings, layers, (7, 3, 5), 8, 2, sizes, frames=81)


def _sana(name: str, heads: int, layers: int, cross_heads: int, cross_head_dim: int) -> Model:
    settings = {
        "num_attention_heads": heads,
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": cross_head_dim,
        "cross_attention_dim": heads * 32,
    }
    sizes = tuple((side, side) for side in (512, 1024, 2048, 4096))
    return Model(name, "SanaTransformer2DModel", settings, layers, (4, 4), 32, 1, sizes)


def _dit(name: str, heads: int, head_dim: int, layers: int) -> Model:
    settings = {"num_attention_heads": heads, "attention_head_dim": head_dim, "out_channels": 8}
    sizes = tuple((side, side) for side in (256, 512, 1024, 2048, 4096))
    return Model(name, "DiTTransformer2DModel", settings, layers, (4, 4), 8, 2, sizes)


_TINY_WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 32, "freq_dim": 16}
_TINY_SANA = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 8,
    "in_channels": 4,
}
_TINY_DIT = {"num_attention_heads": 2, "attention_head_dim": 12, "out_channels": 8}

MODELS = {
    model.name: model
    for model in (
        _wan("wan2.1-1.3b", 12, 8960, 30),
        _wan("wan2.1-14b", 40, 13824, 40),
        _sana("sana-0.6b", 36, 28, 16, 72),
        _sana("sana-1.6b", 70, 20, 20, 112),
        _dit("dit-s-2", 6, 64, 12),
        _dit("dit-xl-2", 16, 72, 28),
        Model("tiny-wan", "WanTransformer3DModel", _TINY_WAN, 3, (1, 2, 2), 8, 2, ((64, 96),), frames=9),
        Model("tiny-sana", "SanaTransformer2DModel", _TINY_SANA, 3, (2, 2), 32, 1, ((256, 256),)),
        Model("tiny-dit", "DiTTransformer2DModel", _TINY_DIT, 3, (2, 2), 8, 2, ((64, 64),)),
    )
}
"""The tiny ones are for trying the commands out."""

GPU_MODELS = tuple(name for name in MODELS if not name.startswith("tiny"))
CPU_MODELS = ("dit-s-2",)
"""What is measured unless other models are asked for."""


@dataclass(frozen=True)
class Size:
    """What one forward works on."""

    height: int
    width: int
    frames: int | None
    batch: int = 1

    def __str__(self) -> str:
        frames = f"x{self.frames}" if self.frames is not None else ""
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"{self.height}x{self.width}{frames}{batch}"


def find_models(names: Sequence[str] | None, device_type: str) -> list[Model]:
    """Models by name; for None the real ones on a GPU and a small one on a CPU.

    Raises:
        ValueError: unknown name.
    """
    for name in names or ():
        if name not in MODELS:
            raise ValueError(f"Unknown model {name!r}; allowed: {', '.join(MODELS)}.")
    return [MODELS[name] for name in names or (CPU_MODELS if device_type == "cpu" else GPU_MODELS)]


def choose_sizes(
    model: Model, sizes: Sequence[str] | None, frames: Sequence[int] | None, device_type: str, batch: int = 1
) -> list[Size]:
    """Sizes to measure a model at.

    Args:
        model: which.
        sizes: "480x832", or "512" for a square; the model's own for None, on a CPU the smallest of them.
        frames: of videos; ignored for image models.
        device_type: cpu, cuda, …
        batch: samples per forward.

    Raises:
        ValueError: a size that cannot be read, or that the model's stride and patch size do not divide.
    """
    own = model.sizes[:1] if device_type == "cpu" else model.sizes
    chosen = [parse_size(text) for text in sizes] if sizes else own
    counts = (frames or (model.frames,)) if model.is_video else (None,)
    found = [Size(height, width, count, batch) for height, width in chosen for count in counts]
    for size in found:
        _check_size(model, size)
    return found


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from "480x832", or from "512" for a square.

    Raises:
        ValueError: neither.
    """
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(part.isdigit() for part in parts):
        raise ValueError(f"size={text!r} is unknown; write HEIGHTxWIDTH such as 480x832, or 512 for a square.")
    return int(parts[0]), int(parts[-1])


def _check_size(model: Model, size: Size) -> None:
    step = model.stride * model.patch
    for name, pixels in (("height", size.height), ("width", size.width)):
        if pixels < step or pixels % step:
            below = max(1, pixels // step) * step
            raise ValueError(
                f"{name}={pixels} is not divisible by {step} ({model.stride} pixels per latent of {model.name}, "
                f"patches of {model.patch}); near it are {below} and {below + step}."
            )
    if size.frames is not None and (size.frames < 1 or size.frames % 4 != 1):
        below = max(0, size.frames - 1) // 4 * 4 + 1
        raise ValueError(
            f"frames={size.frames} must be a multiple of 4 and 1 more; near it are {below} and {below + 4}."
        )
    if model.transformer == "DiTTransformer2DModel" and size.height != size.width:
        raise ValueError(f"{model.name} takes square images only; got {size.height}x{size.width}.")
    if size.batch < 1:
        raise ValueError(f"batch={size.batch} must be positive.")


def build_transformer(model: Model, size: Size, layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformer with seeded random weights, in eval mode.

    Weights that diffusers keeps in float32 when it loads a model stay float32 here.

    Args:
        model: which.
        size: of its inputs, which DiT and SANA must know.
        layers: build only so many; None for all.
        device: where; "meta" for shapes alone.
        dtype: of the other weights.

    Raises:
        ValueError: more layers than the model has, or none.
    """
    import diffusers

    if layers is not None and not 1 <= layers <= model.layers:
        raise ValueError(f"layers={layers} must be from 1 to {model.layers}, the layers of {model.name}.")
    settings = {**model.settings, "num_layers": layers or model.layers}
    if not model.is_video:
        settings["sample_size"] = size.height // model.stride
    torch.manual_seed(0)
    with device:
        transformer = getattr(diffusers, model.transformer)(**settings).to(device)
    kept = tuple(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    for name, parameter in transformer.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    for buffer in transformer.buffers():
        if not model.is_video and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return transformer.eval()


def make_forward_inputs(
    model: Model, transformer: Any, size: Size, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of the transformer's forward: random latents, and text of the length that the pipeline gives.

    Args:
        model: which.
        transformer: of it.
        size: of the picture or video.
        device: where.
        dtype: of latents and text.
    """
    config, family = transformer.config, get_family(transformer).name
    batch = size.batch
    latents = [size.height // model.stride, size.width // model.stride]
    if size.frames is not None:
        latents.insert(0, (size.frames - 1) // 4 + 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, device=device, dtype=dtype)

    timestep = torch.full((batch,), 500, device=device)
    inputs = {"hidden_states": draw(config.in_channels, *latents), "timestep": timestep, "return_dict": False}
    if family == "dit":
        return inputs | {"class_labels": torch.zeros(batch, dtype=torch.int64, device=device)}
    if family == "sana":
        text = draw(_SANA_TEXT_TOKENS, config.caption_channels)
        mask = torch.ones(batch, _SANA_TEXT_TOKENS, dtype=torch.int64, device=device)
        return inputs | {"encoder_hidden_states": text, "encoder_attention_mask": mask}
    return inputs | {"encoder_hidden_states": draw(_WAN_TEXT_TOKENS, config.text_dim)}


def small_size(model: Model, size: Size) -> Size:
    """A size whose token grid has two tokens or so per block and axis, to check correctness on; square for images."""
    step = model.stride * model.patch
    height, width = (2 * count * step for count in model.blocks[-2:])
    if not model.is_video:
        return Size(height, width, None)
    return Size(height, width, 4 * (2 * model.blocks[0] - 1) + 1)
