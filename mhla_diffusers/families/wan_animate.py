"""Wan 2.2 Animate: ``WanAnimateTransformer3DModel``, a picture of a character moved by the pose and face of a video.

The first latent frame is the picture of the character; the others are a segment of the video. All of them are on the
token grid. After some blocks the tokens of a frame attend to the face in ``face_adapter``, a cross-attention that is
not patched.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .family import Sample
from .models import Clip
from .wan import WanFamily, tiny_wan, wan_model

_CLASS = "WanAnimateTransformer3DModel"
_STRIDE = 4
"""Frames of the face's video per latent frame, after the first one."""
_FACELESS = -1.0
"""Pixel value that the pipeline uses for "no face" in its guidance."""


class WanAnimateFamily(WanFamily):
    """Video transformers with a (frames, height, width) token grid, one frame more than the video's."""

    name = "wan_animate"
    transformers = (_CLASS,)
    attention_class = "transformer_wan_animate.WanAttention"
    processor = cross_processor = "diffusers.models.transformers.transformer_wan_animate.WanAttnProcessor"
    # Wan's defaults: a segment and the picture before it have the token grid of its 81 frames
    default_clip = Clip(frames=77, fps=30.0, sizes=((720, 1280),))
    measured_unasked = False
    models = (
        wan_model(
            "wan2.2-animate-14b",
            40,
            13824,
            40,
            transformer=_CLASS,
            settings={"added_kv_proj_dim": 5120},
            sizes=((720, 1280),),
            grids={"720p": (21, 45, 80)},
            # with fewer layers the face is attended to after fewer blocks each
            more_layers={"inject_face_latents_blocks": 5},
        ),
        tiny_wan(
            "wan_animate",
            _CLASS,
            {
                "image_dim": 8,
                "added_kv_proj_dim": 24,
                "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
                "motion_encoder_size": 16,
                "motion_style_dim": 8,
                "motion_dim": 4,
                "motion_encoder_dim": 8,
                "face_encoder_hidden_dim": 8,
                "face_encoder_num_heads": 2,
            },
            more_layers={"inject_face_latents_blocks": 1},
        ),
    )

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """The grid of a segment of this length and the picture before it."""
        frames, height, width = super().grid_of_clip(pipe, transformer, clip)
        return frames + 1, height, width

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Size, and frames of a segment; the driving video determines the number of segments."""
        height, width = clip.sizes[0]
        return {"height": height, "width": width, "segment_frame_length": clip.frames}

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """As Wan's; defaults to a pose of zeros and no face, as in the pipeline's guidance."""
        (batch, _, frames, height, width), config = latents.shape, transformer.config
        still = latents.new_zeros(batch, config.latent_channels, frames - 1, height, width)
        side = config.motion_encoder_size
        faceless = latents.new_full((batch, 3, _STRIDE * (frames - 2) + 1, side, side), _FACELESS)
        moved = {"pose_hidden_states": still, "face_pixel_values": faceless, **conditioning}
        return super().forward_arguments(transformer, latents, timestep, moved)

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """(C, F, H, W) with the picture's frame before those of the segment."""
        channels, frames, height, width = super().latent_shape(transformer, vae, clip)
        return channels, frames + 1, height, width

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Wan Animate is trained on videos of a pose and a face beside every clip, which files with captions do not "
            "have. Pass the samples as InMemoryData, with latents of 36 channels, encoder_hidden_states, "
            "encoder_hidden_states_image, pose_hidden_states and face_pixel_values."
        )
