"""A tiny PixArt-α pipeline with random weights, built without a download."""

from pathlib import Path

from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

from ..models import seeded
from ..pipelines import quiet, word_tokenizer
from .tiny.components import kl_autoencoder, t5

CALL = {"height": 64, "width": 64, "use_resolution_binning": False, "clean_caption": False, "num_inference_steps": 2}
"""Arguments of the pipeline's call for a small picture: 8x8 latents, a token grid of 4x4."""


def pixart_transformer(sample_size: int = 128) -> PixArtTransformer2DModel:
    """Three layers of 2 heads of 12.

    Args:
        sample_size: 128 for the model that is told the size of its picture, as PixArt-α of 1024 px is.
    """
    return seeded(
        PixArtTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        num_layers=3,
        sample_size=sample_size,
    )


def pixart_pipeline(sample_size: int = 128) -> PixArtAlphaPipeline:
    """T5 text encoder, transformer, AutoencoderKL and DPM-Solver; see :func:`pixart_transformer`."""
    return quiet(
        PixArtAlphaPipeline(
            tokenizer=word_tokenizer(),
            text_encoder=t5(32),
            vae=kl_autoencoder(),
            transformer=pixart_transformer(sample_size),
            scheduler=DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear"),
        )
    )


def save_pixart(folder: Path, sample_size: int = 128) -> Path:
    """Write the pipeline into a folder for ``--model``.

    Returns:
        ``folder``.
    """
    pixart_pipeline(sample_size).save_pretrained(folder)
    return folder
