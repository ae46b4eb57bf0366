"""HunyuanImage 2.1: ``HunyuanImageTransformer2DModel``.

HunyuanVideo's layout over an image whose latents are 32 times smaller than its pixels: the image, which RoPE rotates,
then text of two kinds, of the prompt and of letters to be drawn (glyphs); masked tokens are sorted last. The attention
that refines the text before the blocks is not patched. Default blocks cut 64x64 tokens, an image of 2048 px.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import PatchConfig
from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip, image_model, squares, tiny_image
from .values import WithoutValues

_CLASS = "HunyuanImageTransformer2DModel"
_TEXT_TOKENS, _GLYPH_TOKENS = 1000, 128
"""Lengths that the pipeline pads to."""
_TINY: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16}
_TINY |= {"text_embed_2_dim": 32, "rope_axes_dim": (8, 4), "patch_size": (1, 1)}
_REAL: dict[str, Any] = {"settings": {"text_embed_2_dim": 1472}, "stride": 32, "patch": 1}
_REAL |= {"sizes": squares(2048, 4096), "more_layers": {"num_single_layers": 40}}


class _Attention(Attention):
    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Refuse the refiner, whose tokens have frames."""
        if len(transformer.config.patch_size) == 2:
            return None
        return (
            f"patch_size={tuple(transformer.config.patch_size)} is that of HunyuanImage's refiner, whose tokens have "
            "frames; patch the transformer of HunyuanImagePipeline."
        )


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the latents; ValueError under gradient checkpointing."""
        if transformer.gradient_checkpointing and torch.is_grad_enabled():
            raise ValueError(
                "diffusers' HunyuanImage fails under gradient checkpointing, whose function takes no named arguments. "
                "Train with gradient_checkpointing: false."
            )
        return super().grid_of_arguments(transformer, arguments)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Give time in the latents' type; the velocity is a mean-flow model's output for steps of no length."""
        timestep = timestep.to(latents.dtype)  # whose type is the type that the transformer computes in
        end = {"timestep_r": timestep} if transformer.config.use_meanflow else {}
        return {**super().arguments(transformer, latents, timestep, conditioning), **end}


HUNYUAN_IMAGE = Family(
    name="hunyuan_image",
    transformers=(_CLASS,),
    attention=_Attention(
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        feed_forwards=("ff", "ff_context", "proj_mlp", "proj_out"),
        adapter=JointAdapter(),
        processor="diffusers.models.transformers.transformer_hunyuanimage.HunyuanImageAttnProcessor",
        dispatches=True,
        extra=(0, None),
        extra_tokens=_TEXT_TOKENS + _GLYPH_TOKENS,
    ),
    forward=_Forward(
        guidance=3250.0,  # a thousand times the pipeline's default
        # Qwen's tokens after the pipeline's own instruction, and ByT5's of the text in quotation marks
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),
            Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=1, dtype=torch.int64),
            Condition("encoder_hidden_states_2", (_GLYPH_TOKENS, "text_embed_2_dim"), output=2),
            Condition("encoder_attention_mask_2", (_GLYPH_TOKENS,), output=3, dtype=torch.int64),
        ),
        without_values=WithoutValues,  # the transformer reads which tokens are masked
    ),
    trained=Training(),
    default_clip=Clip(frames=1, fps=1.0, sizes=((2048, 2048),)),
    models=(
        image_model("hunyuan-image-2.1", _CLASS, 28, 128, 20, **_REAL),
        tiny_image("hunyuan_image", _CLASS, _TINY, layers=2, more_layers={"num_single_layers": 1}, stride=8, patch=1),
    ),
)
