"""PixArt-α as a model family: all that the package has to be told of it."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from mhla_diffusers import Family, MHLAConfig
from mhla_diffusers.families import Clip, DiffusionProcess, LearnedVarianceDDPM, Model, Sample

_TEXT_TOKENS = 120
"""Length that the pipeline pads text to."""
_TOLD_ITS_SIZE = 128
"""``sample_size`` of the 1024 px model, the one that is also conditioned on height, width and aspect ratio."""


class PixArtFamily(Family):
    """Text-to-image transformers with a (height, width) token grid; softmax self-attention without RoPE."""

    name = "pixart"
    transformers = ("PixArtTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config = MHLAConfig(blocks=(4, 4))
    default_clip = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    models = (
        Model(
            name="pixart-xl-2",
            transformer="PixArtTransformer2DModel",
            settings={"caption_channels": 4096},
            heads=16,
            head_dim=72,
            layers=28,
            blocks=(4, 4),
            stride=8,
            patch=2,
            sizes=((1024, 1024), (2048, 2048), (4096, 4096)),
            grids={"1024px": (64, 64), "2048px": (128, 128)},
        ),
        Model(
            name="tiny-pixart",
            transformer="PixArtTransformer2DModel",
            settings={
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "cross_attention_dim": 24,
                "caption_channels": 32,
            },
            heads=2,
            head_dim=12,
            layers=3,
            blocks=(2, 2),
            stride=8,
            patch=2,
            sizes=((64, 64),),
            grids={"64px": (4, 4)},
        ),
    )

    def self_attention_processor(self) -> Any:
        """``AttnProcessor2_0``."""
        return AttnProcessor2_0()

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """A thousand steps of DDPM with learned variance."""
        return LearnedVarianceDDPM()

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (120, channels), ``encoder_attention_mask`` (120,) and, for 1024 px, the size."""
        chosen = {"clean_caption": True, **(settings or {})}  # as in a call of the pipeline
        embeddings, mask, *_ = self.encode_text(pipe, prompt, chosen)
        sample = {"encoder_hidden_states": embeddings[0], "encoder_attention_mask": mask[0]}
        transformer = pipe.transformer.config
        if transformer.sample_size == _TOLD_ITS_SIZE:
            own = transformer.sample_size * pipe.vae_scale_factor
            height, width = chosen.get("height") or own, chosen.get("width") or own
            sample["added_cond_kwargs.resolution"] = embeddings.new_tensor([height, width])
            sample["added_cond_kwargs.aspect_ratio"] = embeddings.new_tensor([height / width])
        return sample

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """What :meth:`encode_prompt` gives, without values."""
        shapes = {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.caption_channels, device="meta"),
            "encoder_attention_mask": torch.empty(_TEXT_TOKENS, dtype=torch.int64, device="meta"),
        }
        if transformer.sample_size == _TOLD_ITS_SIZE:
            shapes["added_cond_kwargs.resolution"] = torch.empty(2, device="meta")
            shapes["added_cond_kwargs.aspect_ratio"] = torch.empty(1, device="meta")
        return shapes
