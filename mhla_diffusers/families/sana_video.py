"""SANA-Video: ``SanaVideoTransformer3DModel``, text- and image-to-video.

SANA's linear attention with φ = ReLU over a video, with 3-D RoPE after the feature map in the numerator alone: MHLA
with one block is what it has. Query and key are normed across heads, text is SANA's.
"""

from typing import Any

import torch

from ..config import MHLAConfig
from .processes import DiffusionProcess, FlowMatching
from .sana import SanaFamily
from .sizes import Clip, Model

_MODEL = Model(
    "sana-video-2b",
    "SanaVideoTransformer3DModel",
    {"mlp_ratio": 3.0},  # as diffusers' conversion script sets it; the rest are the class's defaults
    20,
    112,
    20,
    blocks=(7, 3, 5),
    stride=8,
    patch=2,
    sizes=((480, 832),),
    frames=81,
    temporal_stride=4,
    grids={"480p": (21, 30, 52)},
)
_TINY = Model(
    "tiny-sana_video",
    "SanaVideoTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 8,
        "rope_max_seq_len": 32,
    },
    2,
    12,
    3,
    blocks=(1, 2, 2),
    stride=8,
    patch=2,
    sizes=((64, 96),),
    frames=9,
    temporal_stride=4,
)


class SanaVideoFamily(SanaFamily):
    """Video transformers with a (frames, height, width) token grid."""

    name = "sana_video"
    transformers = ("SanaVideoTransformer3DModel",)
    axes = 3
    # at 81 frames of 480x832 pixels three latent frames of ten tokens each way, as of Wan, which has the same grid
    default_config = MHLAConfig(blocks=(7, 3, 5))
    default_clip = Clip(frames=81, fps=16.0, sizes=((480, 832),))
    measured_unasked = False
    models = (_MODEL, _TINY)

    def self_attention_processor(self) -> Any:
        """``SanaLinearAttnProcessor3_0``."""
        from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0

        return SanaLinearAttnProcessor3_0()

    def softmax_processor(self) -> Any:
        """``WanAttnProcessor``, which norms and turns query and key as SANA-Video does."""
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        return WanAttnProcessor()

    def cross_attention_processor(self) -> Any:
        """``SanaAttnProcessor2_0`` of SANA-Video."""
        from diffusers.models.transformers.transformer_sana_video import SanaAttnProcessor2_0

        return SanaAttnProcessor2_0()

    def rotary_axes(self, head_dim: int) -> tuple[int, ...]:
        """A third each, frames with what is left over."""
        side = 2 * (head_dim // 6)
        return head_dim - 2 * side, side, side

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching."""
        return FlowMatching(flow_shift)

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """The argument itself, whose largest value is that of the tokens to be denoised."""
        return timestep

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Frames, which the pipeline calls so, and size."""
        return {**super().clip_arguments(pipe, clip), "frames": clip.frames}
