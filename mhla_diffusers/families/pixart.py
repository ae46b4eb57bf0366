"""PixArt-α and Σ: ``PixArtTransformer2DModel``.

Softmax self-attention without RoPE, since positions are added to the tokens once. α's model for 1024 px is also told
height, width and their ratio, that for 512 px and Σ's are not.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from .base import Family
from .processes import DiffusionProcess, LearnedVarianceDDPM
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Model
from .structure import Sample

_PIXELS = 8
"""Per latent along height and width, of the autoencoders of α and Σ."""


def _model(name: str, **settings: Any) -> Model:
    settings = {"caption_channels": 4096, **settings}
    return Model(
        name,
        "PixArtTransformer2DModel",
        settings,
        16,
        72,
        28,
        (4, 4),
        stride=8,
        patch=2,
        sizes=LARGE_SQUARES,
        grids=GRIDS_OF_LARGE_SQUARES,
    )


_TINY = Model(
    "tiny-pixart",
    "PixArtTransformer2DModel",
    {"num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 32},
    2,
    12,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class PixArtFamily(Family):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "pixart"
    transformers = ("PixArtTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
    # text of T5-XXL, the rest the class's defaults
    models = (_model("pixart-alpha-xl-2"), _model("pixart-sigma-xl-2", use_additional_conditions=False), _TINY)

    def self_attention_processor(self) -> Any:
        """``AttnProcessor2_0``."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def perturbed_parts(self, processor: Any) -> int | None:
        """``PixArtSigmaPAGPipeline`` has two, with and without classifier-free guidance."""
        parts = {"PAGCFGIdentitySelfAttnProcessor2_0": 3, "PAGIdentitySelfAttnProcessor2_0": 2}
        return parts.get(type(processor).__name__)

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With the size of the picture in pixels, for models that are told it."""
        size: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if transformer.use_additional_conditions:
            height, width = (_PIXELS * side for side in latents.shape[2:])
            size["resolution"] = latents.new_tensor([[height, width]]).expand(len(latents), -1)
            size["aspect_ratio"] = latents.new_tensor([[height / width]]).expand(len(latents), -1)
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "added_cond_kwargs": size}

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """A thousand steps of DDPM with learned variance."""
        return LearnedVarianceDDPM()

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (120 or 300, channels) of T5 and ``encoder_attention_mask`` (120 or 300,)."""
        chosen = {"clean_caption": True, **(settings or {})}  # as in a call of the pipeline
        text, mask, *_ = self.encode_text(pipe, prompt, chosen)
        return {"encoder_hidden_states": text[0], "encoder_attention_mask": mask[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (120 or 300, channels) and ``encoder_attention_mask`` (120 or 300,)."""
        # α's pipeline pads to 120 tokens and Σ's to 300; Σ's configurations say that they are not told the size
        tokens = 300 if transformer.use_additional_conditions is False else 120
        return {
            "encoder_hidden_states": torch.empty(tokens, transformer.caption_channels, device="meta"),
            "encoder_attention_mask": torch.empty(tokens, dtype=torch.int64, device="meta"),
        }
