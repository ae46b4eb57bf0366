"""A tiny CogView3-Plus with random weights, built without a download, as a case of the contract."""

from pathlib import Path
from typing import Any

from diffusers import CogVideoXDDIMScheduler, CogView3PlusPipeline, CogView3PlusTransformer2DModel

from mhla_diffusers.families import Family

from ..models import seeded
from ..pipelines import quiet
from .cases import Case, kl_autoencoder, t5, text_tokenizer
from .cogview3plus import COGVIEW3PLUS

CALL = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 8}
"""Arguments of the pipeline's call for a small picture: 8x8 latents, a token grid of 4x4."""


def cogview3plus_pipeline(transformer: Any = None) -> CogView3PlusPipeline:
    """T5, transformer, AutoencoderKL and DDIM steps of a velocity."""
    steps = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 4.0}
    return quiet(
        CogView3PlusPipeline(
            tokenizer=text_tokenizer(),
            text_encoder=t5(32),
            vae=kl_autoencoder(),
            transformer=transformer or CASE.transformer(),
            scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", **steps),
        )
    )


class _Added(Case):
    @property
    def of_family(self) -> Family:
        return COGVIEW3PLUS

    def transformer(self, **config: Any) -> Any:
        (model,) = (model for model in self.of_family.models if model.is_tiny)
        sizes = {"num_attention_heads": model.heads, "attention_head_dim": model.head_dim, "num_layers": model.layers}
        return seeded(CogView3PlusTransformer2DModel, **sizes, **{**model.settings, "sample_size": 16, **config})

    def short(self) -> Any:
        return self.transformer(num_layers=1)


CASE = _Added(
    "cogview3plus",
    cogview3plus_pipeline,
    {**CALL, "height": 128, "width": 128, "prompt": "the red dog", "output_type": "pt"},
    tuple(f"transformer_blocks.{layer}.attn1" for layer in range(4)),
    extra=(8, 0),
)
"""A picture of 8x8 tokens."""


def save_cogview3plus(folder: Path) -> Path:
    """Write the pipeline into a folder for ``--model``, which is returned."""
    cogview3plus_pipeline().save_pretrained(folder)
    return folder
