"""LTX-Video: packed latents (B, tokens, C), and RoPE over the channels of all heads."""

from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel

from ...models import seeded
from ...pipelines import quiet, word_tokenizer
from .case import FamilyCase
from .components import t5
from .draws import TEXT_TOKENS, drawer, text_mask, timesteps

_LATENT_CHANNELS = 8
_TEXT_CHANNELS = 24
_GRID, _RAGGED_GRID = (4, 4, 6), (3, 5, 4)

CALL = {
    "prompt": "a cat surfing",
    "num_frames": 13,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "max_sequence_length": 8,
    "output_type": "pt",
}


def transformer() -> LTXVideoTransformer3DModel:
    """Three layers; as in the real one, 6 does not divide the channels and RoPE leaves the first two alone."""
    return seeded(
        LTXVideoTransformer3DModel,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_TEXT_CHANNELS,
        num_layers=3,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """As of ``LTXPipeline``: one timestep per sample, the size of the latents in numbers beside them."""
    draw, grid = drawer(batch, seed), _RAGGED_GRID if ragged else _GRID
    frames, height, width = grid
    return {
        "hidden_states": draw(frames * height * width, _LATENT_CHANNELS),
        "encoder_hidden_states": draw(TEXT_TOKENS, _TEXT_CHANNELS),
        "timestep": timesteps(batch),
        "encoder_attention_mask": text_mask(batch),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def pipeline() -> LTXPipeline:
    """T5, an autoencoder of strides (4, 16, 16) with statistics of its channels, flow matching shifted by size."""
    vae = seeded(
        AutoencoderKLLTXVideo,
        noise=0.05,
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )
    generator = torch.Generator().manual_seed(7)
    vae.latents_mean.normal_(0.0, 0.1, generator=generator)
    vae.latents_std.uniform_(0.1, 0.3, generator=generator)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return quiet(
        LTXPipeline(
            tokenizer=word_tokenizer(),
            text_encoder=t5(_TEXT_CHANNELS),
            vae=vae,
            transformer=transformer(),
            scheduler=scheduler,
        )
    )


CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    latents=(_LATENT_CHANNELS, *_GRID),
    blocks=(2, 2, 3),
    grid=_GRID,
    ragged_grid=_RAGGED_GRID,
    attentions=tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
)
