"""Tiny instances of the real diffusers classes that tests patch, their inputs, and tiny pipelines around them.

Nothing is downloaded: weights are random and seeded, tokenizers are built here. A model's parameters are all random
(also those that a fresh model has at 0 or 1, as the weights of norms), so that a test notices when one is left out.
"""

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
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    WanPipeline,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from mhla_diffusers import apply_mhla

_TEXT_TOKENS = 6
_I2V_TEXT_TOKENS = 512
"""Wan's image-to-video cross-attention takes the last 512 tokens of its context as the text."""
_WORDS = ("a", "the", "cat", "dog", "surfing", "on", "red", "blue", "wave")


def _seeded(cls: type, seed: int = 0, noise: float = 0.15, **config: Any) -> Any:
    """An instance in eval mode whose parameters are all random; the more noise, the more its attention matters."""
    torch.manual_seed(seed)
    model = cls(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model.eval()


def _wan(cls: type = WanTransformer3DModel, **config: Any) -> Any:
    settings = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 4,
        "rope_max_seq_len": 32,
    }
    return _seeded(cls, **(settings | config))


def wan() -> WanTransformer3DModel:
    """Wan 2.1 text-to-video, four layers."""
    return _wan()


def wan_i2v() -> WanTransformer3DModel:
    """Wan 2.1 image-to-video: image tokens in the cross-attention, latents with the mask and the first frame."""
    return _wan(in_channels=36, image_dim=8, added_kv_proj_dim=24, num_layers=3)


def wan_ti2v() -> WanTransformer3DModel:
    """Wan 2.2 TI2V-5B: a timestep for every token."""
    return _wan(in_channels=8, out_channels=8, num_layers=3)


def wan_vace() -> WanVACETransformer3DModel:
    """Wan VACE: three layers and two control layers."""
    return _wan(WanVACETransformer3DModel, num_layers=3, vace_layers=[0, 2], vace_in_channels=12)


def _sana(**config: Any) -> SanaTransformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 8,
        "sample_size": 8,
    }
    return _seeded(SanaTransformer2DModel, **(settings | config))


def sana() -> SanaTransformer2DModel:
    """SANA 1.0, three layers."""
    return _sana()


def sana_qk_norm() -> SanaTransformer2DModel:
    """SANA 1.5: query and key normed across heads, guidance embedded."""
    return _sana(qk_norm="rms_norm_across_heads", guidance_embeds=True)


def dit() -> DiTTransformer2DModel:
    """DiT with learned variance, four layers."""
    return _seeded(
        DiTTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        sample_size=16,
        num_embeds_ada_norm=1000,
    )


@dataclass(frozen=True)
class ModelCase:
    """One model to test, with what fits it."""

    build: Callable[[], nn.Module]
    blocks: tuple[int, ...]
    """Block counts that divide ``grid``."""
    latents: tuple[int, ...]
    """Channels and size of the usual input."""
    grid: tuple[int, ...]
    """Token grid of the usual input."""
    ragged: tuple[int, ...]
    """Channels and size of an input whose token grid the block counts do not divide."""
    ragged_grid: tuple[int, ...]
    self_attentions: int
    """Number of layers that can be patched."""
    own_methods: bool = True
    """Whether diffusers' class itself has ``attn_processors`` and ``set_attn_processor``."""


_VIDEO = {"blocks": (2, 2, 3), "grid": (4, 4, 6), "ragged_grid": (3, 5, 4)}
_IMAGE = {"blocks": (4, 2), "grid": (8, 8)}

FAMILIES = {
    "wan": ModelCase(wan, latents=(16, 4, 8, 12), ragged=(16, 3, 10, 8), self_attentions=4, **_VIDEO),
    "wan_i2v": ModelCase(wan_i2v, latents=(36, 4, 8, 12), ragged=(36, 3, 10, 8), self_attentions=3, **_VIDEO),
    "wan_ti2v": ModelCase(wan_ti2v, latents=(8, 4, 8, 12), ragged=(8, 3, 10, 8), self_attentions=3, **_VIDEO),
    "wan_vace": ModelCase(wan_vace, latents=(16, 4, 8, 12), ragged=(16, 3, 10, 8), self_attentions=5, **_VIDEO),
    "sana": ModelCase(sana, latents=(4, 8, 8), ragged=(4, 7, 5), ragged_grid=(7, 5), self_attentions=3, **_IMAGE),
    "sana_qk_norm": ModelCase(
        sana_qk_norm, latents=(4, 8, 8), ragged=(4, 7, 5), ragged_grid=(7, 5), self_attentions=3, **_IMAGE
    ),
    # diffusers' DiT takes square latents only
    "dit": ModelCase(
        dit,
        latents=(4, 16, 16),
        ragged=(4, 14, 14),
        ragged_grid=(7, 7),
        self_attentions=4,
        own_methods=False,
        **_IMAGE,
    ),
}
"""Every model that can be patched, by name."""


def inputs(name: str, *, batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
    """Keyword arguments of the forward of model ``name``; those with a batch axis are tensors.

    Args:
        name: key of ``FAMILIES``.
        batch: number of samples.
        ragged: latents whose token grid the family's block counts do not divide.
        seed: of the random values.
    """
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    latents = draw(*(family.ragged if ragged else family.latents))
    timestep = torch.tensor([500, 250, 750])[:batch]
    result: dict[str, Any] = {"hidden_states": latents, "timestep": timestep}
    if name == "dit":
        return result | {"class_labels": torch.tensor([3, 7, 1000])[:batch]}
    if name.startswith("sana"):
        keep = torch.arange(_TEXT_TOKENS) < torch.tensor([[_TEXT_TOKENS], [_TEXT_TOKENS - 2], [3]])[:batch]
        result |= {"encoder_hidden_states": draw(_TEXT_TOKENS, 8), "encoder_attention_mask": keep.long()}
        return result | ({"guidance": torch.tensor([4.5, 3.0, 6.0])[:batch]} if name == "sana_qk_norm" else {})
    result["encoder_hidden_states"] = draw(_I2V_TEXT_TOKENS if name == "wan_i2v" else _TEXT_TOKENS, 32)
    if name == "wan_i2v":
        result["encoder_hidden_states_image"] = draw(5, 8)
    if name == "wan_ti2v":
        tokens = torch.Size(family.ragged_grid if ragged else family.grid).numel()
        result["timestep"] = (timestep[:, None] * (torch.arange(tokens) % 2)).long()
    if name == "wan_vace":
        result["control_hidden_states"] = draw(12, *latents.shape[2:])
    return result


def patched(name: str, **settings: Any) -> Any:
    """Model ``name`` with every self-attention replaced, unless the settings say otherwise."""
    return apply_mhla(FAMILIES[name].build(), **({"blocks": FAMILIES[name].blocks} | settings))


@torch.no_grad()
def output(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What a transformer predicts, without gradients."""
    return model(**arguments, return_dict=False)[0]


def relative_change(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; fails unless ``found`` is finite."""
    assert found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_changed(found: torch.Tensor, before: torch.Tensor) -> None:
    """By far more than rounding, and still finite."""
    assert relative_change(found, before) > 1e-3


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words to numbers, without a download."""
    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *_WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="</s>", unk_token="<unk>"
    )


def _wan_parts() -> dict[str, Any]:
    encoder = UMT5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return {
        "tokenizer": _tokenizer(),
        "text_encoder": _seeded(UMT5EncoderModel, config=encoder),
        "vae": _seeded(
            AutoencoderKLWan,
            noise=0.05,
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def wan_pipeline() -> WanPipeline:
    """Wan 2.1 text-to-video."""
    return _quiet(WanPipeline(transformer=wan(), **_wan_parts()))


def wan22_pipeline() -> WanPipeline:
    """Wan 2.2 A14B: a second transformer, with other weights, for the low-noise steps."""
    second = _wan(seed=5)
    return _quiet(WanPipeline(transformer=wan(), transformer_2=second, boundary_ratio=0.9, **_wan_parts()))


def dit_pipeline() -> DiTPipeline:
    """DiT with DDIM."""
    vae = _seeded(
        AutoencoderKL,
        noise=0.05,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
    )
    return _quiet(DiTPipeline(transformer=dit(), vae=vae, scheduler=DDIMScheduler()))


def sana_pipeline() -> SanaPipeline:
    """SANA 1.0 with a Gemma 2 text encoder."""
    encoder = Gemma2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    vae = _seeded(
        AutoencoderDC,
        noise=0.05,
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )
    return _quiet(
        SanaPipeline(
            tokenizer=_tokenizer(),
            text_encoder=_seeded(Gemma2Model, config=encoder),
            vae=vae,
            transformer=sana(),
            scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        )
    )


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline to test."""

    build: Callable[[], Any]
    transformers: tuple[str, ...]
    """Component names of its transformers."""
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
    "wan": PipelineCase(wan_pipeline, ("transformer",), (3, 2, 1), _CLIP),
    "wan22": PipelineCase(wan22_pipeline, ("transformer", "transformer_2"), (3, 2, 1), _CLIP),
    "dit": PipelineCase(
        dit_pipeline, ("transformer",), (4, 2), {"class_labels": [3], "num_inference_steps": 2, "output_type": "pt"}
    ),
    "sana": PipelineCase(
        sana_pipeline,
        ("transformer",),
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


def generate(name: str, pipe: Any) -> torch.Tensor:
    """Images or a video of pipeline ``name``, from a fixed seed."""
    result = pipe(**PIPELINES[name].call, generator=torch.Generator().manual_seed(3))
    return result.frames if hasattr(result, "frames") else result.images
