"""Latte: a spatial block over each frame's (height, width) grid, then a temporal one over each place's frames."""

from typing import Any

from diffusers import DDIMScheduler, LattePipeline, LatteTransformer3DModel

from ...models import seeded
from ...pipelines import quiet, word_tokenizer
from .case import FamilyCase
from .components import kl_autoencoder, t5
from .draws import TEXT_TOKENS, drawer, timesteps

_FRAMES = 3
"""Fixed by the model's table of temporal positions."""
_TEXT_CHANNELS = 32

CALL = {
    "prompt": "a cat surfing",
    "video_length": _FRAMES,
    "height": 128,
    "width": 128,
    "num_inference_steps": 2,
    "clean_caption": False,
    "output_type": "pt",
}


def transformer() -> LatteTransformer3DModel:
    """Three spatial and three temporal layers."""
    return seeded(
        LatteTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=24,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=_TEXT_CHANNELS,
        video_length=_FRAMES,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """As of the pipeline, without a mask: its forward takes none of the shape (batch, tokens)."""
    draw = drawer(batch, seed)
    return {
        "hidden_states": draw(4, _FRAMES, *((14, 10) if ragged else (16, 16))),
        "timestep": timesteps(batch),
        "encoder_hidden_states": draw(TEXT_TOKENS, _TEXT_CHANNELS),
    }


def pipeline() -> LattePipeline:
    """T5 text encoder, an autoencoder of images, DDIM, clipped lest a random model's latents hide the last step."""
    return quiet(
        LattePipeline(
            tokenizer=word_tokenizer(),
            text_encoder=t5(_TEXT_CHANNELS),
            vae=kl_autoencoder(),
            transformer=transformer(),
            scheduler=DDIMScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing"),
        )
    )


CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    latents=(4, _FRAMES, 16, 16),
    blocks=(4, 2),
    grid=(8, 8),
    ragged_grid=(7, 5),
    attentions=tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
)
