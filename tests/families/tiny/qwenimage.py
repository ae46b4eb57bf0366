"""Qwen-Image: packed latents whose size is told by ``img_shapes``, masked text before them with its own RoPE."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TEMPLATE, TEXT_TOKENS, keep_some, language_model, text_tokenizer

CALL = {
    "prompt": "a red ball",
    "negative_prompt": "dog",
    "true_cfg_scale": 4.0,
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "max_sequence_length": 8,
    "output_type": "pt",
}
_GRID, _RAGGED = (8, 8), (7, 5)


def transformer(**config: Any) -> QwenImageTransformer2DModel:
    """Three layers, unless the arguments of the class say otherwise."""
    settings = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return seeded(QwenImageTransformer2DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Latents (B, Hg Wg, 16), text with its mask, timestep in (0, 1), and for every sample a list of (1, Hg, Wg)."""
    generator = torch.Generator().manual_seed(seed)
    height, width = _RAGGED if ragged else _GRID
    return {
        "hidden_states": torch.randn(batch, height * width, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 16, generator=generator),
        "encoder_hidden_states_mask": keep_some(batch),
        "timestep": torch.tensor([0.5, 0.25, 0.75])[:batch],
        "img_shapes": [[(1, height, width)]] * batch,
    }


def pipeline() -> QwenImagePipeline:
    """Qwen2.5-VL as text encoder; two forwards for guidance."""
    encoder = Qwen2_5_VLConfig(
        text_config={**language_model(layers=2), "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
    )
    vae = seeded(
        AutoencoderKLQwenImage,
        noise=0.05,
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.1, 0.9, 1.2, 1.0],
    )
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9, shift_terminal=0.02),
        vae=vae,
        text_encoder=seeded(Qwen2_5_VLForConditionalGeneration, config=encoder),
        tokenizer=text_tokenizer(),
        transformer=transformer(),
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = TEXT_TEMPLATE, 1
    return quiet(pipe)


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
    extra=(TEXT_TOKENS, 0),
)
