"""ChronoEdit: an edited image as the last frame of a video; with two frames alone RoPE sets them apart in time."""

from typing import Any

from diffusers import ChronoEditPipeline, ChronoEditTransformer3DModel
from PIL import Image

from ...models import wan
from ...pipelines import quiet
from .case import FamilyCase
from .components import wan_image_components
from .draws import drawer, prompt_embeddings, timesteps

_TEXT_TOKENS = 512
"""Cross-attention with image tokens takes the last 512 tokens of its context as the text."""
_IMAGE_CHANNELS = 8
_GRID, _RAGGED_GRID = (4, 4, 6), (3, 5, 4)
_EDIT_GRID, _RAGGED_EDIT_GRID = (2, 4, 6), (2, 5, 4)

EDIT_CALL = {
    **prompt_embeddings(_TEXT_TOKENS, 32),
    "image": Image.new("RGB", (96, 64), "red"),
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "output_type": "pt",
}
"""Two latent frames in every step."""
CALL = {**EDIT_CALL, "num_frames": 13, "enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}
"""Four latent frames in the first step and two in the second."""


def transformer() -> ChronoEditTransformer3DModel:
    """Three layers."""
    return wan(
        ChronoEditTransformer3DModel,
        num_layers=3,
        in_channels=36,
        image_dim=_IMAGE_CHANNELS,
        added_kv_proj_dim=24,
    )


def _inputs(grid: tuple[int, ...], batch: int, seed: int) -> dict[str, Any]:
    draw = drawer(batch, seed)
    frames, height, width = grid
    return {
        "hidden_states": draw(36, frames, 2 * height, 2 * width),
        "timestep": timesteps(batch),
        "encoder_hidden_states": draw(_TEXT_TOKENS, 32),
        "encoder_hidden_states_image": draw(5, _IMAGE_CHANNELS),
    }


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of a video: latents with the mask and the first frame."""
    return _inputs(_RAGGED_GRID if ragged else _GRID, batch, seed)


def edit_inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of two frames alone."""
    return _inputs(_RAGGED_EDIT_GRID if ragged else _EDIT_GRID, batch, seed)


def pipeline() -> ChronoEditPipeline:
    """With a vision encoder and UniPC."""
    return quiet(ChronoEditPipeline(transformer=transformer(), **wan_image_components(5.0, _IMAGE_CHANNELS)))


_SHAPES: dict[str, Any] = {
    "blocks": (2, 2, 3),
    "attentions": tuple(f"blocks.{layer}.attn1" for layer in range(3)),
}
CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    grid=_GRID,
    ragged_grid=_RAGGED_GRID,
    latents=(36, 4, 8, 12),
    **_SHAPES,
)
EDIT_CASE = FamilyCase(
    transformer,
    edit_inputs,
    pipeline,
    EDIT_CALL,
    grid=_EDIT_GRID,
    ragged_grid=_RAGGED_EDIT_GRID,
    latents=(36, 2, 8, 12),
    **_SHAPES,
)
