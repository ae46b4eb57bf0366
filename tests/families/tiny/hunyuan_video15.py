"""HunyuanVideo 1.5: three kinds of text and image tokens behind the video, sorted so that masked ones are last."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TOKENS, keep_some, language_model, t5_text, text_tokenizer

CALL = {
    # what stands in quotation marks is encoded a second time
    "prompt": 'a dog on "the red wave"',
    "negative_prompt": "ball",
    "num_frames": 7,
    "height": 16,
    "width": 24,
    "num_inference_steps": 2,
    "output_type": "pt",
}
_GRID, _RAGGED = (4, 4, 6), (3, 5, 4)
_GLYPH_TOKENS, _IMAGE_TOKENS = 4, 3


def transformer(**config: Any) -> HunyuanVideo15Transformer3DModel:
    """Three layers, unless the arguments of the class say otherwise."""
    settings = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "text_embed_2_dim": 32,
        "image_embed_dim": 8,
        "rope_axes_dim": (4, 4, 4),
        "target_size": 16,
        "task_type": "t2v",
    }
    return seeded(HunyuanVideo15Transformer3DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents with condition and mask (B, 9, F, Hg, Wg), both texts with their masks, no image, and the timestep."""
    generator = torch.Generator().manual_seed(seed)
    grid = _RAGGED if ragged else _GRID
    return {
        "hidden_states": torch.randn(batch, 9, *grid, generator=generator),
        "timestep": torch.tensor([500.0, 250.0, 750.0])[:batch],
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 16, generator=generator),
        "encoder_attention_mask": keep_some(batch),
        "encoder_hidden_states_2": torch.randn(batch, _GLYPH_TOKENS, 32, generator=generator),
        "encoder_attention_mask_2": keep_some(batch, _GLYPH_TOKENS),
        "image_embeds": torch.zeros(batch, _IMAGE_TOKENS, 8),
    }


def pipeline() -> HunyuanVideo15Pipeline:
    """Qwen2.5-VL for the text, T5 for what is quoted in it; the guidance is a component."""
    qwen = Qwen2_5_VLTextConfig(
        **language_model(layers=3), rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]}
    )
    vae = seeded(
        AutoencoderKLHunyuanVideo15,
        noise=0.05,
        latent_channels=4,
        block_out_channels=(8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    pipe = HunyuanVideo15Pipeline(
        text_encoder=seeded(Qwen2_5_VLTextModel, config=qwen),
        tokenizer=text_tokenizer(),
        transformer=transformer(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=t5_text(32),
        tokenizer_2=text_tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipe.prompt_template_encode_start_idx, pipe.tokenizer_max_length = 1, TEXT_TOKENS
    pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = _GLYPH_TOKENS, _IMAGE_TOKENS
    return quiet(pipe)


CASE = FamilyCase(
    transformer=transformer,
    inputs=inputs,
    pipeline=pipeline,
    call=CALL,
    latents=(4, 4, 4, 6),
    blocks=(2, 2, 3),
    grid=_GRID,
    ragged_grid=_RAGGED,
    attentions=tuple(f"transformer_blocks.{layer}.attn" for layer in range(3)),
    # its forward branches on whether all image embeddings are 0
    compiles_whole=False,
    extra=(0, _IMAGE_TOKENS + _GLYPH_TOKENS + TEXT_TOKENS),
)
