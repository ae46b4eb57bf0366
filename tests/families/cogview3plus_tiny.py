"""A tiny CogView3-Plus pipeline with random weights, built without a download."""

from pathlib import Path

from diffusers import CogVideoXDDIMScheduler, CogView3PlusPipeline, CogView3PlusTransformer2DModel

from ..models import seeded
from ..pipelines import quiet
from .cases import kl_autoencoder, t5, text_tokenizer

CALL = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 8}
"""Arguments of the pipeline's call for a small picture: 8x8 latents, a token grid of 4x4."""


def cogview3plus_transformer() -> CogView3PlusTransformer2DModel:
    """Four layers of 2 heads of 12."""
    return seeded(
        CogView3PlusTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        in_channels=4,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        sample_size=16,
    )


def cogview3plus_pipeline() -> CogView3PlusPipeline:
    """T5, transformer, AutoencoderKL and DDIM steps of a velocity."""
    steps = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 4.0}
    return quiet(
        CogView3PlusPipeline(
            tokenizer=text_tokenizer(),
            text_encoder=t5(32),
            vae=kl_autoencoder(),
            transformer=cogview3plus_transformer(),
            scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", **steps),
        )
    )


def save_cogview3plus(folder: Path) -> Path:
    """Write the pipeline into a folder for ``--model``.

    Returns:
        ``folder``.
    """
    cogview3plus_pipeline().save_pretrained(folder)
    return folder
