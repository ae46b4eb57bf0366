"""HunyuanVideo: text refined and masked, behind the video; layers with two streams, then layers with one."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import LlamaConfig, LlamaModel

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TEMPLATE, TEXT_TOKENS, clip_text, keep_some, language_model, text_tokenizer

CALL = {
    "prompt": "a red ball moves",
    "num_frames": 13,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "guidance_scale": 6.0,
    "prompt_template": {"template": TEXT_TEMPLATE, "crop_start": 1},
    "max_sequence_length": TEXT_TOKENS,
    "output_type": "pt",
}
_GRID, _RAGGED = (4, 4, 6), (3, 5, 4)


def transformer(**config: Any) -> HunyuanVideoTransformer3DModel:
    """Two layers with two streams and two with one, guidance embedded, unless the arguments say otherwise."""
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 12,
        "rope_axes_dim": (4, 4, 4),
    }
    return seeded(HunyuanVideoTransformer3DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents (B, 4, F, 2 Hg, 2 Wg), text with its mask, pooled text, timestep, and 1000 times the guidance."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = _RAGGED if ragged else _GRID
    return {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width, generator=generator),
        "timestep": torch.tensor([500.0, 250.0, 750.0])[:batch],
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 16, generator=generator),
        "encoder_attention_mask": keep_some(batch),
        "pooled_projections": torch.randn(batch, 12, generator=generator),
        "guidance": torch.tensor([6000.0, 3000.0, 1000.0])[:batch],
    }


def pipeline() -> HunyuanVideoPipeline:
    """Llama for the tokens of the text, CLIP for the pooled text."""
    vae = seeded(
        AutoencoderKLHunyuanVideo,
        noise=0.05,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )
    return quiet(
        HunyuanVideoPipeline(
            text_encoder=seeded(LlamaModel, config=LlamaConfig(**language_model(layers=3))),
            tokenizer=text_tokenizer(),
            transformer=transformer(),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder_2=clip_text(),
            tokenizer_2=text_tokenizer(),
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
    attentions=(
        *(f"transformer_blocks.{layer}.attn" for layer in range(2)),
        *(f"single_transformer_blocks.{layer}.attn" for layer in range(2)),
    ),
    extra=(0, TEXT_TOKENS),
)
