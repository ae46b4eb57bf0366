"""Flux.1: packed latents whose places are told by ids; layers with two streams, then layers with one."""

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TOKENS, clip_text, image_autoencoder, t5_text, text_tokenizer

CALL = {
    "prompt": "a red ball",
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 3.5,
    "max_sequence_length": 8,
    "output_type": "pt",
}
_GRID, _RAGGED = (8, 8), (7, 5)


def transformer(**config: Any) -> FluxTransformer2DModel:
    """Two layers with two streams and two with one, guidance embedded, unless the arguments say otherwise."""
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 12,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    }
    return seeded(FluxTransformer2DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents (B, Hg Wg, 16) with ids (Hg Wg, 3), text with ids of zeros, pooled text, timestep and guidance."""
    generator = torch.Generator().manual_seed(seed)
    height, width = _RAGGED if ragged else _GRID
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(height).float(), torch.arange(width).float())
    return {
        "hidden_states": torch.randn(batch, height * width, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 12, generator=generator),
        "timestep": torch.tensor([0.5, 0.25, 0.75])[:batch],
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "guidance": torch.tensor([3.5, 2.0, 5.0])[:batch],
    }


def pipeline() -> FluxPipeline:
    """CLIP for the pooled text, T5 for its tokens; a shift that depends on the number of tokens."""
    return quiet(
        FluxPipeline(
            transformer=transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=image_autoencoder(4, shift_factor=0.1),
            text_encoder=clip_text(),
            tokenizer=text_tokenizer(),
            text_encoder_2=t5_text(32),
            tokenizer_2=text_tokenizer(),
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
    attentions=(
        *(f"transformer_blocks.{layer}.attn" for layer in range(2)),
        *(f"single_transformer_blocks.{layer}.attn" for layer in range(2)),
    ),
    extra=(TEXT_TOKENS, 0),
)
