"""PixArt: α, which at 1024 px is told the size of its picture, and Σ, which is not."""

from typing import Any

import torch
from diffusers import PixArtAlphaPipeline, PixArtSigmaPipeline, PixArtTransformer2DModel

from ..pixart_tiny import CALL as _SIZE
from ..pixart_tiny import pixart_pipeline, pixart_transformer
from .case import FamilyCase
from .draws import TEXT_TOKENS, drawer, text_mask, timesteps

_SIGMA_SIZE = 64
"""``sample_size`` of a model that is not told the size of its picture."""

CALL = {**_SIZE, "prompt": "the red dog", "max_sequence_length": 8, "output_type": "pt"}


def transformer() -> PixArtTransformer2DModel:
    """PixArt-α, three layers."""
    return pixart_transformer()


def sigma_transformer() -> PixArtTransformer2DModel:
    """PixArt-Σ, three layers."""
    return pixart_transformer(_SIGMA_SIZE)


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of α."""
    sizes = torch.tensor([[64.0, 64.0], [64.0, 96.0], [96.0, 64.0]])[:batch]
    size = {"resolution": sizes, "aspect_ratio": sizes[:, :1] / sizes[:, 1:]}
    return {**sigma_inputs(batch, ragged, seed), "added_cond_kwargs": size}


def sigma_inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Of Σ."""
    draw = drawer(batch, seed)
    return {
        "hidden_states": draw(4, *((14, 10) if ragged else (16, 16))),
        "encoder_hidden_states": draw(TEXT_TOKENS, 32),
        "timestep": timesteps(batch),
        "encoder_attention_mask": text_mask(batch),
    }


def pipeline() -> PixArtAlphaPipeline:
    """Of α, with a T5 text encoder and DPM-Solver."""
    return pixart_pipeline()


def sigma_pipeline() -> PixArtSigmaPipeline:
    """Of Σ, with the components of α."""
    pipe = PixArtSigmaPipeline(**pixart_pipeline(_SIGMA_SIZE).components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


_SHAPES: dict[str, Any] = {
    "call": CALL,
    "blocks": (4, 2),
    "grid": (8, 8),
    "ragged_grid": (7, 5),
    "attentions": tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
}
CASE = FamilyCase(transformer, inputs, pipeline, **_SHAPES)
SIGMA_CASE = FamilyCase(sigma_transformer, sigma_inputs, sigma_pipeline, **_SHAPES)
