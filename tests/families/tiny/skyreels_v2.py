"""SkyReels-V2: text-to-video, image-to-video, and diffusion forcing with its block-causal mask."""

from typing import Any

import torch
from diffusers import (
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
)
from PIL import Image

from ...models import wan
from ...pipelines import quiet
from .case import FamilyCase
from .components import wan_components, wan_image_components
from .draws import TEXT_TOKENS, drawer, prompt_embeddings, timesteps

_IMAGE_TEXT_TOKENS = 512
"""Cross-attention with image tokens takes the last 512 tokens of its context as the text."""
_IMAGE_CHANNELS = 8
_FRAMES_IN_BLOCK = 2
_GRID, _RAGGED_GRID, _RAGGED_FORCING_GRID = (4, 4, 6), (3, 5, 4), (2, 5, 4)

_CLIP = {"num_frames": 13, "height": 64, "width": 96, "num_inference_steps": 2, "output_type": "pt"}
CALL = {**_CLIP, **prompt_embeddings(TEXT_TOKENS, 32)}
FORCING_CALL = {**CALL, "prompt": None, "ar_step": 1, "causal_block_size": _FRAMES_IN_BLOCK}
IMAGE_CALL = {**_CLIP, **prompt_embeddings(_IMAGE_TEXT_TOKENS, 32), "image": Image.new("RGB", (96, 64), "red")}


def transformer() -> SkyReelsV2Transformer3DModel:
    """Of text-to-video, three layers."""
    return wan(SkyReelsV2Transformer3DModel, num_layers=3)


def forcing_transformer() -> SkyReelsV2Transformer3DModel:
    """Of diffusion forcing: two latent frames in a block, each block sees itself and the ones before it."""
    return wan(SkyReelsV2Transformer3DModel, num_layers=3, num_frame_per_block=_FRAMES_IN_BLOCK)


def image_transformer() -> SkyReelsV2Transformer3DModel:
    """Of image-to-video: image tokens in the cross-attention, latents with the mask and the first frame."""
    return wan(
        SkyReelsV2Transformer3DModel,
        num_layers=3,
        in_channels=36,
        image_dim=_IMAGE_CHANNELS,
        added_kv_proj_dim=24,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of text-to-video: one timestep per sample."""
    draw = drawer(batch, seed)
    frames, height, width = _RAGGED_GRID if ragged else _GRID
    return {
        "hidden_states": draw(16, frames, 2 * height, 2 * width),
        "timestep": timesteps(batch),
        "encoder_hidden_states": draw(TEXT_TOKENS, 32),
    }


def forcing_inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of diffusion forcing: a timestep per frame, the later block noisier; the frames fill whole blocks."""
    draw = drawer(batch, seed)
    frames, height, width = _RAGGED_FORCING_GRID if ragged else _GRID
    later = torch.arange(frames) // _FRAMES_IN_BLOCK * 100
    return {
        "hidden_states": draw(16, frames, 2 * height, 2 * width),
        "timestep": timesteps(batch)[:, None] + later,
        "encoder_hidden_states": draw(TEXT_TOKENS, 32),
        "enable_diffusion_forcing": True,
    }


def image_inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of image-to-video."""
    draw = drawer(batch, seed)
    frames, height, width = _RAGGED_GRID if ragged else _GRID
    return {
        "hidden_states": draw(36, frames, 2 * height, 2 * width),
        "timestep": timesteps(batch),
        "encoder_hidden_states": draw(_IMAGE_TEXT_TOKENS, 32),
        "encoder_hidden_states_image": draw(5, _IMAGE_CHANNELS),
    }


def pipeline() -> SkyReelsV2Pipeline:
    """Text-to-video."""
    return quiet(SkyReelsV2Pipeline(transformer=transformer(), **wan_components(flow_shift=8.0)))


def forcing_pipeline() -> SkyReelsV2DiffusionForcingPipeline:
    """Diffusion forcing."""
    parts = wan_components(flow_shift=8.0)
    return quiet(SkyReelsV2DiffusionForcingPipeline(transformer=forcing_transformer(), **parts))


def image_pipeline() -> SkyReelsV2ImageToVideoPipeline:
    """Image-to-video."""
    parts = wan_image_components(5.0, _IMAGE_CHANNELS)
    return quiet(SkyReelsV2ImageToVideoPipeline(transformer=image_transformer(), **parts))


_SHAPES: dict[str, Any] = {
    "blocks": (2, 2, 3),
    "grid": _GRID,
    "attentions": tuple(f"blocks.{layer}.attn1" for layer in range(3)),
}
CASE = FamilyCase(transformer, inputs, pipeline, CALL, ragged_grid=_RAGGED_GRID, latents=(16, 4, 8, 12), **_SHAPES)
FORCING_CASE = FamilyCase(
    forcing_transformer, forcing_inputs, forcing_pipeline, FORCING_CALL, ragged_grid=_RAGGED_FORCING_GRID, **_SHAPES
)
IMAGE_CASE = FamilyCase(
    image_transformer,
    image_inputs,
    image_pipeline,
    IMAGE_CALL,
    ragged_grid=_RAGGED_GRID,
    latents=(36, 4, 8, 12),
    **_SHAPES,
)
