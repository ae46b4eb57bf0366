"""Tiny models of every family as a table: what differs from the package's own tiny models, inputs and pipelines."""

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseStep
from diffusers.modular_pipelines.flux3.modular_pipeline import Flux3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from PIL import Image
from tokenizers.processors import TemplateProcessing

import mhla_diffusers as mhla
from mhla_diffusers.families import Family, Model, get_family, named_arguments

from ..models import FAMILIES, attn_processors, inputs, seeded, small_case
from ..pipelines import PIPELINES, dit_pipeline, quiet, sana_pipeline, wan_pipeline, word_tokenizer
from .tiny_models import MODELS

TEXT_TOKENS = 6
"""Tokens of texts in inputs, which are cut to it unless a model takes whole ones alone."""
IMAGE_TEXT_TOKENS = 512
"""Wan's image-to-video cross-attention takes the last 512 tokens of its context as the text."""
TEXT_TEMPLATE = "the {} on"
"""In place of a prompt for language models, one token before the text and one after it."""
_CHAT_TEMPLATE = "the {% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %} on"
_VIDEO, _IMAGE = ((4, 4, 6), (3, 5, 4)), ((8, 8), (7, 5))
_WHOLE, _CHUNK = (_VIDEO[0], (3, 6, 4)), (_VIDEO[0], (4, 5, 4))
"""Token grids of usual and ragged inputs, of which block counts divide the first alone."""
ROUNDING = 2e-5
"""Relative: float32 sums in another order, through all layers."""


def drawer(batch: int, seed: int) -> Callable[..., torch.Tensor]:
    """A function that draws normal values of shape (batch, *what it is given)."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(batch, *shape, generator=generator)


def embeddings(tokens: int, channels: int = 32) -> dict[str, torch.Tensor]:
    """Arguments of a pipeline's call in place of a prompt, which some pipelines read only where ftfy is installed."""
    prompt, negative = drawer(2, seed=5)(tokens, channels)[:, None]
    return {"prompt_embeds": prompt, "negative_prompt_embeds": negative}


# Components of pipelines


def text_tokenizer() -> Any:
    """A tokenizer whose longest text has ``TEXT_TOKENS`` tokens, which pipelines with CLIP ask it for."""
    tokenizer = word_tokenizer()
    tokenizer.model_max_length, tokenizer.chat_template = TEXT_TOKENS, _CHAT_TEMPLATE
    return tokenizer


def t5(channels: int) -> Any:
    """One layer; its tokens are those of ``word_tokenizer``."""
    config = transformers.T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return seeded(transformers.T5EncoderModel, config=config)


def t5_text(suffix: str = "", channels: int = 32, tokenizer: Callable[[], Any] = text_tokenizer) -> dict[str, Any]:
    """T5 and its tokenizer as components of a pipeline, whose names may end in a suffix."""
    return {f"text_encoder{suffix}": t5(channels), f"tokenizer{suffix}": tokenizer()}


def clip_text(suffix: str = "", cls: type = transformers.CLIPTextModel, seed: int = 0) -> dict[str, Any]:
    """CLIP of 12 channels, whose pooled text is read at the first padding token, and its tokenizer."""
    sizes = {"hidden_size": 12, "intermediate_size": 16, "projection_dim": 12, "num_hidden_layers": 2}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": 80}
    encoder = seeded(cls, seed=seed, config=transformers.CLIPTextConfig(num_attention_heads=2, **sizes, **tokens))
    return {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": text_tokenizer()}


def gemma_text() -> dict[str, Any]:
    parts = sana_pipeline().components
    return {name: parts[name] for name in ("text_encoder", "tokenizer")}


def language_model(layers: int) -> dict[str, Any]:
    """Settings that configurations of Llama and Qwen share: 16 channels, and a vocabulary of 16 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "max_position_embeddings": 64}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {**sizes, **tokens, "num_attention_heads": 2, "num_key_value_heads": 2}


def qwen(layers: int) -> dict[str, Any]:
    """The same of Qwen2.5-VL."""
    return {**language_model(layers), "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}


def _qwen_vl(layers: int = 2) -> Any:
    """Qwen2.5-VL of 16 channels, which reads no pictures here."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=qwen(layers), vision_config=vision)
    return seeded(transformers.Qwen2_5_VLForConditionalGeneration, config=config)


def autoencoder(cls: str, statistics: tuple[str, ...] = (), **config: Any) -> Any:
    """An autoencoder of diffusers with random weights, and random statistics of its channels in buffers by name."""
    vae, generator = seeded(getattr(diffusers, cls), noise=0.05, **config), torch.Generator().manual_seed(7)
    for path, (low, high) in zip(statistics, ((-0.2, 0.2), (0.1, 0.5)), strict=False):
        vae.get_buffer(path).uniform_(low, high, generator=generator)
    return vae


def kl_autoencoder(stages: int = 4, width: int = 4, cls: str = "AutoencoderKL", **config: Any) -> Any:
    """An autoencoder of images, by default with 4 channels; every stage but the first halves height and width."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * stages, "up_block_types": ("UpDecoderBlock2D",) * stages}
    sizes = {"block_out_channels": (width,) * stages, "layers_per_block": 1, "norm_num_groups": width // 2}
    usual = {"latent_channels": 4, "mid_block_add_attention": False}
    return autoencoder(cls, **blocks, **sizes, **{**usual, **config})


def half_autoencoder(shift: float, **config: Any) -> Any:
    """Latents of half the height and width."""
    return kl_autoencoder(2, 8, shift_factor=shift, use_quant_conv=False, use_post_quant_conv=False, **config)


def qwen_autoencoder() -> Any:
    scale = {"latents_mean": [0.1, -0.1, 0.2, 0.0], "latents_std": [1.1, 0.9, 1.2, 1.0]}
    stages = {"dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    return autoencoder("AutoencoderKLQwenImage", base_dim=3, z_dim=4, **stages, **scale)


def wan_components(flow_shift: float = 5.0, image_channels: int | None = None) -> dict[str, Any]:
    """UMT5 with 32 channels, Wan's autoencoder with 16, UniPC on flow matching, and a vision encoder if asked for."""
    parts = wan_pipeline().components
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    found = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae")} | {"scheduler": scheduler}
    if image_channels is None:
        return found
    sizes = {"hidden_size": image_channels, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, side = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4), {"height": 8, "width": 8}
    found["image_encoder"] = seeded(transformers.CLIPVisionModel, config=config)
    found["image_processor"] = transformers.CLIPImageProcessor(size=side, crop_size=side)
    return found


def flow(**config: Any) -> Any:
    return FlowMatchEulerDiscreteScheduler(**config)


def pipeline(kind: str, components: Callable[[], Mapping[str, Any]], **config: Any) -> Callable[[Any], Any]:
    return lambda transformer: getattr(diffusers, kind)(transformer=transformer, **components(), **config)


_auraflow = pipeline("AuraFlowPipeline", lambda: {**t5_text(), "vae": kl_autoencoder(), "scheduler": flow(shift=1.73)})
_chroma = pipeline(
    "ChromaPipeline", lambda: {**t5_text(), "vae": half_autoencoder(0.1), "scheduler": flow(use_dynamic_shifting=True)}
)
_flux = pipeline(
    "FluxPipeline",
    lambda: {
        **clip_text(),
        **t5_text("_2"),
        "vae": half_autoencoder(0.1),
        "scheduler": flow(shift=3.0, use_dynamic_shifting=True),
    },
)


def flux2_pipeline(transformer: Any, kind: str = "Flux2Pipeline", **config: Any) -> Any:
    """A language model, three of whose layers are the text; an autoencoder with statistics of a token's channels."""
    tokenizer, statistics = text_tokenizer(), ("bn.running_mean", "bn.running_var")
    if kind == "Flux2Pipeline":  # whose processor takes pictures as well
        tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "message.content[0].text")
    text = transformers.Qwen3Config(**language_model(layers=30), head_dim=8)
    return getattr(diffusers, kind)(
        scheduler=flow(shift=3.0, use_dynamic_shifting=True),
        vae=kl_autoencoder(2, 8, "AutoencoderKLFlux2", statistics=statistics),
        text_encoder=seeded(transformers.Qwen3ForCausalLM, config=text),
        tokenizer=tokenizer,
        transformer=transformer,
        **config,
    )


def _sd3_components() -> dict[str, Any]:
    projected = transformers.CLIPTextModelWithProjection
    text = {**clip_text(cls=projected), **clip_text("_2", projected, seed=1), **t5_text("_3")}
    return {**text, "vae": half_autoencoder(0.06), "scheduler": flow(shift=3.0)}


_FOUR_STAGES = {"block_out_channels": (4,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}


def _allegro_components() -> dict[str, Any]:
    """T5, an autoencoder of strides (4, 8, 8), and DDIM, clipped lest a random model's latents hide the last step."""
    sizes = {"block_out_channels": (4,) * 4, "norm_num_groups": 2, "layers_per_block": 1}
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")
    text = t5_text(tokenizer=word_tokenizer)
    return {**text, "vae": autoencoder("AutoencoderKLAllegro", **sizes), "scheduler": scheduler}


def _cogvideox_components() -> dict[str, Any]:
    steps = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 1.0}
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", **steps)
    return {**t5_text(), "vae": autoencoder("AutoencoderKLCogVideoX", **_FOUR_STAGES), "scheduler": scheduler}


def _cogview4_components() -> dict[str, Any]:
    """GLM, whose last layer but one is read; text begins with a token of its own and is padded on the left."""
    config, tokenizer = transformers.GlmConfig(**language_model(layers=2), head_dim=8), text_tokenizer()
    begins = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor, tokenizer.padding_side = begins, "left"
    scheduler = flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    text = {"tokenizer": tokenizer, "text_encoder": seeded(transformers.GlmModel, config=config)}
    return {**text, "vae": kl_autoencoder(), "scheduler": scheduler}


def _easyanimate_components() -> dict[str, Any]:
    """An autoencoder of strides (4, 8, 8); a prompt that is encoded needs a text encoder for its type alone."""
    vae = autoencoder("AutoencoderKLMagvit", **_FOUR_STAGES, spatial_group_norm=False)
    return {"text_encoder": _qwen_vl(), "tokenizer": text_tokenizer(), "vae": vae, "scheduler": flow(shift=5.0)}


def _hunyuan_dit_components() -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    betas = {"beta_start": 0.00085, "beta_end": 0.03, "beta_schedule": "scaled_linear"}
    bert = seeded(transformers.BertModel, config=transformers.BertConfig(vocab_size=16, **sizes))
    steps = diffusers.DDPMScheduler(**betas, clip_sample=False, prediction_type="v_prediction", steps_offset=1)
    text = {"text_encoder": bert, "tokenizer": word_tokenizer(), **t5_text("_2", tokenizer=word_tokenizer)}
    without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return {**text, "vae": kl_autoencoder(), "scheduler": steps, **without}


def _hunyuan_video_components() -> dict[str, Any]:
    """Llama for the tokens of the text, CLIP for the pooled text."""
    llama = seeded(transformers.LlamaModel, config=transformers.LlamaConfig(**language_model(layers=3)))
    vae = autoencoder("AutoencoderKLHunyuanVideo", **_FOUR_STAGES, mid_block_add_attention=False)
    text = {"text_encoder": llama, "tokenizer": text_tokenizer(), **clip_text("_2")}
    return {**text, "vae": vae, "scheduler": flow(shift=7.0)}


def _framepack_components() -> dict[str, Any]:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config, side = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4), {"height": 8, "width": 8}
    image = {"image_encoder": seeded(transformers.SiglipVisionModel, config=config)}
    image["feature_extractor"] = transformers.SiglipImageProcessor(size=side)
    return {**_hunyuan_video_components(), **image, "scheduler": flow(use_dynamic_shifting=True)}


def _hunyuan_video15(transformer: Any) -> Any:
    """Qwen2.5-VL for the text, T5 for what is quoted in it; the guidance is a component."""
    config = transformers.models.qwen2_5_vl.Qwen2_5_VLTextConfig(**qwen(layers=3))
    strides = {"spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
    sizes = {"latent_channels": 4, "block_out_channels": (8, 8), "layers_per_block": 1}
    matched = {"downsample_match_channel": False, "upsample_match_channel": False}
    pipe = diffusers.HunyuanVideo15Pipeline(
        text_encoder=seeded(transformers.models.qwen2_5_vl.Qwen2_5_VLTextModel, config=config),
        tokenizer=text_tokenizer(),
        transformer=transformer,
        vae=autoencoder("AutoencoderKLHunyuanVideo15", **strides, **sizes, **matched),
        scheduler=flow(shift=5.0),
        **t5_text("_2"),
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipe.prompt_template_encode_start_idx, pipe.tokenizer_max_length = 1, TEXT_TOKENS
    pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 4, 3
    return pipe


def _hunyuan_image(transformer: Any) -> Any:
    """Qwen2.5-VL for the text, T5 for what is quoted in it; the guidance is a component."""
    sizes = {"block_out_channels": (32, 32), "layers_per_block": 1, "spatial_compression_ratio": 2}
    channels = {"in_channels": 3, "out_channels": 3, "scaling_factor": 0.75}
    matched = {"downsample_match_channel": False, "upsample_match_channel": False}
    pipe = diffusers.HunyuanImagePipeline(
        scheduler=flow(shift=5.0),
        vae=autoencoder("AutoencoderKLHunyuanImage", latent_channels=4, sample_size=16, **channels, **sizes, **matched),
        text_encoder=_qwen_vl(layers=3),
        tokenizer=text_tokenizer(),
        **t5_text("_2"),
        transformer=transformer,
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=3.5),
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = TEXT_TEMPLATE, 1
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = TEXT_TOKENS, 4
    return pipe


def _kandinsky5_components() -> dict[str, Any]:
    """HunyuanVideo's autoencoder; a prompt that is encoded needs no text encoder."""
    vae = autoencoder("AutoencoderKLHunyuanVideo", **_FOUR_STAGES, mid_block_add_attention=False)
    return {
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
        "vae": vae,
        "scheduler": flow(shift=5.0),
    }


def _qwen3_vl(layers: int) -> Any:
    """Qwen3-VL of 16 channels, which reads no pictures here."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    text = {**language_model(layers), "head_dim": 8, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return seeded(transformers.Qwen3VLModel, config=config)


def _ideogram4(transformer: Any) -> Any:
    """Qwen3-VL, 13 of whose 36 layers are the text, Flux.2's autoencoder, and a second transformer without text."""
    tokenizer, statistics = text_tokenizer(), ("bn.running_mean", "bn.running_var")
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "message.content[0].text")
    return diffusers.Ideogram4Pipeline(
        scheduler=flow(),
        vae=kl_autoencoder(2, 8, "AutoencoderKLFlux2", statistics=statistics),
        text_encoder=_qwen3_vl(layers=36),
        tokenizer=tokenizer,
        transformer=transformer,
        unconditional_transformer=copy.deepcopy(transformer),
    )


def _krea2(transformer: Any) -> Any:
    pipe = diffusers.Krea2Pipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_autoencoder(),
        text_encoder=_qwen3_vl(layers=2),
        tokenizer=text_tokenizer(),
        transformer=transformer,
        text_encoder_select_layers=(1, 2),
    )
    pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_start_idx = "the ", 1
    pipe.prompt_template_encode_suffix, pipe.prompt_template_encode_num_suffix_tokens = "on", 1
    return pipe


def _latte_components() -> dict[str, Any]:
    """DDIM, clipped lest a random model's latents hide the last step."""
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")
    return {**t5_text(tokenizer=word_tokenizer), "vae": kl_autoencoder(), "scheduler": scheduler}


_STATISTICS = ("latents_mean", "latents_std")


def _both(**config: Any) -> dict[str, Any]:
    """Settings of an autoencoder's encoder, and the same of its decoder."""
    return config | {f"decoder_{name}": value for name, value in config.items()}


def _ltx_components() -> dict[str, Any]:
    """T5, an autoencoder of strides (4, 16, 16) with statistics of its channels, flow matching shifted by size."""
    halved = (True, True, False, False)
    stages = _both(block_out_channels=(8,) * 4, layers_per_block=(1,) * 5, spatio_temporal_scaling=halved)
    shift = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    return {
        **t5_text(channels=24, tokenizer=word_tokenizer),
        "vae": autoencoder("AutoencoderKLLTXVideo", _STATISTICS, latent_channels=8, **stages),
        "scheduler": flow(use_dynamic_shifting=True, **shift, shift_terminal=0.1),
    }


def _ltx2_components() -> dict[str, Any]:
    """Gemma with connectors for video and sound, autoencoders of both, of the video with strides (4, 16, 16)."""
    connector = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 4}
    connectors = {f"{kind}_connector_{name}": x for kind in ("video", "audio") for name, x in connector.items()}
    text = {"caption_channels": 8, "text_proj_in_factor": 2, "per_modality_projections": True}
    stages = _both(block_out_channels=(8, 8), layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, True))
    sampling = {"downsample_type": ("spatiotemporal",) * 2, "upsample_type": ("spatiotemporal",) * 2}
    sampling |= {"upsample_residual": (False,) * 2, "upsample_factor": (1, 1)}
    stages |= {"down_block_types": ("LTX2VideoDownBlock3D",) * 2, "decoder_inject_noise": (False,) * 3, **sampling}
    sound = {"latent_channels": 4, "mel_bins": 8, "base_channels": 8, "ch_mult": (1,), "num_res_blocks": 1}
    vocoder = {"in_channels": 16, "hidden_channels": 16, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    vocoder |= {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]}
    return {
        **gemma_text(),
        "connectors": seeded(LTX2TextConnectors, **text, **connectors, video_hidden_dim=32, audio_hidden_dim=32),
        "vae": autoencoder("AutoencoderKLLTX2Video", _STATISTICS, latent_channels=8, **stages),
        "audio_vae": autoencoder("AutoencoderKLLTX2Audio", **sound, resolution=32),
        "vocoder": seeded(LTX2Vocoder, **vocoder),
        "scheduler": flow(use_dynamic_shifting=True, shift_terminal=0.1),
    }


def _mochi_components() -> dict[str, Any]:
    """T5, an autoencoder of strides (6, 8, 8) with statistics of its channels, flow matching the other way round."""
    width = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    vae = autoencoder("AutoencoderKLMochi", **width, layers_per_block=(1,) * 5, add_attention_block=(False,) * 5)
    return {**t5_text(), "vae": vae, "scheduler": flow(invert_sigmas=True)}


def _lumina2_components() -> dict[str, Any]:
    """The autoencoder must halve three times, which the pipeline takes for granted."""
    vae = kl_autoencoder(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False)
    return {**gemma_text(), "vae": vae, "scheduler": flow(shift=6.0)}


def modular(transformer: Any, kind: type, blocks: Any, **parts: Any) -> Any:
    """A modular pipeline from an encoded prompt to latents, called as others are."""

    class OfLatents(kind):  # type: ignore[misc, valid-type]
        def __call__(self, **call: Any) -> Any:
            return SimpleNamespace(frames=super().__call__(output="latents", **call))

    pipe = OfLatents(blocks=blocks)
    pipe.update_components(transformer=transformer, **parts)
    return pipe


def minimax_h3(transformer: Any) -> Any:
    schedulers = {"scheduler": 12.0, "audio_scheduler": 3.0}
    parts = {name: diffusers.MiniMaxH3Scheduler(shift=shift) for name, shift in schedulers.items()}
    return modular(transformer, MiniMaxH3ModularPipeline, MiniMaxH3CoreDenoiseStep(), **parts)


def _flux3(transformer: Any) -> Any:
    return modular(transformer, Flux3ModularPipeline, Flux3CoreDenoiseStep(), scheduler=flow(shift=6.93))


def _pixart_components() -> dict[str, Any]:
    """DPM-Solver, whose few steps do not begin at noise alone: it would hide what a random model does later."""
    scheduler = DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="leading")
    return {**t5_text(tokenizer=word_tokenizer), "vae": kl_autoencoder(), "scheduler": scheduler}


def _longcat(transformer: Any) -> Any:
    pipe = diffusers.LongCatImagePipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=half_autoencoder(0.1, latent_channels=16),  # the pipeline takes them for granted
        text_encoder=_qwen_vl(),
        tokenizer=text_tokenizer(),
        text_processor=None,
        transformer=transformer,
    )
    pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix = "the", "on"
    pipe.tokenizer_max_length = TEXT_TOKENS
    return pipe


def _qwenimage(transformer: Any) -> Any:
    pipe = diffusers.QwenImagePipeline(
        scheduler=flow(use_dynamic_shifting=True, max_shift=0.9, shift_terminal=0.02),
        vae=qwen_autoencoder(),
        text_encoder=_qwen_vl(),
        tokenizer=text_tokenizer(),
        transformer=transformer,
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = TEXT_TEMPLATE, 1
    return pipe


def _sana_video_components(scheduler: Any = None) -> dict[str, Any]:
    usual = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return {**gemma_text(), "vae": wan_pipeline().vae, "scheduler": scheduler or usual}


def _z_image_components() -> dict[str, Any]:
    config = transformers.Qwen3Config(**language_model(layers=2), head_dim=8)
    text = {"text_encoder": seeded(transformers.Qwen3Model, config=config), "tokenizer": text_tokenizer()}
    return {**text, "vae": half_autoencoder(0.1), "scheduler": flow(shift=3.0)}


def _of_wan(kind: str, flow_shift: float = 5.0, image_channels: int | None = None) -> Callable[[Any], Any]:
    return pipeline(kind, lambda: wan_components(flow_shift, image_channels))


@dataclass(frozen=True)
class Case:
    """A tiny model with random weights, its inputs and its pipeline."""

    name: str
    make: Callable[[Any], Any]
    call: Mapping[str, Any]
    attentions: tuple[str, ...]
    """Names of the self-attentions over the grid, in order."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that differ from the package's tiny model."""
    grids: tuple[tuple[int, ...], tuple[int, ...]] = _IMAGE
    """Token grids of usual and of ragged inputs."""
    family: str = ""
    frames: int | None = None
    """Latent frames that are no axis of the grid."""
    change: Callable[[dict[str, Any], tuple[int, ...]], dict[str, Any]] = lambda arguments, grid: arguments
    """What differs from the arguments that the pipeline gives."""
    extra: tuple[int, int] = (0, 0)
    """Tokens before and after the grid's in the sequence that the attention works on, of the usual inputs."""
    samples: int = 2
    """Samples of a call of its pipeline that are recorded; 1 for pipelines that make no more."""
    checkpointed: int = 2
    """Samples of a batch under gradient checkpointing."""
    compiles_whole: bool = True
    """Whether the model's own forward compiles to one graph."""
    noise: float = 0.15
    """Noise of weights; where more of it would make attention a trifle, less."""

    @property
    def of_family(self) -> Family:
        return get_family(self.family or self.name)

    @property
    def model(self) -> Model:
        found = [model for model in self.of_family.models if model.is_tiny]
        return found[0] if found else MODELS[self.of_family.name]

    @property
    def grid(self) -> tuple[int, ...]:
        return self.grids[0]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block counts that divide the grid, and not the ragged one."""
        return (2, 2, 3) if len(self.grid) == 3 else (4, 2)

    @property
    def latents(self) -> tuple[int, ...]:
        """Latents (C, ...) of the usual grid, as files of a trained family have them."""
        model = _model_of(self.name)
        sizes = [count * length for count, length in zip(self.grid, self.of_family.patch_of(model), strict=True)]
        return self.of_family.inputs.channels(model.config), *sizes

    def transformer(self, **config: Any) -> Any:
        model = self.model
        small = small_case(model)
        settings = {**self.of_family.class_settings(model, small.height, small.frames), **self.settings, **config}
        return seeded(self.of_family.transformer_class(model.transformer), noise=self.noise, **settings)

    def short(self) -> Any:
        """The model with as few layers as it takes; HunyuanDiT's come in pairs."""
        model = self.model
        return self.transformer(**dict.fromkeys(model.more_layers, 1), **{model.layers_argument: 2 - model.layers % 2})

    def pipeline(self, **config: Any) -> Any:
        return quiet(self.make(self.transformer(**config)))

    def call_of(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of the pipeline's call for two prompts and a grid."""
        call: dict[str, Any] = {**self.call}
        for name, value in self.call.items():
            if isinstance(value, torch.Tensor) and self.samples == 2:
                call[name] = torch.cat([value, value.flip(1) if value.is_floating_point() else value])
        if call.get("prompt"):
            call["prompt"] = [call["prompt"], "a cat"][: self.samples]
        if call.get("negative_prompt"):
            call["negative_prompt"] = [call["negative_prompt"]] * self.samples
        for name, axis in (("height", -2), ("width", -1)):
            call[name] = call[name] // self.grid[axis] * grid[axis]
        for name in ("num_frames", "frames") if len(grid) == 3 and grid != self.grid else ():
            if name in call:
                call[name] = (call[name] - 1) // (self.grid[0] - 1) * (grid[0] - 1) + 1
        return call

    def inputs(self, batch: int = 2, ragged: bool = False, seed: int = 1, **settings: Any) -> dict[str, Any]:
        """Arguments of the first forward of the pipeline, called with these settings, for at most two samples."""
        given = copy.deepcopy(_first_forward(self.name, ragged, seed, **settings))
        samples = len(given[self.of_family.latents_name])
        found = {name: value if name.startswith("indices") else sample(value, samples, slice(batch))
                 for name, value in given.items()}  # fmt: skip
        return self.change(found, self.grids[ragged])


def sample(argument: Any, samples: int, chosen: slice) -> Any:
    """Some samples of an argument, if it has so many."""
    if isinstance(argument, dict):
        return {key: sample(value, samples, chosen) for key, value in argument.items()}
    is_batch = isinstance(argument, list) or (isinstance(argument, torch.Tensor) and argument.ndim)
    return argument[chosen] if is_batch and len(argument) == samples else argument


class _Reached(Exception):
    pass


@cache
def _first_forward(name: str, ragged: bool, seed: int, **settings: Any) -> dict[str, Any]:
    """Arguments by name of the first forward of a case's pipeline, without guidance where it has a scale."""
    case, calls = CASES[name], []
    pipe = case.pipeline()

    def stop(*call: Any) -> None:
        calls.append(named_arguments(*call))
        raise _Reached

    pipe.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    guidance = {"guidance_scale": 1.0} if "guidance_scale" in inspect.signature(pipe.__call__).parameters else {}
    call = {**case.call_of(case.grids[ragged]), **guidance, **settings}
    with suppress(_Reached), torch.no_grad():
        pipe(**call, generator=torch.Generator().manual_seed(seed))
    return {key: value for key, value in calls[0].items() if key != "return_dict"}


class _Built(Case):
    """A case whose model and inputs are those of ``tests/models.py``."""

    def transformer(self, **config: Any) -> Any:
        return FAMILIES[self.name].build(**config)

    def short(self) -> Any:
        return self.transformer(num_layers=1)

    def inputs(self, batch: int = 2, ragged: bool = False, seed: int = 1, **settings: Any) -> dict[str, Any]:
        return inputs(self.name, batch=batch, ragged=ragged, seed=seed)


def _built(name: str, attentions: tuple[str, ...], family: str = "") -> Case:
    of_pipeline, model = PIPELINES[family or name], FAMILIES[name]
    makers = {"wan": wan_pipeline, "sana": sana_pipeline, "dit": dit_pipeline}
    grids = model.grid, model.ragged_grid
    return _Built(name, makers[family or name], of_pipeline.call, attentions, grids=grids, family=family)


@cache
def _model_of(name: str) -> Any:
    return CASES[name].transformer()


def _layers(count: int, name: str = "transformer_blocks.{}.attn1") -> tuple[str, ...]:
    return tuple(name.format(layer) for layer in range(count))


def _forcing(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """A time for every frame, later blocks of two frames noisier."""
    later = torch.arange(grid[0]) // 2 * 100
    return {
        **arguments,
        "timestep": torch.tensor([[500], [250]])[: len(arguments["hidden_states"])] + later,
        "enable_diffusion_forcing": True,
    }


def _bool_mask(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """As a mask, not added to the scores."""
    return {**arguments, "attention_mask": arguments["attention_mask"].bool()}


def _long_text(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """The second text is so long that the batch is padded, and masked."""
    first, *others = arguments["cap_feats"]
    return {**arguments, "cap_feats": [first, drawer(1, 9)(40, 16)[0], *others[1:]]}


def _image_call(side: int, guidance: float | None, **different: Any) -> dict[str, Any]:
    """Arguments of the call of a pipeline of images with classifier-free guidance; None leaves one out."""
    usual = {"prompt": "a red ball", "negative_prompt": "dog", "guidance_scale": guidance}
    usual["max_sequence_length"] = TEXT_TOKENS
    size = {"height": side, "width": side, "num_inference_steps": 2, "output_type": "pt"}
    return {name: value for name, value in {**usual, **size, **different}.items() if value is not None}


_CLIP = {"num_frames": 13, "height": 64, "width": 96, "num_inference_steps": 2, "output_type": "pt"}
_TOLD = {**_CLIP, "prompt": "a red ball moves", "max_sequence_length": TEXT_TOKENS}
_GUIDED = {**_TOLD, "negative_prompt": "dog"}
_PICTURE = {"image": Image.new("RGB", (96, 64), "red")}
_ROWS = {"settings": {"rope_max_seq_len": 32}, "grids": _VIDEO}
_SHOWN = {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24, "rope_max_seq_len": 32}
_OF_WAN_SHOWN: dict[str, Any] = {"settings": _SHOWN, "grids": _VIDEO}
_JOINT, _WAN_LAYERS = _layers(3, "transformer_blocks.{}.attn"), _layers(3, "blocks.{}.attn1")
_TWO_STREAMS = (*_JOINT[:2], *_layers(2, "single_transformer_blocks.{}.attn"))
_TEXT_FIRST, _CLIP_AND_T5 = (TEXT_TOKENS, 0), (0, 2 * TEXT_TOKENS)
_SINGLE = {"num_single_layers": 2}
_SD3 = {"attention_head_dim": 16, "caption_projection_dim": 32, "pooled_projection_dim": 24, "sample_size": 16}
_SD3 |= {"pos_embed_max_size": 16}
_DUAL = {"num_layers": 2, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
_COG = {"sample_width": 12, "sample_height": 8, "sample_frames": 13, "max_text_seq_length": TEXT_TOKENS}
_COG_1_5 = {**_COG, "sample_width": 300, "sample_height": 300, "patch_size_t": 2, "patch_bias": False}
# guidance that skips an attention runs in a block that the tiny model has
_LTX2_CALL = {**_CLIP, "prompt": "a cat surfing", "max_sequence_length": 8, "spatio_temporal_guidance_blocks": [1]}
_LTX2_FIRST = {
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), False),
    **{"perturbed_attn": False, "use_prompt_embeddings": True, "rope_type": "interleaved"},
}
SOUND_CALL: dict[str, Any] = {
    "prompt_embeds": drawer(1, seed=5)(TEXT_TOKENS, 16),
    "text_token_tags": torch.ones(TEXT_TOKENS, dtype=torch.int64),
    **{"num_frames": 124, "height": 64, "width": 96, "num_inference_steps": 3},  # the last is where the steps end
}
_FLUX3_CALL = {**embeddings(TEXT_TOKENS, 16), "height": 128, "width": 128, "num_inference_steps": 2}
_FLUX3_LAYERS = (*_layers(2, "mode_blocks.image.{}.attn"), *_layers(2, "single_transformer_blocks.{}.attn"))
_PLAIN_CALL = {"negative_prompt": None, "use_resolution_binning": False}
_CLEAN = {**_PLAIN_CALL, "prompt": "the red dog", "clean_caption": False}
_Z_IMAGE = {"in_channels": 4, "cap_feat_dim": 16, "axes_lens": [1024, 32, 32]}
_SANA_VIDEO = {"attention_head_dim": 24, "cross_attention_dim": 48}  # no query is negative in all channels
_SANA_CALL = {"prompt": "a cat surfing", "frames": 13, "height": 64, "width": 96, "num_inference_steps": 2}
_SANA_CALL |= {"max_sequence_length": 8, "complex_human_instruction": None, "use_resolution_binning": False}
_SANA_CALL["output_type"] = "pt"
_FORCING_CALL = {**_CLIP, **embeddings(TEXT_TOKENS), "prompt": None, "ar_step": 1, "causal_block_size": 2}
_EDIT = {**embeddings(IMAGE_TEXT_TOKENS), **_PICTURE, **_CLIP}
_EDIT_TWO = {name: value for name, value in _EDIT.items() if name != "num_frames"}
_REASONING = {**_EDIT, "enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}
_FACES = {
    "pose_video": [Image.new("RGB", (96, 64), (20 * frame, 0, 90)) for frame in range(9)],
    "face_video": [Image.new("RGB", (16, 16), (0, 20 * frame, 90)) for frame in range(9)],
    **{"segment_frame_length": 9, "guidance_scale": 2.0},
}
_ANIMATED = {**_SHOWN, "latent_channels": 16, "num_layers": 4, "inject_face_latents_blocks": 2}
# what stands in quotation marks is encoded a second time
_QUOTED = {**_CLIP, "num_frames": 7, "height": 16, "width": 24, "negative_prompt": "ball"}
_QUOTED["prompt"] = 'a dog on "the red wave"'
_AURA_LAYERS = (*_layers(2, "joint_transformer_blocks.{}.attn"), *_layers(2, "single_transformer_blocks.{}.attn"))
_edit = _of_wan("ChronoEditPipeline", 5.0, 8)
_cogvideox, _ltx2 = pipeline("CogVideoXPipeline", _cogvideox_components), pipeline("LTX2Pipeline", _ltx2_components)
_allegro = pipeline("AllegroPipeline", _allegro_components)
_anyflow = pipeline(
    "AnyFlowPipeline", lambda: {**wan_components(), "scheduler": diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)}
)
_sd3, _z_image = pipeline("StableDiffusion3Pipeline", _sd3_components), pipeline("ZImagePipeline", _z_image_components)
_cogview4 = pipeline("CogView4Pipeline", _cogview4_components)
_easyanimate = pipeline("EasyAnimatePipeline", _easyanimate_components)
_hunyuan_dit = pipeline("HunyuanDiTPipeline", _hunyuan_dit_components)
_framepack = pipeline("HunyuanVideoFramepackPipeline", _framepack_components)
_helios = pipeline("HeliosPipeline", lambda: {**wan_components(), "scheduler": diffusers.HeliosScheduler(stages=1)})
_hunyuan_video = pipeline("HunyuanVideoPipeline", _hunyuan_video_components)
_kandinsky5 = pipeline("Kandinsky5T2VPipeline", _kandinsky5_components)
_kandinsky6 = pipeline("Kandinsky6TI2VAPipeline", _kandinsky5_components)
_latte, _lumina2 = pipeline("LattePipeline", _latte_components), pipeline("Lumina2Pipeline", _lumina2_components)
_ltx, _mochi = pipeline("LTXPipeline", _ltx_components), pipeline("MochiPipeline", _mochi_components)
_pixart, _sigma = (pipeline(f"PixArt{kind}Pipeline", _pixart_components) for kind in ("Alpha", "Sigma"))
_sana_video = pipeline("SanaVideoPipeline", _sana_video_components)
_sana_image = pipeline("SanaImageToVideoPipeline", lambda: _sana_video_components(flow(shift=8.0)))
_skyreels, _forced = (_of_wan(f"SkyReelsV2{kind}Pipeline", 8.0) for kind in ("", "DiffusionForcing"))
_skyreels_image, _animate = (_of_wan(f"{kind}Pipeline", 5.0, 8) for kind in ("SkyReelsV2ImageToVideo", "WanAnimate"))
_AURA, _FLUX_SETTINGS = {"num_single_dit_layers": 2, "sample_size": 16}, {**_SINGLE, "guidance_embeds": True}
_COG_CALL, _COGVIEW_CALL = {**_GUIDED, "guidance_scale": 6.0}, _image_call(128, 5.0, max_sequence_length=16)
_ALLEGRO_CALL = {**_GUIDED, "clean_caption": False, "output_type": "latent"}
# the velocity, as training has it, in place of its mean over a step
_ANYFLOW_CALL = {**_GUIDED, "guidance_scale": 5.0, "use_mean_velocity": False}
_COG_LONG = {**_COG_CALL, "num_frames": 29}
_EASY_TEXT = {**embeddings(TEXT_TOKENS, 16), "prompt_attention_mask": torch.ones(1, TEXT_TOKENS)}
_EASY_TEXT["negative_prompt_attention_mask"] = _EASY_TEXT["prompt_attention_mask"]
_EASY_CALL = {**_CLIP, **_EASY_TEXT, "guidance_scale": 5.0}
_ONLY_PROMPT = {**_PLAIN_CALL, "prompt": "the red dog", "max_sequence_length": None}
_IDEOGRAM_CALL = {**_image_call(32, 4.0, negative_prompt=None), "guidance_schedule": None}
_KANDINSKY_TEXT = {
    "prompt_embeds_qwen": drawer(1, seed=5)(TEXT_TOKENS, 16),
    "prompt_embeds_clip": drawer(1, seed=6)(12),
    "prompt_cu_seqlens": torch.tensor([0, TEXT_TOKENS]),
}
_KANDINSKY_LAYERS = _layers(3, "visual_transformer_blocks.{}.self_attention")
_KANDINSKY_CALL = {
    **{f"{kind}{name}": x for kind in ("", "negative_") for name, x in _KANDINSKY_TEXT.items()},
    **{**_CLIP, "guidance_scale": 5.0},
}
_KANDINSKY6_CALL = {
    **{f"{kind}prompt_embeds": x for kind, x in zip(("", "negative_"), drawer(2, 5)(1, TEXT_TOKENS, 16), strict=True)},
    **{f"{kind}prompt_embeds": x for kind, x in zip(("pooled_", "negative_pooled_"), drawer(2, 6)(1, 12), strict=True)},
    **{**_CLIP, "guidance_scale": 5.0, "sample_audio": False},
}
_KANDINSKY6_LAYERS = _layers(3, "visual_transformer_blocks.{}.video_dec_block.self_attention")
_TEMPLATED = {**_TOLD, "guidance_scale": 6.0, "prompt_template": {"template": TEXT_TEMPLATE, "crop_start": 1}}
_WINDOW = {**_TEMPLATED, **_PICTURE, "num_frames": 9, "latent_window_size": 3, "sampling_type": "vanilla"}
# two frames, two at half and 16 at a quarter scale; after the window a picture and text
_HISTORY = (48 + 6 + 8, 4 + 5)
_HELIOS_CALL = {**_CLIP, **embeddings(TEXT_TOKENS), "num_latent_frames_per_chunk": 4}
_WEIGHED = {"is_amplify_history": True}
_LATTE_CALL = _image_call(128, 7.5, negative_prompt=None, max_sequence_length=None, clean_caption=False, video_length=3)
_LUMINA_CALL = _image_call(128, 4.0, prompt="the red dog", system_prompt="the", max_sequence_length=8)
_LUMINA_LAYERS = ("noise_refiner.0.attn", *_layers(3, "layers.{}.attn"))
_MOCHI_CALL = {**_GUIDED, "num_frames": 19, "guidance_scale": 4.5}
_SIGMA = {"sample_size": 64, "use_additional_conditions": False}
_DUAL_LAYERS = ("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn")
_SKYREELS_CALL = {**_CLIP, **embeddings(TEXT_TOKENS)}
_SKYREELS_IMAGE_CALL = {**_CLIP, **embeddings(IMAGE_TEXT_TOKENS), **_PICTURE}
_FORCED = {"rope_max_seq_len": 32, "num_frame_per_block": 2}
_TWO_FRAMES = {**_OF_WAN_SHOWN, "grids": ((2, 4, 6), (2, 5, 4))}
# its forward branches on whether all image embeddings are 0
_HUNYUAN_1_5 = {"compiles_whole": False, "extra": (0, 7 + TEXT_TOKENS)}
_QUOTED_IMAGE = {**_image_call(16, None, max_sequence_length=None), "prompt": _QUOTED["prompt"]}
_HUNYUAN_IMAGE = {"compiles_whole": False, "extra": (0, 4 + TEXT_TOKENS)}
_CHROMA = {"extra": _TEXT_FIRST, "checkpointed": 1, "change": _bool_mask}
_DIT = {"mlp_ratio": 2.0, "sample_size": 16}
_LATTE = {"sample_size": 16, "video_length": 3}
_LONGCAT_CALL = _image_call(32, 4.5, max_sequence_length=None, enable_prompt_rewrite=False)
_TEXT_LAST, _Z_LAYERS = (0, TEXT_TOKENS), _layers(3, "layers.{}.attention")
_LTX_CALL = {**_CLIP, "prompt": "a cat surfing", "max_sequence_length": 8}
_ALONE: dict[str, Any] = {"negative_prompt": None}
_FOUR_BLOCKS, _QWEN_CALL = _layers(4, "blocks.{}.attn1"), _image_call(32, None, true_cfg_scale=4.0)
_SANA_SHOWN, _OF_SANA = {**_SANA_CALL, **_PICTURE}, {"grids": _WHOLE, "family": "sana_video"}
_OF_SKYREELS = {"grids": ((4, 4, 6), (2, 5, 4)), "family": "skyreels_v2"}
_UNEVEN = {"family": "z_image", "extra": (0, 64)}

_TABLE = (
    # latents, since its autoencoder decodes whole tiles alone
    Case("allegro", _allegro, _ALLEGRO_CALL, _layers(3), grids=_VIDEO),
    Case("anyflow", _anyflow, _ANYFLOW_CALL, _WAN_LAYERS, **_ROWS),
    Case("auraflow", _auraflow, _image_call(128, 3.5), _AURA_LAYERS, _AURA, extra=(8 + TEXT_TOKENS, 0)),
    # four latent frames in the first step and two in the second; and two in every step
    Case("chronoedit", _edit, _REASONING, _WAN_LAYERS, **_OF_WAN_SHOWN),
    Case("chronoedit_edit", _edit, _EDIT_TWO, _WAN_LAYERS, family="chronoedit", **_TWO_FRAMES),
    # diffusers drops the mask of texts of other lengths under gradient checkpointing
    Case("chroma", _chroma, _image_call(32, 4.0), _TWO_STREAMS, _SINGLE, **_CHROMA),
    Case("cogvideox", _cogvideox, _COG_CALL, _layers(3), _COG, _VIDEO, extra=_TEXT_FIRST),
    Case("cogvideox_two_frames", _cogvideox, _COG_LONG, _layers(3), _COG_1_5, _VIDEO, "cogvideox", extra=_TEXT_FIRST),
    Case("cogview4", _cogview4, _COGVIEW_CALL, _layers(3), extra=(16, 0)),
    Case("easyanimate", _easyanimate, _EASY_CALL, _layers(3), grids=_VIDEO, extra=_TEXT_FIRST),
    Case("flux", _flux, _image_call(32, 3.5, **_ALONE), _TWO_STREAMS, _FLUX_SETTINGS, extra=_TEXT_FIRST),
    Case("flux2", flux2_pipeline, _image_call(32, 4.0, **_ALONE), _TWO_STREAMS, _SINGLE, extra=_TEXT_FIRST),
    Case("flux3", _flux3, _FLUX3_CALL, _FLUX3_LAYERS, _SINGLE, extra=_TEXT_FIRST),
    Case("framepack", _framepack, _WINDOW, _TWO_STREAMS, _SINGLE, ((3, 4, 6), (3, 5, 4)), extra=_HISTORY, samples=1),
    Case("helios", _helios, _HELIOS_CALL, _WAN_LAYERS, grids=_CHUNK, extra=(_HISTORY[0], 0)),
    # keys of earlier frames weigh more
    Case("helios_weighed", _helios, _HELIOS_CALL, _WAN_LAYERS, _WEIGHED, _CHUNK, "helios", extra=(_HISTORY[0], 0)),
    Case("hunyuan_dit", _hunyuan_dit, _image_call(128, 5.0, **_ONLY_PROMPT), _FOUR_BLOCKS, _DIT, noise=0.1),
    Case("hunyuan_image", _hunyuan_image, _QUOTED_IMAGE, _TWO_STREAMS, _SINGLE, **_HUNYUAN_IMAGE),
    Case("hunyuan_video", _hunyuan_video, _TEMPLATED, _TWO_STREAMS, _SINGLE, _VIDEO, extra=_TEXT_LAST),
    Case("hunyuan_video15", _hunyuan_video15, _QUOTED, _JOINT, {"target_size": 16}, _VIDEO, **_HUNYUAN_1_5),
    Case("ideogram4", _ideogram4, _IDEOGRAM_CALL, _layers(3, "layers.{}.attention"), extra=_TEXT_FIRST),
    Case("kandinsky5", _kandinsky5, _KANDINSKY_CALL, _KANDINSKY_LAYERS, grids=_VIDEO),
    Case("kandinsky6", _kandinsky6, _KANDINSKY6_CALL, _KANDINSKY6_LAYERS, grids=_VIDEO),
    Case("krea2", _krea2, _image_call(32, 3.5), _JOINT, extra=_TEXT_FIRST),
    Case("latte", _latte, _LATTE_CALL, _layers(3), _LATTE, frames=3),
    Case("longcat_image", _longcat, _LONGCAT_CALL, _TWO_STREAMS, _SINGLE, extra=_TEXT_FIRST),
    Case("ltx", _ltx, _LTX_CALL, _layers(3), grids=_WHOLE),
    Case("ltx2", _ltx2, _LTX2_CALL, _layers(3), grids=_WHOLE),
    # as LTX-2.0: no gates, text that the transformer itself projects; and the other RoPE
    Case("ltx2_first", _ltx2, _LTX2_CALL, _layers(3), _LTX2_FIRST, _WHOLE, "ltx2"),
    Case("mochi", _mochi, _MOCHI_CALL, _layers(3), grids=_VIDEO, extra=(0, 4)),
    # its forward reads the lengths of texts
    Case("lumina2", _lumina2, _LUMINA_CALL, _LUMINA_LAYERS, compiles_whole=False, extra=(8, 0)),
    # text, and as many rows of sound
    Case("minimax_h3", minimax_h3, SOUND_CALL, _JOINT, grids=((37, 2, 3), (37, 4, 2)), extra=(420, 0), samples=1),
    Case("pixart", _pixart, _image_call(128, 1.5, **_CLEAN), _layers(3), {"sample_size": 128}),
    Case("pixart_sigma", _sigma, _image_call(128, 1.5, **_CLEAN), _layers(3), _SIGMA, family="pixart"),
    Case("qwenimage", _qwenimage, _QWEN_CALL, _JOINT, {"joint_attention_dim": 16}, extra=(4, 0)),
    Case("sana_video", _sana_video, _SANA_CALL, _layers(3), _SANA_VIDEO, _WHOLE),
    Case("sana_video_image", _sana_image, _SANA_SHOWN, _layers(3), _SANA_VIDEO, **_OF_SANA),
    Case("sd3", _sd3, _image_call(32, 5.0), _JOINT, _SD3, extra=_CLIP_AND_T5),
    # as SD 3.5: query and key normed, and in the first layer a second attention over the image alone
    Case("sd3_dual", _sd3, _image_call(32, 5.0), _DUAL_LAYERS, {**_SD3, **_DUAL}, family="sd3", extra=_CLIP_AND_T5),
    Case("skyreels_v2", _skyreels, _SKYREELS_CALL, _WAN_LAYERS, **_ROWS),
    # two latent frames in a block, each block sees itself and the ones before it
    Case("skyreels_v2_forcing", _forced, _FORCING_CALL, _WAN_LAYERS, _FORCED, change=_forcing, **_OF_SKYREELS),
    Case(
        "skyreels_v2_image", _skyreels_image, _SKYREELS_IMAGE_CALL, _WAN_LAYERS, family="skyreels_v2", **_OF_WAN_SHOWN
    ),
    Case("wan_animate", _animate, {**_EDIT_TWO, **_FACES}, _FOUR_BLOCKS, _ANIMATED, _CHUNK),
    _built("dit", _layers(4)),
    _built("sana", _layers(3)),
    _built("sana_qk_norm", _layers(3), "sana"),
    _built("wan", _FOUR_BLOCKS),
    _built("wan_i2v", _WAN_LAYERS, "wan"),
    _built("wan_ti2v", _WAN_LAYERS, "wan"),
    _built("wan_vace", (*_WAN_LAYERS, "vace_blocks.0.attn1", "vace_blocks.1.attn1"), "wan"),
    Case("z_image", _z_image, _image_call(32, 4.0), _Z_LAYERS, _Z_IMAGE, extra=(0, 32)),
    Case("z_image_uneven", _z_image, _image_call(32, 4.0), _Z_LAYERS, _Z_IMAGE, change=_long_text, **_UNEVEN),
)
CASES = {case.name: case for case in _TABLE}
NAMES = tuple(case.name for case in CASES.values() if not case.family)
"""Names of a case of each family."""


def case_of(name: str) -> Any:
    return CASES[name]


@torch.no_grad()
def output(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What a transformer predicts, without gradients; of Z-Image's list a batch. Kandinsky's is in no tuple."""
    found = model(**arguments, return_dict=False)
    found = found if isinstance(found, torch.Tensor) else found[0]
    found = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
    # nothing reads what Ideogram 4 makes of padding
    return found * (arguments["indicator"] != 0)[..., None] if "indicator" in arguments else found


def giving(**others: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What changes a forward's arguments."""
    return lambda given: {**given, **others}


def all_listed(name: str) -> dict[str, Any]:
    """Settings with which a patch computes the attention that it replaces: all pairs listed; one block where linear."""
    case = case_of(name)
    if case.of_family.computes == "linear":
        # what MHLA adds to every feature as small as what SANA adds to its normaliser
        return {"blocks": (1,) * len(case.grid), "eps": 1e-15}
    return ALL_LISTED


SPARSE = {"density": 0.2, "block_size": 4, "dense_layers": 0}
"""Settings of sparse attention for the small grids of cases."""
ALL_LISTED = {"density": 1.0, "dense_layers": 0}
"""Settings with which sparse attention is softmax attention, in every layer."""


def handle(model: Any) -> Any:
    return mhla.patching.find_patched(model)["transformer"]


def tally(model: Any) -> tuple[int, dict[str, int]]:
    """Sparse attentions of the latest call of a patched transformer, and dense ones by reason; read once."""
    words = str(handle(model).tally)
    dense = re.findall(r", ([\d,]+) dense: (.*?)(?=, [\d,]+ dense: |$)", words)
    return int(re.findall(r"[\d,]+", words)[0].replace(",", "")), {reason: int(count) for count, reason in dense}


class _Weights(dict[str, torch.Tensor]):
    """Tensors by name, which are equal bit for bit."""

    def __eq__(self, other: Any) -> bool:
        return list(self) == list(other) and all(torch.equal(x, other[name]) for name, x in self.items())


def footprint(model: Any) -> dict[str, Any]:
    """All that a patch could leave behind in a transformer; processors and hooks compare by identity."""
    modules = dict(model.named_modules())
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return {
        "class": type(model),
        "state": _Weights((key, value.clone()) for key, value in model.state_dict().items()),
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "attributes": {name: (type(module), sorted(vars(module))) for name, module in modules.items()},
        "processors": attn_processors(model),
        "choices": {
            name: {key: value for key, value in vars(one.processor).items() if value is not None}
            for name, one in modules.items()
            if hasattr(one, "processor")
        },
        "hooks": {(name, kind): list(getattr(one, kind).values()) for name, one in modules.items() for kind in hooks},
    }


def plain(name: str, **settings: Any) -> dict[str, Any]:
    return {"blocks": case_of(name).blocks, **settings}
