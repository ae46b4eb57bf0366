"""HunyuanDiT: RoPE made by the pipeline, skip connections between layers, text of BERT and T5."""

from typing import Any

import torch
from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from transformers import BertConfig, BertModel

from ...models import seeded
from ...pipelines import quiet, word_tokenizer
from .case import FamilyCase
from .components import kl_autoencoder, t5
from .draws import drawer, timesteps

_GRID, _RAGGED_GRID = (8, 8), (7, 5)
_HEAD_DIM = 12
_BERT_TOKENS, _BERT_CHANNELS = 77, 16
_T5_TOKENS, _T5_CHANNELS = 256, 32
"""Text lengths are fixed in the pipeline, and the model has a parameter for every token of padding."""

CALL = {
    "prompt": "the red dog",
    "height": 128,
    "width": 128,
    "num_inference_steps": 2,
    "use_resolution_binning": False,
    "output_type": "pt",
}


def transformer() -> HunyuanDiT2DModel:
    """Four layers, the first of them joined to the last by a skip connection; with more noise attention is a trifle."""
    return seeded(
        HunyuanDiT2DModel,
        noise=0.1,
        num_attention_heads=2,
        attention_head_dim=_HEAD_DIM,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=2 * _HEAD_DIM,
        num_layers=4,
        mlp_ratio=2.0,
        cross_attention_dim=_BERT_CHANNELS,
        cross_attention_dim_t5=_T5_CHANNELS,
        pooled_projection_dim=16,
        text_len=_BERT_TOKENS,
        text_len_t5=_T5_TOKENS,
    )


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """As of the pipeline, which also gives (cos, sin) of every token of the grid."""
    draw, grid = drawer(batch, seed), _RAGGED_GRID if ragged else _GRID
    lengths = torch.tensor([[5], [3], [4]])[:batch]
    sizes = torch.tensor([[64.0, 64, 64, 64, 0, 0], [64, 96, 64, 64, 8, 0], [96, 64, 64, 64, 0, 8]])[:batch]
    return {
        "hidden_states": draw(4, 2 * grid[0], 2 * grid[1]),
        "timestep": timesteps(batch).float(),
        "encoder_hidden_states": draw(_BERT_TOKENS, _BERT_CHANNELS),
        "text_embedding_mask": (torch.arange(_BERT_TOKENS) < lengths).long(),
        "encoder_hidden_states_t5": draw(_T5_TOKENS, _T5_CHANNELS),
        "text_embedding_mask_t5": (torch.arange(_T5_TOKENS) < lengths + 2).long(),
        "image_meta_size": sizes,
        "style": torch.zeros(batch, dtype=torch.int64),
        "image_rotary_emb": get_2d_rotary_pos_embed(_HEAD_DIM, ((0, 0), grid), grid),
    }


def pipeline() -> HunyuanDiTPipeline:
    """BERT and T5 text encoders, DDPM with v-prediction, no safety checker."""
    bert = BertConfig(
        vocab_size=16, hidden_size=_BERT_CHANNELS, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return quiet(
        HunyuanDiTPipeline(
            vae=kl_autoencoder(),
            text_encoder=seeded(BertModel, config=bert),
            tokenizer=word_tokenizer(),
            text_encoder_2=t5(_T5_CHANNELS),
            tokenizer_2=word_tokenizer(),
            transformer=transformer(),
            scheduler=DDPMScheduler(
                beta_start=0.00085,
                beta_end=0.03,
                beta_schedule="scaled_linear",
                clip_sample=False,
                prediction_type="v_prediction",
                steps_offset=1,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    latents=(4, 2 * _GRID[0], 2 * _GRID[1]),
    blocks=(4, 2),
    grid=_GRID,
    ragged_grid=_RAGGED_GRID,
    attentions=tuple(f"blocks.{layer}.attn1" for layer in range(4)),
    whole_text=True,
)
