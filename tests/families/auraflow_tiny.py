"""A tiny AuraFlow pipeline with random weights, built without a download."""

from pathlib import Path

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from ..models import seeded
from ..pipelines import quiet, wan_pipeline
from .cases import kl_autoencoder

CALL = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 8}
"""Arguments of the pipeline's call for a small picture: 8x8 latents, a token grid of 4x4."""


def auraflow_transformer() -> AuraFlowTransformer2DModel:
    """Two layers of two streams and two of one, of 2 heads of 12."""
    return seeded(
        AuraFlowTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        caption_projection_dim=24,
        joint_attention_dim=32,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        sample_size=16,
        pos_embed_max_size=64,
    )


def auraflow_pipeline() -> AuraFlowPipeline:
    """UMT5 text encoder, transformer, AutoencoderKL and flow matching."""
    text = wan_pipeline().components
    return quiet(
        AuraFlowPipeline(
            tokenizer=text["tokenizer"],
            text_encoder=text["text_encoder"],
            vae=kl_autoencoder(),
            transformer=auraflow_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        )
    )


def save_auraflow(folder: Path) -> Path:
    """Write the pipeline into a folder for ``--model``.

    Returns:
        ``folder``.
    """
    auraflow_pipeline().save_pretrained(folder)
    return folder
