"""Tiny instances of the real diffusers classes that tests patch, and their inputs; pipelines.py has pipelines of them.

Weights are random and seeded. A model's parameters are all random (also those that a fresh model has at 0 or 1, as the
weights of norms), so that a test notices when one is left out, unless a test asks for a fresh model with ``noise=0``.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, SanaTransformer2DModel, WanTransformer3DModel, WanVACETransformer3DModel
from torch import nn

from mhla_diffusers import apply_mhla
from mhla_diffusers.benchmark.cases import Case
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.families import Model, get_family

_TEXT_TOKENS = 6
_I2V_TEXT_TOKENS = 512
"""Wan's image-to-video cross-attention takes the last 512 tokens of its context as the text."""


def seeded(cls: type, seed: int = 0, noise: float = 0.15, **config: Any) -> Any:
    """An instance in eval mode whose parameters are all random; the more noise, the more its attention matters."""
    torch.manual_seed(seed)
    model = cls(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model.eval()


def wan(cls: type = WanTransformer3DModel, **config: Any) -> Any:
    """Wan 2.1 text-to-video, four layers, unless the arguments of the class say otherwise."""
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "text_dim": 32,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 4,
        "rope_max_seq_len": 32,
    }
    return seeded(cls, **(settings | config))


def wan_i2v() -> WanTransformer3DModel:
    """Wan 2.1 image-to-video: image tokens in the cross-attention, latents with the mask and the first frame."""
    return wan(in_channels=36, image_dim=8, added_kv_proj_dim=24, num_layers=3)


def wan_ti2v() -> WanTransformer3DModel:
    """Wan 2.2 TI2V-5B: a timestep for every token."""
    return wan(in_channels=8, out_channels=8, num_layers=3)


def wan_vace() -> WanVACETransformer3DModel:
    """Wan VACE: three layers and two control layers."""
    return wan(WanVACETransformer3DModel, num_layers=3, vace_layers=[0, 2], vace_in_channels=12)


def of_family(name: str, **config: Any) -> Any:
    """The tiny model of a family, unless the arguments of the class say otherwise."""
    family = get_family(name)
    (model,) = (one for one in family.models if one.is_tiny)
    settings = family.class_settings(model, height=model.sizes[0][0])
    return seeded(family.transformer_class(model.transformer), **(settings | config))


def sana(**config: Any) -> SanaTransformer2DModel:
    """SANA 1.0, three layers."""
    return of_family("sana", **({"out_channels": 4} | config))


def sana_qk_norm() -> SanaTransformer2DModel:
    """SANA 1.5: query and key normed across heads, guidance embedded."""
    return sana(qk_norm="rms_norm_across_heads", guidance_embeds=True)


def dit(**config: Any) -> DiTTransformer2DModel:
    """DiT with learned variance, four layers."""
    return of_family("dit", **({"num_layers": 4, "sample_size": 16} | config))


@dataclass(frozen=True)
class ModelCase:
    """One model to test, with what fits it."""

    build: Callable[[], nn.Module]
    channels: int
    """Channels of the usual input."""
    self_attentions: int
    """Number of layers that can be patched."""
    blocks: tuple[int, ...]
    """Block counts that divide ``grid``."""
    grid: tuple[int, ...]
    """Token grid of the usual input."""
    ragged_grid: tuple[int, ...]
    """Token grid that the block counts do not divide."""
    patch: int = 2
    """Latent pixels of a token, in height and width."""


_VIDEO = {"blocks": (2, 2, 3), "grid": (4, 4, 6), "ragged_grid": (3, 5, 4)}
_IMAGE = {"blocks": (4, 2), "grid": (8, 8), "ragged_grid": (7, 5), "patch": 1}

FAMILIES = {
    "wan": ModelCase(wan, 16, 4, **_VIDEO),
    "wan_i2v": ModelCase(wan_i2v, 36, 3, **_VIDEO),
    "wan_ti2v": ModelCase(wan_ti2v, 8, 3, **_VIDEO),
    "wan_vace": ModelCase(wan_vace, 16, 5, **_VIDEO),
    "sana": ModelCase(sana, 4, 3, **_IMAGE),
    "sana_qk_norm": ModelCase(sana_qk_norm, 4, 3, **_IMAGE),
    # diffusers' DiT takes square latents only
    "dit": ModelCase(dit, 4, 4, blocks=(4, 2), grid=(8, 8), ragged_grid=(7, 7)),
}
"""Every model that can be patched, by name."""


def inputs(name: str, *, batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Keyword arguments of the forward of model ``name``; those with a batch axis are tensors.

    Args:
        name: key of ``FAMILIES``.
        batch: number of samples.
        ragged: latents whose token grid the family's block counts do not divide.
        seed: of the random values.
    """
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    grid = family.ragged_grid if ragged else family.grid
    latents = draw(family.channels, *grid[:-2], *(family.patch * count for count in grid[-2:]))
    timestep = torch.tensor([500, 250, 750])[:batch]
    result: dict[str, Any] = {"hidden_states": latents, "timestep": timestep}
    if name == "dit":
        return result | {"class_labels": torch.tensor([3, 7, 1000])[:batch]}
    if name.startswith("sana"):
        keep = torch.arange(_TEXT_TOKENS) < torch.tensor([[_TEXT_TOKENS], [_TEXT_TOKENS - 2], [3]])[:batch]
        result |= {"encoder_hidden_states": draw(_TEXT_TOKENS, 8), "encoder_attention_mask": keep.long()}
        return result | ({"guidance": torch.tensor([4.5, 3.0, 6.0])[:batch]} if name == "sana_qk_norm" else {})
    result["encoder_hidden_states"] = draw(_I2V_TEXT_TOKENS if name == "wan_i2v" else _TEXT_TOKENS, 32)
    if name == "wan_i2v":
        result["encoder_hidden_states_image"] = draw(5, 8)
    if name == "wan_ti2v":
        result["timestep"] = (timestep[:, None] * (torch.arange(torch.Size(grid).numel()) % 2)).long()
    if name == "wan_vace":
        result["control_hidden_states"] = draw(12, *latents.shape[2:])
    return result


def patched(name: str, **settings: Any) -> Any:
    """Model ``name``, all self-attentions replaced in all steps: by MHLA, or with a density by sparse attention."""
    usual = NOTHING_DENSE if "density" in settings else {"blocks": FAMILIES[name].blocks}
    return apply_mhla(FAMILIES[name].build(), **(usual | settings))


@torch.no_grad()
def output(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What a transformer predicts, without gradients; of Z-Image's list a batch. Kandinsky's is in no tuple."""
    found = model(**arguments, return_dict=False)
    found = found if isinstance(found, torch.Tensor) else found[0]
    found = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
    # nothing reads what Ideogram 4 makes of padding
    return found * (arguments["indicator"] != 0)[..., None] if "indicator" in arguments else found


def attn_processors(model: Any) -> dict[str, Any]:
    """Processors by name as diffusers' property of that name has them, of any transformer."""
    modules = model.named_modules()
    return {f"{name}.processor": one.processor for name, one in modules if hasattr(one, "set_processor")}


def relative_change(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; fails unless ``found`` is finite."""
    assert found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_changed(found: torch.Tensor, before: torch.Tensor) -> None:
    """By far more than rounding, and still finite."""
    assert relative_change(found, before) > 1e-4


def bytes_alive() -> int:
    """Count the bytes of all tensors with values in this process; those that compilers work with have none."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(x.nbytes for x in gc.get_objects() if type(x) in kinds and not x.is_meta and x.layout == torch.strided)


def small_size(model: Model) -> tuple[int, int, int | None]:
    """Height, width and frames of about two tokens per MHLA block and axis, for quick runs."""
    height, width = (2 * count * model.stride * model.patch for count in model.blocks[-2:])
    frames = None
    if model.is_video:  # one frame where frames attend by themselves
        frames = 1 if len(model.blocks) == 2 else model.temporal_stride * (2 * model.blocks[0] - 1) + 1
    return height, width, frames


def small_case(model: Model) -> Case:
    """Return a case of that size."""
    return Case(model, *small_size(model))
