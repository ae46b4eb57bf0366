"""CogVideoX with RoPE: text and video in one sequence with the same projections; RoPE for the video alone."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TOKENS, t5_text, text_tokenizer

CALL = {
    "prompt": "a red ball moves",
    "negative_prompt": "dog",
    "num_frames": 13,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "max_sequence_length": TEXT_TOKENS,
    "output_type": "pt",
}
_GRID, _RAGGED = (4, 4, 6), (3, 5, 4)
_HEAD_DIM = 16


def transformer(**config: Any) -> CogVideoXTransformer3DModel:
    """Three layers of CogVideoX-5B, unless the arguments of the class say otherwise."""
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": _HEAD_DIM,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 3,
        "sample_width": 12,
        "sample_height": 8,
        "sample_frames": 13,
        "max_text_seq_length": TEXT_TOKENS,
        "use_rotary_positional_embeddings": True,
    }
    return seeded(CogVideoXTransformer3DModel, **(settings | config))


def two_frames() -> CogVideoXTransformer3DModel:
    """As in CogVideoX 1.5 a token is made of two latent frames."""
    return transformer(patch_size_t=2, patch_bias=False)


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1, frames_per_token: int = 1) -> dict[str, Any]:
    """Latents (B, F, 4, 2 Hg, 2 Wg), text, integer timestep, and tables of RoPE (tokens, head dim) as (cos, sin)."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = _RAGGED if ragged else _GRID
    rotary = get_3d_rotary_pos_embed(_HEAD_DIM, ((0, 0), (height, width)), (height, width), frames)
    return {
        "hidden_states": torch.randn(batch, frames * frames_per_token, 4, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 32, generator=generator),
        "timestep": torch.tensor([500, 250, 750])[:batch],
        "image_rotary_emb": rotary,
    }


def pipeline(build: Any = transformer) -> CogVideoXPipeline:
    """T5 and a DDIM scheduler that takes the prediction as a velocity.

    Args:
        build: makes the transformer.
    """
    vae = seeded(
        AutoencoderKLCogVideoX,
        noise=0.05,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True, snr_shift_scale=1.0
    )
    return quiet(
        CogVideoXPipeline(
            tokenizer=text_tokenizer(), text_encoder=t5_text(32), vae=vae, transformer=build(), scheduler=scheduler
        )
    )


CASE = FamilyCase(
    transformer=transformer,
    inputs=inputs,
    pipeline=pipeline,
    call=CALL,
    latents=(4, 4, 8, 12),
    blocks=(2, 2, 3),
    grid=_GRID,
    ragged_grid=_RAGGED,
    attentions=tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
    extra=(TEXT_TOKENS, 0),
)

TWO_FRAMES_CASE = FamilyCase(
    transformer=two_frames,
    inputs=partial(inputs, frames_per_token=2),
    pipeline=partial(pipeline, two_frames),
    call=CALL,
    latents=(4, 8, 8, 12),
    blocks=(2, 2, 3),
    grid=_GRID,
    ragged_grid=_RAGGED,
    attentions=CASE.attentions,
    extra=(TEXT_TOKENS, 0),
)
