"""The tiny pipelines before their transformers are trained."""

from typing import Any

from torch import nn

from .autoencoders import LATENT_CHANNELS, STRIDES
from .digits import NAMES, PICTURE_SIZE
from .text import TEXT_CHANNELS, build_tokenizer, train_text_encoder

FAMILIES = ("dit", "sana", "wan")
"""Families that have a tiny pipeline."""


def check_family(family: str) -> None:
    """Raise unless there is a tiny pipeline of this family.

    Raises:
        ValueError: with the allowed names.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} has no tiny pipeline; allowed: {', '.join(FAMILIES)}.")


def build_transformer(family: str) -> Any:
    """An untrained transformer: 64 tokens for an image (dit, sana), 9x8x8 = 576 for a clip (wan)."""
    from diffusers import DiTTransformer2DModel, SanaTransformer2DModel, WanTransformer3DModel

    channels = LATENT_CHANNELS[family]
    size = PICTURE_SIZE // STRIDES[family]
    if family == "dit":
        transformer = DiTTransformer2DModel(
            num_attention_heads=3,
            attention_head_dim=32,
            in_channels=channels,
            out_channels=2 * channels,
            num_layers=4,
            sample_size=size,
            patch_size=2,
            num_embeds_ada_norm=1000,
        )
        for block in transformer.transformer_blocks:
            # the usual 0.02 takes many thousand steps until the label is heard beside the timestep
            nn.init.normal_(block.norm1.emb.class_embedder.embedding_table.weight, std=0.5)
        return transformer
    if family == "sana":
        return SanaTransformer2DModel(
            in_channels=channels,
            out_channels=channels,
            num_attention_heads=3,
            attention_head_dim=32,
            num_layers=4,
            num_cross_attention_heads=3,
            cross_attention_head_dim=32,
            cross_attention_dim=96,
            caption_channels=TEXT_CHANNELS,
            sample_size=size,
            patch_size=2,
        )
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=3,
        attention_head_dim=32,
        in_channels=channels,
        out_channels=channels,
        text_dim=TEXT_CHANNELS,
        ffn_dim=384,
        num_layers=4,
        rope_max_seq_len=64,
    )


def build_scheduler(family: str) -> Any:
    """First-order DPM-Solver on DiT's linear schedule, or flow matching with shift 3 (sana, wan)."""
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

    if family == "dit":
        # the second order extrapolates predictions made of nearly pure noise, which a small model gets wrong
        return DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", solver_order=1)
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def build_pipeline(family: str, autoencoder: Any, seed: int = 0) -> Any:
    """A pipeline with a trained autoencoder, a trained text encoder and an untrained transformer.

    Raises:
        ValueError: unknown family.
    """
    import torch
    from diffusers import DiTPipeline, SanaPipeline, WanPipeline

    check_family(family)
    torch.manual_seed(seed)
    parts = {"transformer": build_transformer(family), "vae": autoencoder, "scheduler": build_scheduler(family)}
    if family == "dit":
        pipe = DiTPipeline(**parts, id2label=dict(enumerate(NAMES)))
        # DiTPipeline reads the class names from its configuration, but does not write them
        pipe.register_to_config(id2label=dict(enumerate(NAMES)))
        return pipe
    tokenizer = build_tokenizer(family)
    parts |= {"tokenizer": tokenizer, "text_encoder": train_text_encoder(family, tokenizer, seed)}
    return SanaPipeline(**parts) if family == "sana" else WanPipeline(**parts)
