"""Tiny instances of transformers' real vision models, and pictures for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipVisionConfig,
    ViTConfig,
    ViTForImageClassification,
)

from mhla_diffusers.families import Family, get_family
from mhla_diffusers.models import PooledViTConfig, PooledViTForImageClassification

from ..models import seeded

BLOCKS, GRID = (2, 2), (8, 8)
RAGGED = (7, 5)
"""Patches of another picture, which the blocks do not divide."""
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 4}


def vit(cls: type = ViTForImageClassification, **settings: Any) -> Any:
    return seeded(cls, config=ViTConfig(**(SIZES | {"intermediate_size": 32, "encoder_stride": 4} | settings)))


def deit(cls: type = DeiTForImageClassification, **settings: Any) -> Any:
    return seeded(cls, config=DeiTConfig(**(SIZES | {"intermediate_size": 32, "encoder_stride": 4} | settings)))


def dinov2(cls: type, **settings: Any) -> Any:
    return seeded(cls, config=Dinov2Config(**(SIZES | {"mlp_ratio": 1, "out_features": ["stage3"]} | settings)))


def registers(cls: type = Dinov2WithRegistersForImageClassification, **settings: Any) -> Any:
    settings = SIZES | {"mlp_ratio": 1, "out_features": ["stage3"]} | settings
    return seeded(cls, config=Dinov2WithRegistersConfig(**settings))


def siglip_vision(cls: type, **settings: Any) -> Any:
    return seeded(cls, config=SiglipVisionConfig(**(SIZES | {"intermediate_size": 32} | settings)))


def siglip(cls: type = SiglipForImageClassification) -> Any:
    text = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text |= {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return seeded(cls, config=SiglipConfig(vision_config=SIZES | {"intermediate_size": 32}, text_config=text))


def pooled_vit(**settings: Any) -> Any:
    return seeded(
        PooledViTForImageClassification, config=PooledViTConfig(**(SIZES | {"intermediate_size": 32} | settings))
    )


def save_vit(folder: Path) -> None:
    """As the Hub has one, of ViT's usual size in pixels and patches."""
    vit(image_size=224, patch_size=16).save_pretrained(folder)


@dataclass(frozen=True)
class VisionCase:
    """One family, by a model with a head, as a case of the contract of all families."""

    transformer: Callable[..., Any]
    family: str
    before: int
    """Tokens before the patches."""
    other_size: dict[str, Any]
    """What the model must be told to take pictures of another size."""
    attention: str
    """Name of a layer's attention."""
    output: str
    """Name of its output projection."""
    blocks: tuple[int, int] = BLOCKS
    grid: tuple[int, int] = GRID

    @property
    def of_family(self) -> Family:
        return get_family(self.family)

    @property
    def attentions(self) -> tuple[str, ...]:
        return tuple(self.attention.format(layer) for layer in range(SIZES["num_hidden_layers"]))

    @property
    def extra(self) -> tuple[int, int]:
        return self.before, 0

    def inputs(self, batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
        """Keyword arguments of a forward."""
        other_size = self.other_size if ragged else {}
        return {"pixel_values": pictures(RAGGED if ragged else GRID, batch, seed), **other_size}


INTERPOLATE = {"interpolate_pos_encoding": True}
CASES = {
    "vit": VisionCase(vit, "vit", 1, INTERPOLATE, "vit.layers.{}.attention", "o_proj"),
    "deit": VisionCase(deit, "deit", 2, INTERPOLATE, "deit.layers.{}.attention", "o_proj"),
    "dinov2": VisionCase(registers, "dinov2", 5, {}, "dinov2_with_registers.encoder.layer.{}.attention", "o_proj"),
    "pooled-vit": VisionCase(pooled_vit, "pooled-vit", 0, INTERPOLATE, "layers.{}.attention", "o_proj"),
    "siglip": VisionCase(siglip, "siglip", 0, INTERPOLATE, "vision_model.encoder.layers.{}.self_attn", "out_proj"),
}


def pictures(grid: tuple[int, int] = GRID, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Pixels (B, 3, H, W) whose patches are a grid."""
    return torch.randn(batch, 3, *(4 * side for side in grid), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def output(model: Any, pixels: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The first thing that a model returns: of one with a head its logits."""
    found = model(pixel_values=pixels, return_dict=False, **arguments)[0]
    return found if isinstance(found, torch.Tensor) else torch.stack(list(found))
