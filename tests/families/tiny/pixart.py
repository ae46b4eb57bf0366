"""PixArt: α, which at 1024 px is told the size of its picture, and Σ, which is not."""

from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from ...models import seeded
from ...pipelines import quiet, word_tokenizer
from .case import FamilyCase
from .components import kl_autoencoder, t5
from .draws import TEXT_TOKENS, drawer, text_mask, timesteps

_TOLD_ITS_SIZE, _SIGMA_SIZE = 128, 64
"""``sample_size`` of a model that is told the size of its picture, and of one that is not."""

CALL = {
    "prompt": "the red dog",
    "height": 128,
    "width": 128,
    "use_resolution_binning": False,
    "clean_caption": False,
    "num_inference_steps": 2,
    "guidance_scale": 1.5,
    "max_sequence_length": 8,
    "output_type": "pt",
}


def transformer(sample_size: int = _TOLD_ITS_SIZE, **config: Any) -> PixArtTransformer2DModel:
    """PixArt-α, three layers.

    Args:
        sample_size: 128 for the model that is told the size of its picture, as PixArt-α of 1024 px is.
        **config: further arguments of the class.
    """
    return seeded(
        PixArtTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        num_layers=3,
        sample_size=sample_size,
        **config,
    )


def sigma_transformer() -> PixArtTransformer2DModel:
    """PixArt-Σ, three layers."""
    return transformer(_SIGMA_SIZE, use_additional_conditions=False)


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


def pipeline(sample_size: int = _TOLD_ITS_SIZE) -> PixArtAlphaPipeline:
    """Of α, with a T5 text encoder and DPM-Solver; see :func:`transformer`.

    Its few steps do not begin at noise alone, of which a random model makes latents that hide what it does later.
    """
    return quiet(
        PixArtAlphaPipeline(
            tokenizer=word_tokenizer(),
            text_encoder=t5(32),
            vae=kl_autoencoder(),
            transformer=transformer(sample_size),
            scheduler=DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="leading"),
        )
    )


def sigma_pipeline() -> PixArtSigmaPipeline:
    """Of Σ, with the components of α."""
    return quiet(PixArtSigmaPipeline(**pipeline().components | {"transformer": sigma_transformer()}))


_SHAPES: dict[str, Any] = {
    "latents": (4, 16, 16),
    "call": CALL,
    "blocks": (4, 2),
    "grid": (8, 8),
    "ragged_grid": (7, 5),
    "attentions": tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
}
CASE = FamilyCase(transformer, inputs, pipeline, **_SHAPES)
SIGMA_CASE = FamilyCase(sigma_transformer, sigma_inputs, sigma_pipeline, **_SHAPES)
