"""DiG: gated linear attention whose blocks read rows and columns in turns; queries and keys as wide as MHLA's."""

from typing import Any

import torch
from diffusers import DiTPipeline

from mhla_diffusers.models.dig import DiGTransformer2DModel

from ...models import seeded
from ...pipelines import dit_pipeline
from .case import FamilyCase
from .draws import drawer, timesteps

CALL = {"class_labels": [3], "num_inference_steps": 2, "output_type": "pt"}


def transformer(**config: Any) -> DiGTransformer2DModel:
    """Three layers, that of rows, of rows backwards, and of columns."""
    settings = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 3, "sample_size": 16, "expand_k": 1.0}
    return seeded(DiGTransformer2DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Squares, as DiG takes no others."""
    side = 14 if ragged else 16
    labels = torch.tensor([3, 7, 1000])[:batch]
    return {"hidden_states": drawer(batch, seed)(4, side, side), "timestep": timesteps(batch), "class_labels": labels}


def pipeline() -> DiTPipeline:
    """DiT's."""
    return dit_pipeline(transformer())


CASE = FamilyCase(
    transformer,
    inputs,
    pipeline,
    CALL,
    latents=(4, 16, 16),
    blocks=(4, 2),
    grid=(8, 8),
    ragged_grid=(7, 7),
    attentions=tuple(f"transformer_blocks.{layer}.attn1" for layer in range(3)),
)
