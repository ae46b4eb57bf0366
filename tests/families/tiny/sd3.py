"""Stable Diffusion 3: text and image meet in every layer; the last one drops the text. No RoPE."""

from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TOKENS, clip_text, image_autoencoder, t5_text, text_tokenizer

CALL = {
    "prompt": "a red ball",
    "negative_prompt": "dog",
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 5.0,
    "max_sequence_length": 8,
    "output_type": "pt",
}
_GRID, _RAGGED = (8, 8), (7, 5)


def transformer(**config: Any) -> SD3Transformer2DModel:
    """Three layers of SD 3.0, unless the arguments of the class say otherwise."""
    settings = {
        "sample_size": 16,
        "pos_embed_max_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 24,
    }
    return seeded(SD3Transformer2DModel, **(settings | config))


def dual() -> SD3Transformer2DModel:
    """Two layers as in SD 3.5: query and key normed, and in the first layer a second attention over the image alone."""
    return transformer(num_layers=2, qk_norm="rms_norm", dual_attention_layers=(0,))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents (B, 4, 2 Hg, 2 Wg), text, pooled text and the scheduler's timestep."""
    generator = torch.Generator().manual_seed(seed)
    height, width = _RAGGED if ragged else _GRID
    return {
        "hidden_states": torch.randn(batch, 4, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 24, generator=generator),
        "timestep": torch.tensor([500.0, 250.0, 750.0])[:batch],
    }


def pipeline(build: Any = transformer) -> StableDiffusion3Pipeline:
    """Two CLIP encoders, T5 and flow matching.

    Args:
        build: makes the transformer.
    """
    return quiet(
        StableDiffusion3Pipeline(
            transformer=build(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_autoencoder(4, shift_factor=0.06),
            text_encoder=clip_text(CLIPTextModelWithProjection),
            tokenizer=text_tokenizer(),
            text_encoder_2=clip_text(CLIPTextModelWithProjection, seed=1),
            tokenizer_2=text_tokenizer(),
            text_encoder_3=t5_text(32),
            tokenizer_3=text_tokenizer(),
        )
    )


CASE = FamilyCase(
    transformer=transformer,
    inputs=inputs,
    pipeline=pipeline,
    call=CALL,
    latents=(4, 16, 16),
    blocks=(4, 2),
    grid=_GRID,
    ragged_grid=_RAGGED,
    attentions=tuple(f"transformer_blocks.{layer}.attn" for layer in range(3)),
    extra=(0, TEXT_TOKENS),
)

DUAL_CASE = FamilyCase(
    transformer=dual,
    inputs=inputs,
    pipeline=partial(pipeline, dual),
    call=CALL,
    latents=(4, 16, 16),
    blocks=(4, 2),
    grid=_GRID,
    ragged_grid=_RAGGED,
    # the second, attn2, is given no text
    attentions=("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"),
    extra=(0, TEXT_TOKENS),
)
