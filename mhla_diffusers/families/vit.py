"""ViT and DeiT of transformers, and DeiT as the paper trains it, without a class token."""

from typing import Any

import torch

from .sizes import Model
from .structure import Sample
from .vision import PrefixedAdapter, VisionAdapter, VisionFamily


class ViTFamily(VisionFamily):
    """ViT: a class token before the patches."""

    name = "vit"
    transformers = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")
    trunk_names = ("vit",)
    attentions = ("attention",)
    adapter = PrefixedAdapter()
    extra_tokens = 1


class DeiTFamily(VisionFamily):
    """DeiT: a class token and a distillation token before the patches."""

    name = "deit"
    transformers = (
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "DeiTForMaskedImageModeling",
    )
    trunk_names = ("deit",)
    attentions = ("attention",)
    adapter = PrefixedAdapter()
    extra_tokens = 2


def _model(name: str, layers: int, heads: int, head_dim: int, settings: dict[str, Any], **more: Any) -> Model:
    size = {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "intermediate_size": 4 * heads * head_dim,
        "layer_norm_eps": 1e-6,
    }
    return Model(
        name,
        "PooledViTForImageClassification",
        size | settings,
        heads,
        head_dim,
        layers,
        stride=1,
        layers_argument="num_hidden_layers",
        **more,
    )


def _deit(name: str, heads: int) -> Model:
    """DeiT for ImageNet, as ``PooledViTConfig.deit_t`` and ``deit_s`` make it, at 224 pixels and beyond."""
    sizes = tuple((side, side) for side in (224, 384, 512, 1024, 2048))
    return _model(name, 12, heads, 64, {"num_labels": 1000}, blocks=(4, 4), patch=16, sizes=sizes)


_TINY = _model(
    "tiny-pooled-vit",
    3,
    2,
    12,
    {"image_size": 32, "patch_size": 4, "num_labels": 5},
    blocks=(2, 2),
    patch=4,
    sizes=((32, 32),),
)


class PooledViTFamily(VisionFamily):
    """DeiT whose patches are averaged (paper, Appendix E): :mod:`mhla_diffusers.models.pooled_vit`."""

    name = "pooled-vit"
    library = "mhla_diffusers.models"
    transformers = ("PooledViTForImageClassification",)
    attentions = ("attention",)
    adapter = VisionAdapter()
    models = (_deit("deit-t-16", 3), _deit("deit-s-16", 6), _TINY)

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Pixels of any size: positions are interpolated."""
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "interpolate_pos_encoding": True}
