"""Latte: ``LatteTransformer3DModel``.

Spatial blocks, in which every frame attends to itself, take turns with temporal ones, in which every place attends to
itself at other times. The patch is of the spatial ones, ``transformer_blocks``: they see the frames as a batch, each a
(height, width) token grid; a temporal attention has no more tokens than there are frames. Positions are added to the
tokens, there is no RoPE. Costs and sizes are told of a frame.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from .base import Family
from .encoding import of_unit_scale
from .processes import DiffusionProcess, LearnedVarianceDDPM
from .sizes import Clip, Model
from .structure import Sample

_TEXT_TOKENS = 120
"""Length that the pipeline pads several prompts to."""

_OF_LATTE = {"norm_type": "ada_norm_single", "out_channels": 8, "attention_bias": True, "patch_size": 2}
"""What makes ``LatteTransformer3DModel`` of its class's defaults the model that its pipeline takes."""
_LATTE_1 = Model(
    "latte-1",
    "LatteTransformer3DModel",
    {
        **_OF_LATTE,
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "cross_attention_dim": 1152,
        "caption_channels": 4096,
        "in_channels": 4,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
    },
    16,
    72,
    28,
    blocks=(4, 4),
    stride=8,
    patch=2,
    sizes=((512, 512), (1024, 1024)),
    frames=16,
    grids={"512px": (32, 32), "1024px": (64, 64)},
)
_TINY = Model(
    "tiny-latte",
    "LatteTransformer3DModel",
    {
        **_LATTE_1.settings,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 32,
    },
    2,
    12,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
    frames=3,
)


class LatteFamily(Family):
    """Video transformers with a (height, width) token grid for every frame."""

    name = "latte"
    transformers = ("LatteTransformer3DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    # at 512 px 8 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content", block_size=16)
    lacks_processor_methods = True
    default_clip = Clip(frames=16, fps=8.0, sizes=((512, 512),))
    models = (_LATTE_1, _TINY)

    @property
    def makes_videos(self) -> bool:
        """Always, of frames that attend by themselves."""
        return True

    def self_attention_processor(self) -> Any:
        """``AttnProcessor2_0``."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """(height, width) of every frame."""
        return super().token_grid(transformer, latents[:, :, 0])

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """A thousand steps of DDPM with learned variance."""
        return LearnedVarianceDDPM()

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Size and frames, which the pipeline calls ``video_length``."""
        return {**super().clip_arguments(pipe, clip), "video_length": clip.frames}

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(B, C, F, H, W), every frame by itself."""
        latents = pipe.vae.encode(pixels.transpose(1, 2).flatten(0, 1)).latent_dist.mode().float()
        return of_unit_scale(pipe.vae, latents).unflatten(0, (len(pixels), -1)).transpose(1, 2)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (120, channels) of T5, 0 behind the text."""
        # as one of several prompts, of which a batch can be made; the pipeline cuts a single one to its length
        text, _ = self.encode_text(pipe, [prompt, prompt], {"clean_caption": True, **(settings or {})})
        return {"encoder_hidden_states": text[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (120, channels)."""
        return {"encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.caption_channels, device="meta")}
