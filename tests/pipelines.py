"""Tiny pipelines of real diffusers classes with random weights. Nothing is downloaded: tokenizers are built here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    WanPipeline,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .models import dit, sana, seeded, wan

_WORDS = ("a", "the", "cat", "dog", "surfing", "on", "red", "blue", "wave", "ball", "moves")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words to numbers, without a download."""
    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *_WORDS))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="</s>", unk_token="<unk>"
    )


def wan_pipeline(transformer: Any = None, vae: dict[str, Any] | None = None, **components: Any) -> WanPipeline:
    """Wan 2.1 text-to-video.

    Args:
        transformer: None for that of models.py.
        vae: settings of the autoencoder that differ.
        components: of the pipeline, in place of those made here.
    """
    transformer = transformer or wan()
    width = transformer.config.text_dim
    encoder = UMT5Config(vocab_size=16, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    settings = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    parts = {
        "transformer": transformer,
        "tokenizer": word_tokenizer(),
        "text_encoder": seeded(UMT5EncoderModel, config=encoder),
        "vae": seeded(AutoencoderKLWan, noise=0.05, **(settings | (vae or {}))),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return quiet(WanPipeline(**{**parts, **components}))


def wan22_pipeline() -> WanPipeline:
    """Wan 2.2 A14B: a second transformer, with other weights, for the low-noise steps."""
    return wan_pipeline(transformer_2=wan(seed=5), boundary_ratio=0.9)


def dit_pipeline(transformer: Any = None, vae: dict[str, Any] | None = None, **components: Any) -> DiTPipeline:
    """DiT with DDIM; arguments as of :func:`wan_pipeline`."""
    settings = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 8),
        "norm_num_groups": 4,
    }
    parts = {
        "transformer": transformer or dit(),
        "vae": seeded(AutoencoderKL, noise=0.05, **(settings | (vae or {}))),
        "scheduler": DDIMScheduler(),
    }
    return quiet(DiTPipeline(**{**parts, **components}))


def sana_pipeline(transformer: Any = None, vae: dict[str, Any] | None = None, **components: Any) -> SanaPipeline:
    """SANA 1.0 with a Gemma 2 text encoder; arguments as of :func:`wan_pipeline`."""
    encoder = Gemma2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    half = {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 8),
        "qkv_multiscales": ((), (5,)),
        "layers_per_block": (1, 1),
    }
    settings = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in half.items()}
    settings |= {"latent_channels": 4, "attention_head_dim": 2}
    settings |= {"downsample_block_type": "conv", "upsample_block_type": "interpolate"}
    parts = {
        "tokenizer": word_tokenizer(),
        "text_encoder": seeded(Gemma2Model, config=encoder),
        "vae": seeded(AutoencoderDC, noise=0.05, **(settings | (vae or {}))),
        "transformer": transformer or sana(),
        "scheduler": DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    }
    return quiet(SanaPipeline(**{**parts, **components}))


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline to test."""

    build: Callable[[], Any]
    blocks: tuple[int, ...]
    call: dict[str, Any]
    """Arguments of a short generation."""


_CLIP = {
    "prompt": "a cat surfing",
    "num_frames": 9,
    "height": 32,
    "width": 48,
    "num_inference_steps": 3,
    "max_sequence_length": 8,
    "output_type": "pt",
}

PIPELINES = {
    "wan": PipelineCase(wan_pipeline, (3, 2, 1), _CLIP),
    "wan22": PipelineCase(wan22_pipeline, (3, 2, 1), _CLIP),
    "dit": PipelineCase(dit_pipeline, (4, 2), {"class_labels": [3], "num_inference_steps": 2, "output_type": "pt"}),
    "sana": PipelineCase(
        sana_pipeline,
        (4, 2),
        {
            "prompt": "the red dog",
            "height": 32,
            "width": 32,
            "num_inference_steps": 2,
            "max_sequence_length": 8,
            "complex_human_instruction": None,
            "use_resolution_binning": False,
            "output_type": "pt",
        },
    ),
}
"""Every pipeline that can be patched, by name."""


def generate(name: str, pipe: Any, **settings: Any) -> torch.Tensor:
    """Images or a video of pipeline ``name``, from a fixed seed."""
    result = pipe(**PIPELINES[name].call | settings, generator=torch.Generator().manual_seed(3))
    return result.frames if hasattr(result, "frames") else result.images
