"""Wan 2.2 Animate: ``WanAnimateTransformer3DModel``, a picture of a character moved by the pose and face of a video.

The first latent frame is the picture of the character; the others are a segment of the video. All of them are on the
token grid. After some blocks the tokens of a frame attend to the face in ``face_adapter``, a cross-attention that is
not patched. RoPE and default blocks are Wan's: a segment and the picture before it have the token grid of its 81
frames.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .family import Family, Kwargs, Sample
from .models import Clip
from .wan import WanForward, WanTraining, tiny_wan, wan_attention, wan_model

_CLASS = "WanAnimateTransformer3DModel"
_STRIDE = 4
"""Frames of the face's video per latent frame, after the first one."""
_FACELESS = -1.0
"""Pixel value that the pipeline uses for "no face" in its guidance."""
_REAL: dict[str, Any] = {"transformer": _CLASS, "settings": {"added_kv_proj_dim": 5120}, "sizes": ((720, 1280),)}
_REAL["more_layers"] = {"inject_face_latents_blocks": 5}  # with fewer layers the face comes after fewer blocks each
_TINY: dict[str, Any] = {"image_dim": 8, "added_kv_proj_dim": 24, "motion_style_dim": 8, "motion_dim": 4}
_TINY |= {"motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16, "motion_encoder_dim": 8}
_TINY |= {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2}


class _Forward(WanForward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a pose of zeros and no face where they are missing, as in the pipeline's guidance."""
        (batch, _, frames, height, width), config = latents.shape, transformer.config
        still = latents.new_zeros(batch, config.latent_channels, frames - 1, height, width)
        side = config.motion_encoder_size
        faceless = latents.new_full((batch, 3, _STRIDE * (frames - 2) + 1, side, side), _FACELESS)
        moved = {"pose_hidden_states": still, "face_pixel_values": faceless, **conditioning}
        return super().arguments(transformer, latents, timestep, moved)

    def latent_shape(self, config: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Return the shape (C, F, H, W) with the picture's frame before those of the segment."""
        channels, frames, height, width = super().latent_shape(config, vae, clip)
        return channels, frames + 1, height, width


class _Training(WanTraining):
    def clip_arguments(self, pipe: Any, clip: Clip) -> Kwargs:
        """Return the size, and frames of a segment; the driving video determines the number of segments."""
        height, width = clip.sizes[0]
        return {"height": height, "width": width, "segment_frame_length": clip.frames}

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Raise ValueError: files hold no poses and faces."""
        raise ValueError(
            "Wan Animate is trained on videos of a pose and a face beside every clip, which files with captions do not "
            "have. Pass the samples as InMemoryData, with latents of 36 channels, encoder_hidden_states, "
            "encoder_hidden_states_image, pose_hidden_states and face_pixel_values."
        )


WAN_ANIMATE = Family(
    name="wan_animate",
    transformers=(_CLASS,),
    attention=wan_attention("transformer_wan_animate.WanAttention"),
    forward=_Forward(),
    trained=_Training(),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=77, fps=30.0, sizes=((720, 1280),)),
    models=(
        wan_model("wan2.2-animate-14b", 40, 13824, 40, **_REAL),
        tiny_wan("wan_animate", _CLASS, _TINY, more_layers={"inject_face_latents_blocks": 1}),
    ),
)
