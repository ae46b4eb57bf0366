"""SkyReels-V2: ``SkyReelsV2Transformer3DModel``, Wan with text-, image-to-video and diffusion forcing.

Diffusion forcing gives every frame a time of its own. Called with ``causal_block_size`` above 1 its pipelines also mask
all later blocks of frames from every frame, which MHLA does not run: the summaries of Multi-Head Mixing know no order.
"""

from typing import Any

import torch

from ..config import MHLAConfig
from .forms import AttentionArguments, AttentionForm, AttentionInput
from .sizes import Clip, Model
from .structure import Sample
from .wan import WanFamily, tiny_wan, wan_model

_AT_24_FPS = 1
"""What a model that is told frames per second is told for any but 16."""


class SkyReelsV2Form(AttentionForm):
    """Wan's, without the mask of diffusion forcing."""

    def read(self, attn: Any, arguments: AttentionArguments) -> AttentionInput:
        """What the arguments mean.

        Raises:
            ValueError: the block-causal mask, or another that is no key-padding mask.
        """
        mask = arguments.attention_mask
        if mask is not None and mask.ndim == 4 and mask.shape[2] == mask.shape[3]:
            raise ValueError(
                "SkyReels-V2's diffusion forcing masks later blocks of frames from every frame, since the pipeline was "
                "called with causal_block_size > 1. MHLA's summaries know no order, so a mask that differs between "
                "queries is refused. Call the pipeline with causal_block_size=1, with any ar_step, for which there is "
                "no mask; left out, it is that of the last call, transformer.config.num_frame_per_block. The mask "
                "goes to all layers, so no choice of layers=[...] keeps it away."
            )
        return super().read(attn, arguments)


def _model(name: str, heads: int, ffn_dim: int, layers: int) -> Model:
    return wan_model(
        name,
        heads,
        ffn_dim,
        layers,
        transformer="SkyReelsV2Transformer3DModel",
        blocks=(8, 3, 6),
        sizes=((544, 960), (720, 1280)),
        frames=97,
        # at 720p the models have 121 frames
        grids={"540p": (25, 34, 60), "720p": (31, 45, 80)},
    )


class SkyReelsV2Family(WanFamily):
    """Video transformers with a (frames, height, width) token grid."""

    name = "skyreels_v2"
    transformers = ("SkyReelsV2Transformer3DModel",)
    attention_class = "transformer_skyreels_v2.SkyReelsV2Attention"
    form = SkyReelsV2Form()
    # blocks as long as Wan's, 354 tokens each at 540p and 97 frames; 52 tokens per tile there, 113 at 720p and 121
    default_config = MHLAConfig(blocks=(8, 3, 6), mixing_per_head=True, exact="content", exact_tiles=(11, 9, 10))
    default_clip = Clip(frames=97, fps=24.0, sizes=((544, 960),))
    # numbers of diffusers' script that converts the checkpoints
    measured_unasked = False
    models = (
        _model("skyreels-v2-1.3b", 12, 8960, 30),
        _model("skyreels-v2-14b", 40, 13824, 40),
        tiny_wan("tiny-skyreels_v2", "SkyReelsV2Transformer3DModel"),
    )

    def self_attention_processor(self) -> Any:
        """``SkyReelsV2AttnProcessor``."""
        from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor

        return SkyReelsV2AttnProcessor()

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """As Wan's, one time for all frames; with the rate where the model is told it."""
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        if transformer.config.inject_sample_info:
            arguments["fps"] = [_AT_24_FPS] * len(latents)
        return arguments
