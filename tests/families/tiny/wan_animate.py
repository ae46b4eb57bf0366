"""Wan 2.2 Animate: the first latent frame is a picture of the character; pose and face drive the others."""

from typing import Any

from diffusers import WanAnimatePipeline, WanAnimateTransformer3DModel
from PIL import Image

from ...models import wan
from ...pipelines import quiet
from .case import FamilyCase
from .components import wan_image_components
from .draws import drawer, prompt_embeddings, timesteps

_TEXT_TOKENS = 512
"""Cross-attention with image tokens takes the last 512 tokens of its context as the text."""
_IMAGE_CHANNELS = 8
_FACE = 16
"""Pixels of a side of the face video."""
_GRID, _RAGGED_GRID = (4, 4, 6), (3, 5, 4)

CALL = {
    **prompt_embeddings(_TEXT_TOKENS, 32),
    "image": Image.new("RGB", (96, 64), "red"),
    "pose_video": [Image.new("RGB", (96, 64), (20 * frame, 0, 90)) for frame in range(9)],
    "face_video": [Image.new("RGB", (_FACE, _FACE), (0, 20 * frame, 90)) for frame in range(9)],
    "segment_frame_length": 9,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "output_type": "pt",
}


def transformer() -> WanAnimateTransformer3DModel:
    """Four layers, the face looked at after the first and the third."""
    return wan(
        WanAnimateTransformer3DModel,
        num_layers=4,
        in_channels=36,
        latent_channels=16,
        image_dim=_IMAGE_CHANNELS,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=_FACE,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents with the mask and what is known, a pose for every latent frame but the first, a face for every frame."""
    draw = drawer(batch, seed)
    frames, height, width = _RAGGED_GRID if ragged else _GRID
    return {
        "hidden_states": draw(36, frames, 2 * height, 2 * width),
        "timestep": timesteps(batch),
        "encoder_hidden_states": draw(_TEXT_TOKENS, 32),
        "encoder_hidden_states_image": draw(5, _IMAGE_CHANNELS),
        "pose_hidden_states": draw(16, frames - 1, 2 * height, 2 * width),
        "face_pixel_values": draw(3, 4 * (frames - 2) + 1, _FACE, _FACE),
    }


def pipeline() -> WanAnimatePipeline:
    """With a vision encoder and UniPC."""
    return quiet(WanAnimatePipeline(transformer=transformer(), **wan_image_components(5.0, _IMAGE_CHANNELS)))


CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    blocks=(2, 2, 3),
    grid=_GRID,
    ragged_grid=_RAGGED_GRID,
    attentions=tuple(f"blocks.{layer}.attn1" for layer in range(4)),
    latents=(36, 4, 8, 12),
)
