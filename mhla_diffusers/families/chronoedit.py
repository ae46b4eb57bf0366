"""ChronoEdit: ``ChronoEditTransformer3DModel``, Wan 2.1 image-to-video as an editor of pictures.

The edited picture is the last frame of a video that begins with the picture. With temporal reasoning the first steps
denoise all frames and later steps only the first and the last one, so the token grid changes within one call; without
it there are two latent frames throughout. RoPE places two frames as far apart as in a longer video. Tokens are in
raster order as usual.
"""

from typing import Any

from ..config import MHLAConfig
from .models import Clip
from .wan import WanFamily, tiny_wan, wan_model

_FRAMES = 5
"""Frames of a call without temporal reasoning, regardless of the number asked for."""
_CLASS = "ChronoEditTransformer3DModel"


class ChronoEditFamily(WanFamily):
    """Image editing transformers with a (frames, height, width) token grid."""

    name = "chronoedit"
    transformers = (_CLASS,)
    attention_class = "transformer_chronoedit.WanAttention"
    processor = cross_processor = "diffusers.models.transformers.transformer_chronoedit.WanAttnProcessor"
    # Wan's; with two frames, as usual, they are 2 x 3 x 5 blocks of 240 tokens
    default_config = MHLAConfig(blocks=(7, 3, 5), mixing_per_head=True, sparse="content", clamp_blocks=True)
    default_clip = Clip(frames=_FRAMES, fps=16.0, sizes=((720, 1280),))
    measured_unasked = False
    models = (
        wan_model(
            "chronoedit-14b",
            40,
            13824,
            40,
            transformer=_CLASS,
            settings={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
            blocks=(2, 3, 5),
            sizes=((720, 1280),),
            frames=_FRAMES,
            grids={"720p": (2, 45, 80)},
        ),
        tiny_wan("chronoedit", _CLASS, {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24}, frames=_FRAMES),
    )

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Wan's; None where diffusers splits the table between the two channels of a pair."""
        return super().rotary_axes(head_dim) if head_dim // 3 % 2 == 0 else None

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Frames and size; other frames than five need temporal reasoning."""
        return {**super().clip_arguments(pipe, clip), "enable_temporal_reasoning": clip.frames != _FRAMES}
