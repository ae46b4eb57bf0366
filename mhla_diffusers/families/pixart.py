"""PixArt-α and Σ: ``PixArtTransformer2DModel``.

Softmax self-attention over the image alone, without RoPE; positions are added to the tokens once. α's model for 1024 px
also gets height, width and their ratio; its model for 512 px and Σ's do not. Default blocks are those of all images.
"""

from typing import Any

import torch
from torch import Tensor

from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training, masked_text
from .models import image_model, tiny_image
from .processes import LearnedVarianceDDPM

_CLASS = "PixArtTransformer2DModel"
_PIXELS = 8
"""Pixels per latent along height and width, for the autoencoders of α and Σ."""
_ALPHA = {"caption_channels": 4096}


class _Forward(Forward):
    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return texts of 120 tokens, or of 300 in Σ, whose configurations have no additional conditions."""
        tokens = 300 if config.use_additional_conditions is False else 120
        return tuple(one._replace(shape=(tokens, *one.shape[1:])) for one in self.conditions)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the picture's size in pixels, for models that take it."""
        size: Kwargs = {"resolution": None, "aspect_ratio": None}
        if transformer.use_additional_conditions:
            height, width = (_PIXELS * side for side in latents.shape[2:])
            size["resolution"] = latents.new_tensor([[height, width]]).expand(len(latents), -1)
            size["aspect_ratio"] = latents.new_tensor([[height / width]]).expand(len(latents), -1)
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "added_cond_kwargs": size}


PIXART = Family(
    name="pixart",
    transformers=(_CLASS,),
    attention=Attention(
        # PixArtSigmaPAGPipeline's, with and without classifier-free guidance
        perturbed_processors={"PAGCFGIdentitySelfAttnProcessor2_0": 3, "PAGIdentitySelfAttnProcessor2_0": 2}
    ),
    forward=_Forward(
        # of α's pipeline, see conditions_of
        conditions=masked_text(120, "caption_channels", torch.int64)
    ),
    trained=Training(ddpm=LearnedVarianceDDPM, text_settings={"clean_caption": True}),
    models=(
        image_model("pixart-alpha-xl-2", _CLASS, 16, 72, 28, settings=_ALPHA, has_rope=False),
        image_model(
            "pixart-sigma-xl-2",
            _CLASS,
            16,
            72,
            28,
            settings={**_ALPHA, "use_additional_conditions": False},
            has_rope=False,
        ),
        tiny_image("pixart", _CLASS, {"cross_attention_dim": 24, "caption_channels": 32}, has_rope=False),
    ),
)
