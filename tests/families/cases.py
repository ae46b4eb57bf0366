"""Tiny models of every family as a table: what differs from the package's own tiny models, inputs and pipelines."""

import copy
import inspect
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

from ..models import FAMILIES, attn_processors, inputs, seeded, small_size
from ..pipelines import PIPELINES, dit_pipeline, quiet, sana_pipeline, wan_pipeline, word_tokenizer
from .tiny_models import MODELS

TEXT_TOKENS = 6
"""Tokens of texts in inputs, which are cut to it unless a model takes whole ones alone."""
IMAGE_TEXT_TOKENS = 512
"""Wan's image-to-video cross-attention takes the last 512 tokens of its context as the text."""
TEXT_TEMPLATE = "the {} on"
"""In place of a prompt for language models, one token before the text and one after it."""
_OF_PICTURES = "message.content[0].text"
"""What a chat template reads of processors that take pictures as well."""
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


def text_tokenizer(content: str = "message.content") -> Any:
    """A tokenizer whose longest text has ``TEXT_TOKENS`` tokens, which pipelines with CLIP ask it for."""
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = TEXT_TOKENS
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("message.content", content)
    return tokenizer


def text(encoder: Any, suffix: str = "", tokenizer: Any = None) -> dict[str, Any]:
    """A text encoder and its tokenizer as components of a pipeline, whose names may end in a suffix."""
    return {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": tokenizer or text_tokenizer()}


def t5(channels: int = 32) -> Any:
    """One layer; its tokens are those of ``word_tokenizer``."""
    config = transformers.T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return seeded(transformers.T5EncoderModel, config=config)


def clip(cls: type = transformers.CLIPTextModel, seed: int = 0) -> Any:
    """CLIP of 12 channels, whose pooled text is read at the first padding token."""
    sizes = {"hidden_size": 12, "intermediate_size": 16, "projection_dim": 12, "num_hidden_layers": 2}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": 80}
    return seeded(cls, seed=seed, config=transformers.CLIPTextConfig(num_attention_heads=2, **sizes, **tokens))


def language_settings(layers: int, **more: Any) -> dict[str, Any]:
    """Settings that configurations of Llama and Qwen share: 16 channels, and a vocabulary of 16 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "max_position_embeddings": 64}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {**sizes, **tokens, "num_attention_heads": 2, "num_key_value_heads": 2, **more}


def language_model(cls: Any, layers: int, **more: Any) -> Any:
    return seeded(cls, config=cls.config_class(**language_settings(layers, **more)))


def vision_language_model(cls: Any, language: dict[str, Any], **more: Any) -> Any:
    """A model of 16 channels, which reads no pictures here."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, **more}
    return seeded(cls, config=cls.config_class(text_config=language, vision_config=vision))


_SECTIONS = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}


def _qwen_vl(layers: int = 2) -> Any:
    cls = transformers.Qwen2_5_VLForConditionalGeneration
    return vision_language_model(cls, language_settings(layers, **_SECTIONS))


def _qwen3_vl(layers: int) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    language = language_settings(layers, head_dim=8, rope_parameters=rope)
    return vision_language_model(transformers.Qwen3VLModel, language, deepstack_visual_indexes=[0])


def vision_model(cls: Any, channels: int, layers: int) -> Any:
    """A model of pictures of 8x8 px in four patches."""
    sizes = {"hidden_size": channels, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    return seeded(cls, config=cls.config_class(**sizes, image_size=8, patch_size=4))


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


def half_autoencoder(shift: float = 0.1, stages: int = 2, width: int = 8, **config: Any) -> Any:
    """Latents of half the height and width, unless there are more stages."""
    plain = {"use_quant_conv": False, "use_post_quant_conv": False}
    return kl_autoencoder(stages, width, shift_factor=shift, **plain, **config)


def qwen_autoencoder() -> Any:
    scale = {"latents_mean": [0.1, -0.1, 0.2, 0.0], "latents_std": [1.1, 0.9, 1.2, 1.0]}
    stages = {"dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    return autoencoder("AutoencoderKLQwenImage", base_dim=3, z_dim=4, **stages, **scale)


def _flux2_autoencoder() -> Any:
    """With statistics of a token's channels."""
    return kl_autoencoder(2, 8, "AutoencoderKLFlux2", statistics=("bn.running_mean", "bn.running_var"))


def _of_stages(cls: str, **config: Any) -> Any:
    """Four stages of four channels."""
    stages = {"block_out_channels": (4,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    return autoencoder(cls, **stages, **config)


def _both(**config: Any) -> dict[str, Any]:
    """Settings of an autoencoder's encoder, and the same of its decoder."""
    return config | {f"decoder_{name}": value for name, value in config.items()}


def flow(shift: float = 1.0, **config: Any) -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=shift, **config)


def flow_by_size(**config: Any) -> Any:
    """Flow matching that is shifted by the size of the picture."""
    return flow(use_dynamic_shifting=True, **config)


def _ddim() -> Any:
    """Steps that are clipped, lest a random model's latents hide the last one."""
    return diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")


def text_of(pipe: Any) -> dict[str, Any]:
    return text(pipe.text_encoder, tokenizer=pipe.tokenizer)


def t5_of_words(channels: int = 32, suffix: str = "") -> dict[str, Any]:
    """T5 with a tokenizer that has no longest text."""
    return text(t5(channels), suffix, word_tokenizer())


def parts(vae: Any, scheduler: Any, *texts: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Components of a pipeline beside its transformer, by name."""
    return {**{name: x for one in texts for name, x in one.items()}, "vae": vae, "scheduler": scheduler, **others}


def wan_components(flow_shift: float = 5.0, image_channels: int | None = None, **others: Any) -> dict[str, Any]:
    """UMT5 with 32 channels, Wan's autoencoder with 16, UniPC on flow matching, and a vision encoder if asked for."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    found, side = parts(wan_pipeline().vae, scheduler, text_of(wan_pipeline())) | others, {"height": 8, "width": 8}
    if image_channels is not None:
        found["image_encoder"] = vision_model(transformers.CLIPVisionModel, image_channels, 2)
        found["image_processor"] = transformers.CLIPImageProcessor(size=side, crop_size=side)
    return found


def flux2_components(content: str = "message.content") -> dict[str, Any]:
    """A language model, three of whose layers are the text."""
    qwen3 = language_model(transformers.Qwen3ForCausalLM, layers=30, head_dim=8)
    return parts(_flux2_autoencoder(), flow_by_size(shift=3.0), text(qwen3, tokenizer=text_tokenizer(content)))


def _cogview4_components() -> dict[str, Any]:
    """GLM, whose last layer but one is read; text begins with a token of its own and is padded on the left."""
    glm, tokenizer = language_model(transformers.GlmModel, layers=2, head_dim=8), text_tokenizer()
    begins = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor, tokenizer.padding_side = begins, "left"
    scheduler = flow_by_size(base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    return parts(kl_autoencoder(), scheduler, text(glm, tokenizer=tokenizer))


def _hunyuan_dit_components() -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    betas = {"beta_start": 0.00085, "beta_end": 0.03, "beta_schedule": "scaled_linear"}
    bert = seeded(transformers.BertModel, config=transformers.BertConfig(vocab_size=16, **sizes))
    steps = diffusers.DDPMScheduler(**betas, clip_sample=False, prediction_type="v_prediction", steps_offset=1)
    without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    texts = text(bert, tokenizer=word_tokenizer()), t5_of_words(suffix="_2")
    return parts(kl_autoencoder(), steps, *texts, **without)


def _hunyuan_video_components(**others: Any) -> dict[str, Any]:
    """Llama for the tokens of the text, CLIP for the pooled text."""
    vae = _of_stages("AutoencoderKLHunyuanVideo", mid_block_add_attention=False)
    llama = language_model(transformers.LlamaModel, layers=3)
    return parts(vae, flow(7.0), text(llama), text(clip(), "_2")) | others


def _kandinsky_components() -> dict[str, Any]:
    """HunyuanVideo's autoencoder; a prompt that is encoded needs no text encoder."""
    names = "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"
    return _hunyuan_video_components(**dict.fromkeys(names), scheduler=flow(5.0))


def _hunyuan_components(encoder: Any, guidance: float, vae: str, **config: Any) -> dict[str, Any]:
    """T5 for what is quoted in the text; the guidance is a component."""
    matched = {"downsample_match_channel": False, "upsample_match_channel": False}
    made = autoencoder(vae, latent_channels=4, layers_per_block=1, **matched, **config)
    guider = diffusers.guiders.ClassifierFreeGuidance(guidance_scale=guidance)
    return parts(made, flow(5.0), text(encoder), text(t5(), "_2"), guider=guider)


_STATISTICS = ("latents_mean", "latents_std")


def _ltx_components() -> dict[str, Any]:
    """T5, an autoencoder of strides (4, 16, 16) with statistics of its channels, flow matching shifted by size."""
    halved = (True, True, False, False)
    stages = _both(block_out_channels=(8,) * 4, layers_per_block=(1,) * 5, spatio_temporal_scaling=halved)
    shift = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    vae = autoencoder("AutoencoderKLLTXVideo", _STATISTICS, latent_channels=8, **stages)
    return parts(vae, flow_by_size(**shift, shift_terminal=0.1), t5_of_words(24))


def _ltx2_components() -> dict[str, Any]:
    """Gemma with connectors for video and sound, autoencoders of both, of the video with strides (4, 16, 16)."""
    connector = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 4}
    connectors = {f"{kind}_connector_{name}": x for kind in ("video", "audio") for name, x in connector.items()}
    captions = {"caption_channels": 8, "text_proj_in_factor": 2, "per_modality_projections": True}
    stages = _both(block_out_channels=(8, 8), layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, True))
    sampling = {"downsample_type": ("spatiotemporal",) * 2, "upsample_type": ("spatiotemporal",) * 2}
    sampling |= {"upsample_residual": (False,) * 2, "upsample_factor": (1, 1)}
    stages |= {"down_block_types": ("LTX2VideoDownBlock3D",) * 2, "decoder_inject_noise": (False,) * 3, **sampling}
    sound = {"latent_channels": 4, "mel_bins": 8, "base_channels": 8, "ch_mult": (1,), "num_res_blocks": 1}
    vocoder = {"in_channels": 16, "hidden_channels": 16, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    vocoder |= {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]}
    return parts(
        autoencoder("AutoencoderKLLTX2Video", _STATISTICS, latent_channels=8, **stages),
        flow_by_size(shift_terminal=0.1),
        text_of(sana_pipeline()),
        connectors=seeded(LTX2TextConnectors, **captions, **connectors, video_hidden_dim=32, audio_hidden_dim=32),
        audio_vae=autoencoder("AutoencoderKLLTX2Audio", **sound, resolution=32),
        vocoder=seeded(LTX2Vocoder, **vocoder),
    )


def _pixart_components() -> dict[str, Any]:
    """DPM-Solver, whose few steps do not begin at noise alone: it would hide what a random model does later."""
    scheduler = DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="leading")
    return parts(kl_autoencoder(), scheduler, t5_of_words())


def _sana_video_components(scheduler: Any = None) -> dict[str, Any]:
    usual = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return parts(wan_pipeline().vae, scheduler or usual, text_of(sana_pipeline()))


def modular(kind: type, blocks: Any, **schedulers: Callable[[], Any]) -> Callable[[Any], Any]:
    """What makes a modular pipeline from an encoded prompt to latents, called as others are."""

    class OfLatents(kind):  # type: ignore[misc, valid-type]
        def __call__(self, **call: Any) -> Any:
            return SimpleNamespace(frames=super().__call__(output="latents", **call))

    def make(transformer: Any) -> Any:
        pipe = OfLatents(blocks=blocks())
        pipe.update_components(transformer=transformer, **{name: made() for name, made in schedulers.items()})
        return pipe

    return make


def pipeline(kind: str, components: Callable[[], Mapping[str, Any]], **attributes: Any) -> Callable[[Any], Any]:
    """What makes a pipeline of a transformer and components, with attributes that no argument gives."""

    def make(transformer: Any) -> Any:
        pipe = getattr(diffusers, kind)(transformer=transformer, **components())
        for name, value in attributes.items():
            setattr(pipe, name, value)
        return pipe

    return make


def _ideogram4(transformer: Any) -> Any:
    """Qwen3-VL, 13 of whose 36 layers are the text, Flux.2's autoencoder, and a second transformer without text."""
    own = text(_qwen3_vl(layers=36), tokenizer=text_tokenizer(_OF_PICTURES))
    own["unconditional_transformer"] = copy.deepcopy(transformer)
    return pipeline("Ideogram4Pipeline", lambda: parts(_flux2_autoencoder(), flow(), own))(transformer)


def _of_wan(kind: str, flow_shift: float, image_channels: int | None = None) -> Callable[[Any], Any]:
    return pipeline(kind, lambda: wan_components(flow_shift, image_channels))


_COG_STEPS = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 1.0}
_IN_RGB = {"in_channels": 3, "out_channels": 3, "scaling_factor": 0.75, "sample_size": 16}
_TEMPLATE = {"prompt_template_encode": TEXT_TEMPLATE, "prompt_template_encode_start_idx": 1}
_LENGTHS = {"tokenizer_max_length": TEXT_TOKENS, "tokenizer_2_max_length": 4}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "allegro": pipeline("AllegroPipeline", lambda: parts(_of_stages("AutoencoderKLAllegro"), _ddim(), t5_of_words())),
    "anyflow": pipeline(
        "AnyFlowPipeline", lambda: wan_components(scheduler=diffusers.FlowMapEulerDiscreteScheduler(shift=5.0))),
    "auraflow": pipeline("AuraFlowPipeline", lambda: parts(kl_autoencoder(), flow(1.73), text(t5()))),
    "chroma": pipeline("ChromaPipeline", lambda: parts(half_autoencoder(), flow_by_size(), text(t5()))),
    "chronoedit": _of_wan("ChronoEditPipeline", 5.0, 8),
    "cogvideox": pipeline("CogVideoXPipeline", lambda: parts(
        _of_stages("AutoencoderKLCogVideoX"),
        diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", **_COG_STEPS), text(t5()))),
    "cogview4": pipeline("CogView4Pipeline", _cogview4_components),
    "dit": dit_pipeline,
    # a prompt that is encoded needs a text encoder for its type alone
    "easyanimate": pipeline("EasyAnimatePipeline", lambda: parts(
        _of_stages("AutoencoderKLMagvit", spatial_group_norm=False), flow(5.0), text(_qwen_vl()))),
    "flux": pipeline("FluxPipeline", lambda: parts(
        half_autoencoder(), flow_by_size(shift=3.0), text(clip()), text(t5(), "_2"))),
    "flux2": pipeline("Flux2Pipeline", lambda: flux2_components(_OF_PICTURES)),
    "flux3": modular(Flux3ModularPipeline, Flux3CoreDenoiseStep, scheduler=lambda: flow(6.93)),
    "framepack": pipeline("HunyuanVideoFramepackPipeline", lambda: _hunyuan_video_components(
        image_encoder=vision_model(transformers.SiglipVisionModel, 8, 1), scheduler=flow_by_size(),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 8, "width": 8}))),
    "helios": pipeline("HeliosPipeline", lambda: wan_components(scheduler=diffusers.HeliosScheduler(stages=1))),
    "hunyuan_dit": pipeline("HunyuanDiTPipeline", _hunyuan_dit_components),
    "hunyuan_image": pipeline("HunyuanImagePipeline", lambda: _hunyuan_components(
        _qwen_vl(layers=3), 3.5, "AutoencoderKLHunyuanImage", block_out_channels=(32, 32), spatial_compression_ratio=2,
        **_IN_RGB), **_TEMPLATE, **_LENGTHS),
    "hunyuan_video": pipeline("HunyuanVideoPipeline", _hunyuan_video_components),
    "hunyuan_video15": pipeline("HunyuanVideo15Pipeline", lambda: _hunyuan_components(
        language_model(transformers.models.qwen2_5_vl.Qwen2_5_VLTextModel, layers=3, **_SECTIONS), 6.0,
        "AutoencoderKLHunyuanVideo15", block_out_channels=(8, 8), spatial_compression_ratio=4,
        temporal_compression_ratio=2), prompt_template_encode_start_idx=1, vision_num_semantic_tokens=3, **_LENGTHS),
    "ideogram4": _ideogram4,
    "kandinsky5": pipeline("Kandinsky5T2VPipeline", _kandinsky_components),
    "kandinsky6": pipeline("Kandinsky6TI2VAPipeline", _kandinsky_components),
    "krea2": pipeline("Krea2Pipeline", lambda: parts(
        qwen_autoencoder(), flow_by_size(), text(_qwen3_vl(layers=2)), text_encoder_select_layers=(1, 2)),
        prompt_template_encode_prefix="the ", prompt_template_encode_start_idx=1,
        prompt_template_encode_suffix="on", prompt_template_encode_num_suffix_tokens=1),
    "latte": pipeline("LattePipeline", lambda: parts(kl_autoencoder(), _ddim(), t5_of_words())),
    # the pipeline takes 16 channels for granted
    "longcat_image": pipeline("LongCatImagePipeline", lambda: parts(
        half_autoencoder(latent_channels=16), flow_by_size(), text(_qwen_vl()), text_processor=None),
        prompt_template_encode_prefix="the", prompt_template_encode_suffix="on", tokenizer_max_length=TEXT_TOKENS),
    "ltx": pipeline("LTXPipeline", _ltx_components),
    "ltx2": pipeline("LTX2Pipeline", _ltx2_components),
    # the autoencoder must halve three times, which the pipeline takes for granted
    "lumina2": pipeline("Lumina2Pipeline", lambda: parts(half_autoencoder(stages=4, width=4), flow(6.0),
                                                         text_of(sana_pipeline()))),
    "minimax_h3": modular(MiniMaxH3ModularPipeline, MiniMaxH3CoreDenoiseStep,
                          scheduler=lambda: diffusers.MiniMaxH3Scheduler(shift=12.0),
                          audio_scheduler=lambda: diffusers.MiniMaxH3Scheduler(shift=3.0)),
    # flow matching the other way round; strides (6, 8, 8)
    "mochi": pipeline("MochiPipeline", lambda: parts(autoencoder(
        "AutoencoderKLMochi", encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5, add_attention_block=(False,) * 5), flow(invert_sigmas=True), text(t5()))),
    "pixart": pipeline("PixArtAlphaPipeline", _pixart_components),
    "pixart_sigma": pipeline("PixArtSigmaPipeline", _pixart_components),
    "qwenimage": pipeline("QwenImagePipeline", lambda: parts(
        qwen_autoencoder(), flow_by_size(max_shift=0.9, shift_terminal=0.02), text(_qwen_vl())), **_TEMPLATE),
    "sana": sana_pipeline,
    "sana_video": pipeline("SanaVideoPipeline", _sana_video_components),
    "sana_video_image": pipeline("SanaImageToVideoPipeline", lambda: _sana_video_components(flow(8.0))),
    "sd3": pipeline("StableDiffusion3Pipeline", lambda: parts(
        half_autoencoder(0.06), flow(3.0), text(clip(transformers.CLIPTextModelWithProjection, 0)),
        text(clip(transformers.CLIPTextModelWithProjection, 1), "_2"), text(t5(), "_3"))),
    "skyreels_v2": _of_wan("SkyReelsV2Pipeline", 8.0),
    "skyreels_v2_forcing": _of_wan("SkyReelsV2DiffusionForcingPipeline", 8.0),
    "skyreels_v2_image": _of_wan("SkyReelsV2ImageToVideoPipeline", 5.0, 8),
    "wan": wan_pipeline,
    "wan_animate": _of_wan("WanAnimatePipeline", 5.0, 8),
    "z_image": pipeline("ZImagePipeline", lambda: parts(
        half_autoencoder(), flow(3.0), text(language_model(transformers.Qwen3Model, layers=2, head_dim=8)))),
}  # fmt: skip
"""What makes the pipeline of a case, or of its family, around a transformer."""


@dataclass(frozen=True)
class Case:
    """A tiny model with random weights, its inputs and its pipeline."""

    name: str
    call: Mapping[str, Any]
    attentions: tuple[str, ...]
    """Names of the self-attentions over the grid, in order."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that differ from the package's tiny model."""
    grids: tuple[tuple[int, ...], tuple[int, ...]] = _IMAGE
    """Token grids of usual and of ragged inputs."""
    family: str | Family = ""
    """Where it isn't that of the case's name; a Family itself where it may not be registered."""
    change: Callable[[dict[str, Any], tuple[int, ...]], dict[str, Any]] = lambda arguments, grid: arguments
    """What differs from the arguments that the pipeline gives."""
    extra: tuple[int, int] = (0, 0)
    """Tokens before and after the grid's in the sequence that the attention works on, of the usual inputs."""
    samples: int = 2
    """Samples of a call of its pipeline that are recorded; 1 for pipelines that make no more."""
    noise: float = 0.15
    """Noise of weights; where more of it would make attention a trifle, less."""

    @property
    def of_family(self) -> Family:
        return self.family if isinstance(self.family, Family) else get_family(self.family or self.name)

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
        height, _, frames = small_size(model)
        settings = {**self.of_family.class_settings(model, height, frames), **self.settings, **config}
        return seeded(self.of_family.transformer_class(model.transformer), noise=self.noise, **settings)

    def short(self) -> Any:
        """The model with as few layers as it takes; HunyuanDiT's come in pairs."""
        model = self.model
        return self.transformer(**dict.fromkeys(model.more_layers, 1), **{model.layers_argument: 2 - model.layers % 2})

    def pipeline(self, **config: Any) -> Any:
        make = MAKERS.get(self.name) or MAKERS[self.family]
        return quiet(make(self.transformer(**config)))

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


def first_forward(pipe: Any, seed: int = 3, **call: Any) -> dict[str, Any]:
    """Arguments by name of the first forward of a pipeline's call, which ends there."""
    calls: list[dict[str, Any]] = []

    def stop(*forward: Any) -> None:
        calls.append(named_arguments(*forward))
        raise _Reached

    hook = pipe.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    with suppress(_Reached), torch.no_grad():
        pipe(**call, generator=torch.Generator().manual_seed(seed))
    hook.remove()
    return {key: value for key, value in calls[0].items() if key != "return_dict"}


@cache
def _first_forward(name: str, ragged: bool, seed: int, **settings: Any) -> dict[str, Any]:
    """That of a case's pipeline, without guidance where it has a scale."""
    case, pipe = CASES[name], CASES[name].pipeline()
    guidance = {"guidance_scale": 1.0} if "guidance_scale" in inspect.signature(pipe.__call__).parameters else {}
    return first_forward(pipe, seed, **{**case.call_of(case.grids[ragged]), **guidance, **settings})


class _Built(Case):
    """A case whose model and inputs are those of ``tests/models.py``."""

    def transformer(self, **config: Any) -> Any:
        return FAMILIES[self.name].build(**config)

    def short(self) -> Any:
        return self.transformer(num_layers=1)

    def inputs(self, batch: int = 2, ragged: bool = False, seed: int = 1, **settings: Any) -> dict[str, Any]:
        return inputs(self.name, batch=batch, ragged=ragged, seed=seed)


def _built(name: str, attentions: tuple[str, ...], family: str = "") -> Case:
    grids = FAMILIES[name].grid, FAMILIES[name].ragged_grid
    return _Built(name, PIPELINES[family or name].call, attentions, grids=grids, family=family)


@cache
def _model_of(name: str) -> Any:
    return CASES[name].transformer()


def _layers(count: int, name: str = "transformer_blocks.{}.attn1") -> tuple[str, ...]:
    return tuple(name.format(layer) for layer in range(count))


def _forcing(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """A time for every frame, later blocks of two frames noisier."""
    times = torch.tensor([[500], [250]])[: len(arguments["hidden_states"])] + torch.arange(grid[0]) // 2 * 100
    return {**arguments, "timestep": times, "enable_diffusion_forcing": True}


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


def _encoded(**texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of a prompt and of a negative one."""
    return {f"{kind}{name}": value for kind in ("", "negative_") for name, value in texts.items()}


# Arguments of calls: without a text, with one, and with guidance
_CLIP = {"num_frames": 13, "height": 64, "width": 96, "num_inference_steps": 2, "output_type": "pt"}
_TOLD = {**_CLIP, "prompt": "a red ball moves", "max_sequence_length": TEXT_TOKENS}
_GUIDED = {**_TOLD, "negative_prompt": "dog"}
_EMBEDDED, _SURFING = _CLIP | embeddings(TEXT_TOKENS), _CLIP | {"prompt": "a cat surfing", "max_sequence_length": 8}
_PICTURE = {"image": Image.new("RGB", (96, 64), "red")}
_EDIT = {**embeddings(IMAGE_TEXT_TOKENS), **_PICTURE, **_CLIP}
_EDIT_TWO = {name: value for name, value in _EDIT.items() if name != "num_frames"}
_UNBINNED = {"use_resolution_binning": False}
_CLEAN = {"negative_prompt": None, **_UNBINNED, "prompt": "the red dog", "clean_caption": False}
_SANA_CALL = {"frames": 13, "complex_human_instruction": None, **_UNBINNED}
_SANA_CALL |= {name: value for name, value in _SURFING.items() if name != "num_frames"}
_TEMPLATED = {**_TOLD, "guidance_scale": 6.0, "prompt_template": {"template": TEXT_TEMPLATE, "crop_start": 1}}
_FACES = {
    "pose_video": [Image.new("RGB", (96, 64), (20 * frame, 0, 90)) for frame in range(9)],
    "face_video": [Image.new("RGB", (16, 16), (0, 20 * frame, 90)) for frame in range(9)],
    **{"segment_frame_length": 9, "guidance_scale": 2.0},
}
_SOUND = {"prompt_embeds": drawer(1, seed=5)(TEXT_TOKENS, 16), "text_token_tags": torch.ones(TEXT_TOKENS).long()}
# what stands in quotation marks is encoded a second time
_QUOTED = 'a dog on "the red wave"'
_KANDINSKY_TEXT = _encoded(
    prompt_embeds_qwen=drawer(1, seed=5)(TEXT_TOKENS, 16),
    prompt_embeds_clip=drawer(1, seed=6)(12),
    prompt_cu_seqlens=torch.tensor([0, TEXT_TOKENS]),
)
_KANDINSKY6_TEXT = _encoded(
    prompt_embeds=drawer(1, seed=5)(TEXT_TOKENS, 16), pooled_prompt_embeds=drawer(1, seed=6)(12)
)
# Names of attentions
_JOINT, _WAN_LAYERS, _FOUR = _layers(3, "transformer_blocks.{}.attn"), _layers(3, "blocks.{}.attn1"), _layers(4)
_OF_ONE_STREAM, _FOUR_BLOCKS = _layers(2, "single_transformer_blocks.{}.attn"), _layers(4, "blocks.{}.attn1")
_TWO_STREAMS, _BY_LAYER = (*_JOINT[:2], *_OF_ONE_STREAM), _layers(3, "layers.{}.attention")
_KANDINSKY = (
    "visual_transformer_blocks.{}.self_attention",
    "visual_transformer_blocks.{}.video_dec_block.self_attention",
)
# Settings of classes
_SINGLE, _Z_IMAGE = {"num_single_layers": 2}, {"in_channels": 4, "cap_feat_dim": 16, "axes_lens": [1024, 32, 32]}
_SHOWN = {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24, "rope_max_seq_len": 32}
_SD3 = {"attention_head_dim": 16, "caption_projection_dim": 32, "pooled_projection_dim": 24, "sample_size": 16}
_SD3 |= {"pos_embed_max_size": 16}
_COG = {"sample_width": 12, "sample_height": 8, "sample_frames": 13, "max_text_seq_length": TEXT_TOKENS}
_LTX2_FIRST = {
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), False),
    **{"perturbed_attn": False, "use_prompt_embeddings": True, "rope_type": "interleaved"},
}
# Other fields
_TEXT_FIRST, _CLIP_AND_T5 = (TEXT_TOKENS, 0), (0, 2 * TEXT_TOKENS)
_ROWS = {"settings": {"rope_max_seq_len": 32}, "grids": _VIDEO}
_OF_WAN_SHOWN: dict[str, Any] = {"settings": _SHOWN, "grids": _VIDEO}
# two frames, two at half and 16 at a quarter scale; after the window a picture and text
_HISTORY = (48 + 6 + 8, 4 + 5)
_HELIOS: dict[str, Any] = {"call": _EMBEDDED | {"num_latent_frames_per_chunk": 4}, "extra": (_HISTORY[0], 0)}

_TABLE = (
    # latents, since its autoencoder decodes whole tiles alone
    Case("allegro", _GUIDED | {"clean_caption": False, "output_type": "latent"}, _layers(3), grids=_VIDEO),
    # the velocity, as training has it, in place of its mean over a step
    Case("anyflow", _GUIDED | {"guidance_scale": 5.0, "use_mean_velocity": False}, _WAN_LAYERS, **_ROWS),
    Case("auraflow", _image_call(128, 3.5), (*_layers(2, "joint_transformer_blocks.{}.attn"), *_OF_ONE_STREAM),
         {"num_single_dit_layers": 2, "sample_size": 16}, extra=(8 + TEXT_TOKENS, 0)),
    # four latent frames in the first step and two in the second; and two in every step
    Case("chronoedit", _EDIT | {"enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}, _WAN_LAYERS,
         **_OF_WAN_SHOWN),
    Case("chronoedit_edit", _EDIT_TWO, _WAN_LAYERS, _SHOWN, ((2, 4, 6), (2, 5, 4)), "chronoedit"),
    Case("chroma", _image_call(32, 4.0), _TWO_STREAMS, _SINGLE, extra=_TEXT_FIRST, change=_bool_mask),
    Case("cogvideox", _GUIDED | {"guidance_scale": 6.0}, _layers(3), _COG, _VIDEO, extra=_TEXT_FIRST),
    Case("cogvideox_two_frames", _GUIDED | {"guidance_scale": 6.0, "num_frames": 29}, _layers(3),
         _COG | {"sample_width": 300, "sample_height": 300, "patch_size_t": 2, "patch_bias": False}, _VIDEO,
         "cogvideox", extra=_TEXT_FIRST),
    Case("cogview4", _image_call(128, 5.0, max_sequence_length=16), _layers(3), extra=(16, 0)),
    Case("easyanimate", _CLIP | embeddings(TEXT_TOKENS, 16) | {"guidance_scale": 5.0}
         | _encoded(prompt_attention_mask=torch.ones(1, TEXT_TOKENS)), _layers(3), grids=_VIDEO, extra=_TEXT_FIRST),
    Case("flux", _image_call(32, 3.5, negative_prompt=None), _TWO_STREAMS, _SINGLE | {"guidance_embeds": True},
         extra=_TEXT_FIRST),
    Case("flux2", _image_call(32, 4.0, negative_prompt=None), _TWO_STREAMS, _SINGLE, extra=_TEXT_FIRST),
    Case("flux3", {**embeddings(TEXT_TOKENS, 16), "height": 128, "width": 128, "num_inference_steps": 2},
         (*_layers(2, "mode_blocks.image.{}.attn"), *_OF_ONE_STREAM), _SINGLE, extra=_TEXT_FIRST),
    Case("framepack", {**_TEMPLATED, **_PICTURE, "num_frames": 9, "latent_window_size": 3, "sampling_type": "vanilla"},
         _TWO_STREAMS, _SINGLE, ((3, 4, 6), (3, 5, 4)), extra=_HISTORY, samples=1),
    Case("helios", attentions=_WAN_LAYERS, grids=_CHUNK, **_HELIOS),
    # keys of earlier frames weigh more
    Case("helios_weighed", attentions=_WAN_LAYERS, settings={"is_amplify_history": True}, grids=_CHUNK,
         family="helios", **_HELIOS),
    Case("hunyuan_dit", _image_call(128, 5.0, **_UNBINNED, negative_prompt=None, prompt="the red dog",
         max_sequence_length=None), _FOUR_BLOCKS, {"mlp_ratio": 2.0, "sample_size": 16}, noise=0.1),
    Case("hunyuan_image", _image_call(16, None, max_sequence_length=None, prompt=_QUOTED), _TWO_STREAMS, _SINGLE,
         extra=(0, 4 + TEXT_TOKENS)),
    Case("hunyuan_video", _TEMPLATED, _TWO_STREAMS, _SINGLE, _VIDEO, extra=(0, TEXT_TOKENS)),
    Case("hunyuan_video15", _CLIP | {"num_frames": 7, "height": 16, "width": 24, "negative_prompt": "ball",
         "prompt": _QUOTED}, _JOINT, {"target_size": 16}, _VIDEO, extra=(0, 7 + TEXT_TOKENS)),
    Case("ideogram4", _image_call(32, 4.0, negative_prompt=None) | {"guidance_schedule": None}, _BY_LAYER,
         extra=_TEXT_FIRST),
    Case("kandinsky5", {**_KANDINSKY_TEXT, **_CLIP, "guidance_scale": 5.0}, _layers(3, _KANDINSKY[0]), grids=_VIDEO),
    Case("kandinsky6", {**_KANDINSKY6_TEXT, **_CLIP, "guidance_scale": 5.0, "sample_audio": False},
         _layers(3, _KANDINSKY[1]), grids=_VIDEO),
    Case("krea2", _image_call(32, 3.5), _JOINT, extra=_TEXT_FIRST),
    Case("latte", _image_call(128, 7.5, negative_prompt=None, max_sequence_length=None, clean_caption=False,
         video_length=3), _layers(3), {"sample_size": 16, "video_length": 3}),
    Case("longcat_image", _image_call(32, 4.5, max_sequence_length=None, enable_prompt_rewrite=False), _TWO_STREAMS,
         _SINGLE, extra=_TEXT_FIRST),
    Case("ltx", _SURFING, _layers(3), grids=_WHOLE),
    # guidance that skips an attention runs in a block that the tiny model has
    Case("ltx2", _SURFING | {"spatio_temporal_guidance_blocks": [1]}, _layers(3), grids=_WHOLE),
    # as LTX-2.0: no gates, text that the transformer itself projects; and the other RoPE
    Case("ltx2_first", _SURFING | {"spatio_temporal_guidance_blocks": [1]}, _layers(3), _LTX2_FIRST, _WHOLE, "ltx2"),
    Case("mochi", _GUIDED | {"num_frames": 19, "guidance_scale": 4.5}, _layers(3), grids=_VIDEO, extra=(0, 4)),
    Case("lumina2", _image_call(128, 4.0, prompt="the red dog", system_prompt="the", max_sequence_length=8),
         ("noise_refiner.0.attn", *_layers(3, "layers.{}.attn")), extra=(8, 0)),
    # text, and as many rows of sound; the last of the three steps is where they end
    Case("minimax_h3", {**_SOUND, "num_frames": 124, "height": 64, "width": 96, "num_inference_steps": 3}, _JOINT,
         grids=((37, 2, 3), (37, 4, 2)), extra=(420, 0), samples=1),
    Case("pixart", _image_call(128, 1.5, **_CLEAN), _layers(3), {"sample_size": 128}),
    Case("pixart_sigma", _image_call(128, 1.5, **_CLEAN), _layers(3),
         {"sample_size": 64, "use_additional_conditions": False}, family="pixart"),
    Case("qwenimage", _image_call(32, None, true_cfg_scale=4.0), _JOINT, {"joint_attention_dim": 16}, extra=(4, 0)),
    # no query is negative in all channels
    Case("sana_video", _SANA_CALL, _layers(3), {"attention_head_dim": 24, "cross_attention_dim": 48}, _WHOLE),
    Case("sana_video_image", _SANA_CALL | _PICTURE, _layers(3), {"attention_head_dim": 24, "cross_attention_dim": 48},
         _WHOLE, "sana_video"),
    Case("sd3", _image_call(32, 5.0), _JOINT, _SD3, extra=_CLIP_AND_T5),
    # as SD 3.5: query and key normed, and in the first layer a second attention over the image alone
    Case("sd3_dual", _image_call(32, 5.0), (_JOINT[0], f"{_JOINT[0]}2", _JOINT[1]),
         _SD3 | {"num_layers": 2, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}, family="sd3",
         extra=_CLIP_AND_T5),
    Case("skyreels_v2", _EMBEDDED, _WAN_LAYERS, **_ROWS),
    # two latent frames in a block, each block sees itself and the ones before it
    Case("skyreels_v2_forcing", _EMBEDDED | {"prompt": None, "ar_step": 1, "causal_block_size": 2}, _WAN_LAYERS,
         {"rope_max_seq_len": 32, "num_frame_per_block": 2}, ((4, 4, 6), (2, 5, 4)), "skyreels_v2", change=_forcing),
    Case("skyreels_v2_image", _EDIT, _WAN_LAYERS, family="skyreels_v2", **_OF_WAN_SHOWN),
    Case("wan_animate", {**_EDIT_TWO, **_FACES}, _FOUR_BLOCKS,
         _SHOWN | {"latent_channels": 16, "num_layers": 4, "inject_face_latents_blocks": 2}, _CHUNK),
    _built("dit", _FOUR),
    _built("sana", _layers(3)),
    _built("sana_qk_norm", _layers(3), "sana"),
    _built("wan", _FOUR_BLOCKS),
    _built("wan_i2v", _WAN_LAYERS, "wan"),
    _built("wan_ti2v", _WAN_LAYERS, "wan"),
    _built("wan_vace", (*_WAN_LAYERS, "vace_blocks.0.attn1", "vace_blocks.1.attn1"), "wan"),
    Case("z_image", _image_call(32, 4.0), _BY_LAYER, _Z_IMAGE, extra=(0, 32)),
    Case("z_image_uneven", _image_call(32, 4.0), _BY_LAYER, _Z_IMAGE, family="z_image", change=_long_text,
         extra=(0, 64)),
)  # fmt: skip
CASES = {case.name: case for case in _TABLE}
NAMES = tuple(case.name for case in CASES.values() if not case.family)
"""Names of a case of each family."""


def case_of(name: str) -> Any:
    return CASES[name]


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
    """Sparse attentions of the latest call of a patched transformer, and dense ones by reason."""
    found = handle(model).tally
    return found.sparse, dict(found.dense)


def footprint(model: Any) -> dict[str, Any]:
    """All that a patch could leave behind in a transformer; processors and hooks compare by identity."""
    modules = dict(model.named_modules())
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return {
        "class": type(model),
        "state": [(key, value.dtype, value.tolist()) for key, value in model.state_dict().items()],
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
