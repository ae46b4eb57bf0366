"""A tiny PixArt-α pipeline with random weights, built without a download."""

from pathlib import Path

from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from transformers import T5Config, T5EncoderModel

from ..models import seeded
from ..pipelines import quiet, word_tokenizer

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
    encoder = T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    vae = seeded(
        AutoencoderKL,
        noise=0.05,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        mid_block_add_attention=False,
    )
    return quiet(
        PixArtAlphaPipeline(
            tokenizer=word_tokenizer(),
            text_encoder=seeded(T5EncoderModel, config=encoder),
            vae=vae,
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
