"""LTX-Video: ``LTXVideoTransformer3DModel``.

Softmax self-attention with RMSNorm over all channels of query and key. RoPE rotates these channels before they are
split into heads and alternates between the three axes of the grid, so no two heads rotate by the same angles. The
transformer takes packed latents and their grid as numbers, or the coordinates of every token; pictures and keyframes
stand before the grid as extra tokens. Default blocks have 88 tokens at 161 frames of 512x704 pixels, about as high as
wide.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionAdapter
from .family import Attention, Family, Kwargs, Sample, masked_text
from .models import Clip, Model, tiny_video
from .packed_videos import PackedVideoForward, PackedVideoTraining, grid_of_coordinates

_CLASS = "LTXVideoTransformer3DModel"
_TEXT_TOKENS = 128
_ROPE_SCALE = (8 / 25, 32, 32)
"""The pipeline's scale at its usual 25 frames per second, with 8 frames and 32x32 pixels per latent."""
STRIDES: dict[str, Any] = {"stride": 32, "patch": 1, "temporal_stride": 8}
_TINY = {"cross_attention_dim": 32, "caption_channels": 24, "in_channels": 8, "out_channels": 8}


class LTXAdapter(AttentionAdapter):
    """Conditioning frames of ``LTXConditionPipeline`` come before the grid, with their own positions."""

    rope_by_head = True

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (B, N, H, D), of tables over the channels of all heads."""
        if "rotary_emb" not in arguments:
            return None
        cos, sin = (table.unflatten(2, (attn.heads, -1)) for table in arguments["rotary_emb"])
        return cos, sin

    def extra(self, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Count all tokens before the grid, which comes last."""
        others = arguments["hidden_states"].shape[1] - tokens
        return (others, 0) if others > 0 else super().extra(arguments, tokens)


def _model(name: str, head_dim: int, layers: int) -> Model:
    sizes = ((512, 704), (704, 1216))
    settings = {"cross_attention_dim": 32 * head_dim}
    return Model(name, _CLASS, 32, head_dim, layers, (7, 3, 4), sizes, settings, frames=161, **STRIDES, has_rope=False)


class _Forward(PackedVideoForward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the numbers that the pipeline passes; coordinates take precedence, as in the model."""
        if (coordinates := arguments.get("video_coords")) is not None:
            return grid_of_coordinates(coordinates)
        return super().grid_of_arguments(transformer, arguments)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add RoPE's scale at the usual frame rate."""
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"rope_interpolation_scale": _ROPE_SCALE, **arguments}


LTX = Family(
    name="ltx",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=LTXAdapter("image_rotary_emb"), class_path="LTXAttention", dispatches=True, extra=(None, 0)
    ),
    forward=_Forward(axes=3, packs_latents=True, conditions=masked_text(_TEXT_TOKENS, "caption_channels", torch.bool)),
    trained=PackedVideoTraining(),
    mhla_blocks=(7, 3, 4),
    default_clip=Clip(frames=161, fps=25.0, sizes=((512, 704),)),
    # the class's defaults, and for the 13B models of 0.9.7 heads of 128 channels in 48 layers
    models=(
        _model("ltx-video-2b", 64, 28),
        _model("ltx-video-13b", 128, 48),
        tiny_video("ltx", _CLASS, _TINY, head_dim=16, sizes=((128, 192),), **STRIDES, has_rope=False),
    ),
)
