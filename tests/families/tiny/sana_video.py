"""SANA-Video: linear attention with RoPE in its numerator only; text-to-video, and image-to-video."""

from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from PIL import Image

from ...models import seeded
from ...pipelines import quiet, sana_pipeline, wan_pipeline
from .case import FamilyCase
from .draws import TEXT_TOKENS, drawer, text_mask, timesteps

_GRID, _RAGGED_GRID = (4, 4, 6), (3, 5, 4)

CALL = {
    "prompt": "a cat surfing",
    "frames": 13,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "max_sequence_length": 8,
    "complex_human_instruction": None,
    "use_resolution_binning": False,
    "output_type": "pt",
}
IMAGE_CALL = {**CALL, "image": Image.new("RGB", (96, 64), "red")}


def transformer() -> SanaVideoTransformer3DModel:
    """Three layers; heads so wide that no query is negative in all channels, whose attention SANA makes 0."""
    return seeded(
        SanaVideoTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=48,
        caption_channels=8,
        rope_max_seq_len=32,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of text-to-video: one timestep per sample."""
    draw = drawer(batch, seed)
    frames, height, width = _RAGGED_GRID if ragged else _GRID
    return {
        "hidden_states": draw(16, frames, 2 * height, 2 * width),
        "encoder_hidden_states": draw(TEXT_TOKENS, 8),
        "timestep": timesteps(batch),
        "encoder_attention_mask": text_mask(batch),
    }


def image_inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of image-to-video: a timestep for every token, 0 in the first frame."""
    frames, height, width = _RAGGED_GRID if ragged else _GRID
    later = torch.ones(1, 1, frames, height, width)
    later[:, :, 0] = 0
    return {**inputs(batch, ragged, seed), "timestep": timesteps(batch).view(-1, 1, 1, 1, 1) * later}


def _components() -> dict[str, Any]:
    text = sana_pipeline().components
    return {
        "tokenizer": text["tokenizer"],
        "text_encoder": text["text_encoder"],
        "vae": wan_pipeline().vae,
        "transformer": transformer(),
    }


def pipeline() -> SanaVideoPipeline:
    """Gemma 2 text encoder, Wan's autoencoder, DPM-Solver on flow matching."""
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return quiet(SanaVideoPipeline(scheduler=scheduler, **_components()))


def image_pipeline() -> SanaImageToVideoPipeline:
    """The same with flow matching's Euler steps."""
    return quiet(SanaImageToVideoPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0), **_components()))


_SHAPES: dict[str, Any] = {
    "latents": (16, _GRID[0], 2 * _GRID[1], 2 * _GRID[2]),
    "blocks": (2, 2, 3),
    "grid": _GRID,
    "ragged_grid": _RAGGED_GRID,
    "attentions": tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
}
CASE = FamilyCase(transformer, inputs, pipeline, CALL, **_SHAPES)
IMAGE_CASE = FamilyCase(transformer, image_inputs, image_pipeline, IMAGE_CALL, **_SHAPES)
