"""Vision transformers of transformers: ViT, DeiT, DINOv2, SigLIP's vision tower, and DeiT as the paper trains it.

Softmax self-attention over the patches of a picture, the (height, width) token grid. Class, distillation and register
tokens come before the grid as extra tokens: they attend, and are attended to, with softmax. Positions are added to the
tokens once; transformers interpolates them for other sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import CausalConfig, PatchConfig
from .adapters import Arguments, AttentionInputs, Projected, finite, key_padding_mask
from .family import (
    Attention,
    Family,
    Forward,
    Kwargs,
    Sample,
)
from .models import Clip, Model, squares
from .of_transformers import PROCESSOR, TransformersAdapter, why_not_here


class VisionAdapter(TransformersAdapter):
    """Self-attention over the patches and any tokens before them."""

    def __init__(self, has_extra: bool = False) -> None:
        super().__init__()
        self.has_extra = has_extra

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Name tokens and mask; transformers' attentions take the mask in the place of a context."""
        named = dict(super().arguments(args, kwargs))
        if "encoder_hidden_states" in named:
            named["attention_mask"] = named.pop("encoder_hidden_states")
        return named

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return (B, N) from transformers' mask: (B, N), (B, 1, 1, N), or (B, 1, N, N) with equal rows.

        Raises:
            ValueError: a mask that differs between queries or is not a tensor.
        """
        mask, (batch, tokens) = arguments.get("attention_mask"), arguments["hidden_states"].shape[:2]
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"MHLA honours masks that are tensors and got a {type(mask).__name__}, which transformers makes for "
                "its implementation 'flex_attention'; load the model with attn_implementation='sdpa'."
            )
        if tuple(mask.shape) == (batch, 1, tokens, tokens):
            differs = (mask != mask[:, :, :1]).any()
            message = (
                "MHLA honours a mask that says which tokens take part, the same for every query, and this one differs "
                "between queries: keep softmax attention in this layer with layers=[...]."
            )
            if torch.compiler.is_compiling():
                torch._assert_async(~differs, message)
            elif bool(differs):
                raise ValueError(message)
            mask = mask[:, :, :1]
        return key_padding_mask(mask, batch, tokens)

    def extra(self, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Count all tokens that are not patches, which come before the patches."""
        others = arguments["hidden_states"].shape[1] - tokens
        return (others, 0) if self.has_extra and others > 0 else super().extra(arguments, tokens)

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens."""
        heads, _ = self.heads(attn)
        query, key, value = (
            projection(arguments["hidden_states"]).unflatten(-1, (heads, -1))
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return query, key, value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Return the projected output, and None for the weights."""
        return finite(self.output_projection(attn)(output.flatten(2))), None


@dataclass(kw_only=True, eq=False)
class VisionSelfAttention(Attention):
    """Self-attentions of a vision model, with or without a head."""

    attentions: tuple[str, ...] = ("attention",)
    feed_forwards: tuple[str, ...] = ("mlp",)
    processor: str = PROCESSOR
    trunk_names: tuple[str, ...] = ()
    """Attributes of a model with a head that hold the model without it; absent ones are skipped."""
    layers_path: str = "layers"
    """Path of the blocks in the trunk."""

    def trunk(self, transformer: Any) -> Any:
        """Return the model without its head."""
        found = (getattr(transformer, name, None) for name in self.trunk_names)
        return next((module for module in found if isinstance(module, nn.Module)), transformer)

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Return the layers, by their names in the model."""
        trunk = self.trunk(transformer)
        inside = next((f"{name}." for name, module in transformer.named_children() if module is trunk), "")
        layers = trunk.get_submodule(self.layers_path)
        return {f"{inside}{self.layers_path}.{index}": block for index, block in enumerate(layers)}

    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Refuse an order: a picture has none."""
        if isinstance(config, CausalConfig):
            return (
                f"causal={config.causal!r} orders tokens, and the patches of {type(transformer).__name__} have no "
                "order; leave it out."
            )
        return why_not_here(transformer, config)

    def prepare(self, transformer: Any) -> None:
        """Give the attentions a processor."""
        from .patched_classes import VisionAttention, switch

        for attn in self.self_attentions(transformer).values():
            switch(attn, VisionAttention)


@dataclass(kw_only=True, eq=False)
class VisionForward(Forward):
    """Forward of pixels, (B, C, H, W)."""

    latents_name: str = "pixel_values"
    channels_name: str = "num_channels"
    interpolates: bool = False
    """Whether pixels of any size need an argument that asks to interpolate the positions."""

    def named_arguments(self, transformer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kwargs:
        """Return the arguments of the trunk's forward by name; ValueError without pixels."""
        arguments = super().named_arguments(transformer, args, kwargs)
        if not isinstance(arguments.get("pixel_values"), Tensor):
            raise ValueError("pixel_values=None: pass pictures, (batch, channels, height, width).")
        return arguments

    def patch(self, transformer: Any) -> tuple[int, ...]:
        """Return pixels per token and axis, also by the configuration of a model with a text tower."""
        size = getattr(transformer.config, "vision_config", transformer.config).patch_size
        return size, size

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Return the grid of patches of a size in pixels, without an autoencoder."""
        return self.token_grid(transformer, torch.empty(1, 1, *clip.sizes[0], device="meta"))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass pixels instead of latents, and no time."""
        interpolated = {"interpolate_pos_encoding": True} if self.interpolates else {}
        return {"pixel_values": latents, **conditioning, **interpolated}

    def conditioning_shapes(self, config: Any) -> Sample:
        """Return nothing: the model gets only pixels."""
        return {}


def _vision(name: str, *transformers: str, extra: int = 0, trunks: tuple[str, ...] = (), **where: Any) -> Family:
    """Return a family of transformers with so many tokens before the patches.

    At the paper's 16 blocks by default: 196 tokens are too few uniform blocks of 64 to choose among.
    """
    return Family(
        name=name,
        transformers=transformers,
        attention=VisionSelfAttention(
            adapter=VisionAdapter(has_extra=extra > 0), extra_tokens=extra, trunk_names=trunks, **where
        ),
        forward=VisionForward(),
        library="transformers",
        kind="vision",
        default_clip=Clip(frames=1, fps=1.0, sizes=((224, 224),)),
    )


# a class token before the patches
VIT = _vision("vit", "ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling", extra=1, trunks=("vit",))
# a class token and a distillation token
DEIT = _vision(
    "deit",
    *("DeiTModel", "DeiTForImageClassification"),
    *("DeiTForImageClassificationWithTeacher", "DeiTForMaskedImageModeling"),
    extra=2,
    trunks=("deit",),
)
# a class token, and in models with registers four of these after it
DINOV2 = _vision(
    "dinov2",
    *("Dinov2Model", "Dinov2ForImageClassification", "Dinov2Backbone"),
    *("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersBackbone"),
    extra=5,
    trunks=("dinov2", "dinov2_with_registers"),
    layers_path="encoder.layer",
)
# the vision tower, alone, under a classifier, or beside the text tower, which is not patched; its pooling is no
# self-attention
SIGLIP = _vision(
    "siglip",
    *("SiglipVisionModel", "SiglipForImageClassification", "SiglipModel"),
    trunks=("vision_model",),
    layers_path="encoder.layers",
    attentions=("self_attn",),
)


_POOLED = "PooledViTForImageClassification"
_TINY = {"image_size": 32, "patch_size": 4, "num_labels": 5}


def _pooled(name: str, layers: int, heads: int, head_dim: int, settings: Mapping[str, Any], **sizes: Any) -> Model:
    width = heads * head_dim
    shape = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "layer_norm_eps": 1e-6}
    sizes |= {"settings": {**shape, **settings}, "stride": 1, "layers_argument": "num_hidden_layers"}
    return Model(name, _POOLED, heads, head_dim, layers, **sizes, has_rope=False)


def _deit(name: str, heads: int) -> Model:
    """Return DeiT for ImageNet as PooledViTConfig.deit_t and deit_s make it, at 224 pixels and beyond."""
    sizes = squares(224, 384, 512, 1024, 2048)
    return _pooled(name, 12, heads, 64, {"num_labels": 1000}, blocks=(4, 4), patch=16, sizes=sizes)


# DeiT whose patches are averaged (paper, Appendix E): mhla_diffusers.models.pooled_vit
POOLED_VIT = replace(
    _vision("pooled-vit", _POOLED),
    library="mhla_diffusers.models",
    forward=VisionForward(interpolates=True),
    models=(
        _deit("deit-t-16", 3),
        _deit("deit-s-16", 6),
        _pooled("tiny-pooled-vit", 3, 2, 12, _TINY, blocks=(2, 2), patch=4, sizes=squares(32)),
    ),
)
