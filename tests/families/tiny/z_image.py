"""Z-Image: lists of images and of texts; each is padded to a multiple of 32 tokens, and both are one sequence.

Before that the image's tokens attend to each other alone, in ``noise_refiner``.
"""

from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from ...models import seeded
from ...pipelines import quiet
from .case import FamilyCase
from .joint_components import TEXT_TOKENS, image_autoencoder, language_model, text_tokenizer

CALL = {
    "prompt": "a red ball",
    "negative_prompt": "dog",
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "guidance_scale": 4.0,
    "max_sequence_length": 8,
    "output_type": "pt",
}
_GRID, _RAGGED = (8, 8), (7, 5)


def transformer(**config: Any) -> ZImageTransformer2DModel:
    """Three layers, one that refines the image and one that refines the text, unless the arguments say otherwise."""
    settings = {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 3,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [4, 6, 6],
        "axes_lens": [1024, 32, 32],
    }
    return seeded(ZImageTransformer2DModel, **(settings | config))


def inputs(batch: int = 2, ragged: bool = False, seed: int = 1, uneven: bool = False) -> dict[str, Any]:
    """Lists of images (4, 1, 2 Hg, 2 Wg) and of texts (tokens, 16), and 1 - σ.

    Args:
        batch: number of samples.
        ragged: a token grid that block counts do not divide, and which does not fill a multiple of 32 tokens.
        seed: of the random values.
        uneven: the second text is so long that the batch is padded, and masked.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = _RAGGED if ragged else _GRID
    lengths = (TEXT_TOKENS, 40 if uneven else TEXT_TOKENS - 2, 3)[:batch]
    return {
        "x": [torch.randn(4, 1, 2 * height, 2 * width, generator=generator) for _ in lengths],
        "t": torch.tensor([0.5, 0.75, 0.25])[:batch],
        "cap_feats": [torch.randn(length, 16, generator=generator) for length in lengths],
    }


def pipeline() -> ZImagePipeline:
    """Qwen3 as text encoder; guidance in one forward."""
    return quiet(
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_autoencoder(4, shift_factor=0.1),
            text_encoder=seeded(Qwen3Model, config=Qwen3Config(**language_model(layers=2), head_dim=8)),
            tokenizer=text_tokenizer(),
            transformer=transformer(),
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
    attentions=tuple(f"layers.{layer}.attention" for layer in range(3)),
    extra=(0, 32),
)

UNEVEN_CASE = FamilyCase(
    transformer=transformer,
    inputs=partial(inputs, uneven=True),
    pipeline=pipeline,
    call=CALL,
    latents=(4, 16, 16),
    blocks=(4, 2),
    grid=_GRID,
    ragged_grid=_RAGGED,
    attentions=CASE.attentions,
    extra=(0, 64),
)
