"""ChronoEdit: ``ChronoEditTransformer3DModel``, Wan 2.1 image-to-video as an editor of pictures.

The edited picture is the last frame of a video that begins with the picture. With temporal reasoning the first steps
denoise all frames and later steps only the first and the last one, so the token grid changes within one call; without
it there are two latent frames throughout. Tokens are in raster order; RoPE places two frames as far apart as in a
longer video. Default blocks are Wan's; with two frames, as usual, they are 2 x 3 x 5 blocks of 240 tokens.
"""

from typing import Any

from .family import Family, Kwargs
from .models import Clip
from .wan import WanForward, WanTraining, tiny_wan, wan_attention, wan_model

_FRAMES = 5
"""Frames of a call without temporal reasoning, regardless of the number asked for."""
_CLASS = "ChronoEditTransformer3DModel"
_REAL = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_AT_720P: dict[str, Any] = {"blocks": (2, 3, 5), "sizes": ((720, 1280),)}
_TINY = {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24}


class _Training(WanTraining):
    def clip_arguments(self, pipe: Any, clip: Clip) -> Kwargs:
        """Add temporal reasoning, which other frames than five need."""
        return {**super().clip_arguments(pipe, clip), "enable_temporal_reasoning": clip.frames != _FRAMES}


CHRONOEDIT = Family(
    name="chronoedit",
    transformers=(_CLASS,),
    attention=wan_attention("transformer_chronoedit.WanAttention"),
    forward=WanForward(),
    trained=_Training(),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=_FRAMES, fps=16.0, sizes=((720, 1280),)),
    models=(
        wan_model("chronoedit-14b", 40, 13824, 40, transformer=_CLASS, settings=_REAL, frames=_FRAMES, **_AT_720P),
        tiny_wan("chronoedit", _CLASS, _TINY, frames=_FRAMES),
    ),
)
