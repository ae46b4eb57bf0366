"""Tiny models of every family as a table: what differs from the package's own tiny models, inputs and pipelines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch.nn import functional

from mhla_diffusers.benchmark.models import class_settings, models, small_size
from mhla_diffusers.families import Family, get_family
from mhla_diffusers.families.processes import ReversedFlowMatching

from ..models import seeded
from ..pipelines import dit_pipeline, quiet, sana_pipeline, wan_pipeline, word_tokenizer

TEXT_TOKENS = 6
"""Of texts in inputs, which are cut to it unless a model takes whole ones alone."""
IMAGE_TEXT_TOKENS = 512
"""Wan's image-to-video cross-attention takes the last 512 tokens of its context as the text."""
TEXT_TEMPLATE = "the {} on"
"""In place of a prompt for language models, one token before the text and one after it."""
_CHAT_TEMPLATE = "the {% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %} on"
_VIDEO, _IMAGE = ((4, 4, 6), (3, 5, 4)), ((8, 8), (7, 5))
"""Token grids of usual and ragged inputs, of which block counts divide the first alone."""


def drawer(batch: int, seed: int) -> Callable[..., torch.Tensor]:
    """A function that draws normal values of shape (batch, *what it is given)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    return draw


def keep_some(batch: int, tokens: int) -> torch.Tensor:
    """Mask (B, tokens), int64, of texts of other lengths: all tokens, two fewer, and three."""
    return (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2], [3]])[:batch]).long()


def embeddings(tokens: int) -> dict[str, torch.Tensor]:
    """Arguments of a pipeline's call in place of a prompt, which some pipelines read only where ftfy is installed."""
    prompt, negative = drawer(2, seed=5)(tokens, 32)[:, None]
    return {"prompt_embeds": prompt, "negative_prompt_embeds": negative}


# Components of pipelines


def text_tokenizer() -> Any:
    """A tokenizer whose longest text has ``TEXT_TOKENS`` tokens, which pipelines with CLIP ask it for."""
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = TEXT_TOKENS
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def t5(channels: int) -> Any:
    """One layer; its tokens are those of ``word_tokenizer``."""
    config = transformers.T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return seeded(transformers.T5EncoderModel, config=config)


def clip_text(cls: type = transformers.CLIPTextModel, seed: int = 0) -> Any:
    """CLIP of 12 channels, whose pooled text is read at the first padding token."""
    sizes = {"hidden_size": 12, "intermediate_size": 16, "projection_dim": 12, "num_hidden_layers": 2}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": 80}
    return seeded(cls, seed=seed, config=transformers.CLIPTextConfig(num_attention_heads=2, **sizes, **tokens))


def language_model(layers: int) -> dict[str, Any]:
    """Settings that configurations of Llama and Qwen share: 16 channels, and a vocabulary of 16 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "max_position_embeddings": 64}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {**sizes, **tokens, "num_attention_heads": 2, "num_key_value_heads": 2}


def qwen(layers: int) -> dict[str, Any]:
    """The same of Qwen2.5-VL."""
    return {**language_model(layers), "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}


def autoencoder(cls: str, **config: Any) -> Any:
    """One of diffusers with random weights."""
    return seeded(getattr(diffusers, cls), noise=0.05, **config)


def kl_autoencoder(stages: int = 4, width: int = 4, **config: Any) -> Any:
    """Of images, with 4 channels; every stage but the first halves height and width."""
    return autoencoder(
        "AutoencoderKL",
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        block_out_channels=(width,) * stages,
        layers_per_block=1,
        norm_num_groups=width // 2,
        latent_channels=4,
        mid_block_add_attention=False,
        **config,
    )


def half_autoencoder(shift: float) -> Any:
    """Latents of half the height and width."""
    return kl_autoencoder(2, 8, shift_factor=shift, use_quant_conv=False, use_post_quant_conv=False)


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
    """Euler's steps of flow matching."""
    return FlowMatchEulerDiscreteScheduler(**config)


def _flux(transformer: Any) -> Any:
    """CLIP for the pooled text, T5 for its tokens; a shift that depends on the number of tokens."""
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0, use_dynamic_shifting=True),
        vae=half_autoencoder(0.1),
        text_encoder=clip_text(),
        tokenizer=text_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=text_tokenizer(),
    )


def _flux2(transformer: Any, kind: str = "Flux2Pipeline", **config: Any) -> Any:
    """A language model, three of whose layers are the text; an autoencoder with statistics of a token's channels."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    vae = autoencoder("AutoencoderKLFlux2", **blocks, **sizes, mid_block_add_attention=False)
    generator = torch.Generator().manual_seed(7)
    vae.bn.running_mean.normal_(0.0, 0.1, generator=generator)
    vae.bn.running_var.uniform_(0.5, 2.0, generator=generator)
    tokenizer = text_tokenizer()
    if kind == "Flux2Pipeline":  # whose processor takes pictures as well
        tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "message.content[0].text")
    text_encoder = transformers.Qwen3ForCausalLM
    config_of_text = transformers.Qwen3Config(**language_model(layers=30), head_dim=8)
    return getattr(diffusers, kind)(
        scheduler=flow(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=seeded(text_encoder, config=config_of_text),
        tokenizer=tokenizer,
        transformer=transformer,
        **config,
    )


def _auraflow(transformer: Any) -> Any:
    """T5 and flow matching."""
    return diffusers.AuraFlowPipeline(
        tokenizer=text_tokenizer(),
        text_encoder=t5(32),
        vae=kl_autoencoder(),
        transformer=transformer,
        scheduler=flow(shift=1.73),
    )


def _chroma(transformer: Any) -> Any:
    """T5, whose padding is masked; two forwards for guidance."""
    return diffusers.ChromaPipeline(
        transformer=transformer,
        scheduler=flow(use_dynamic_shifting=True),
        vae=half_autoencoder(0.1),
        text_encoder=t5(32),
        tokenizer=text_tokenizer(),
    )


def _sd3(transformer: Any) -> Any:
    """Two CLIP encoders, T5 and flow matching."""
    projected = transformers.CLIPTextModelWithProjection
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        vae=half_autoencoder(0.06),
        text_encoder=clip_text(projected),
        tokenizer=text_tokenizer(),
        text_encoder_2=clip_text(projected, seed=1),
        tokenizer_2=text_tokenizer(),
        text_encoder_3=t5(32),
        tokenizer_3=text_tokenizer(),
    )


def _cogvideox(transformer: Any) -> Any:
    """T5 and a DDIM scheduler that takes the prediction as a velocity."""
    sizes = {"block_out_channels": (4,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    steps = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 1.0}
    return diffusers.CogVideoXPipeline(
        tokenizer=text_tokenizer(),
        text_encoder=t5(32),
        vae=autoencoder("AutoencoderKLCogVideoX", **sizes),
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", **steps),
    )


def _cogview4(transformer: Any) -> Any:
    """GLM, whose last layer but one is read; text begins with a token of its own and is padded on the left."""
    config, tokenizer = transformers.GlmConfig(**language_model(layers=2), head_dim=8), text_tokenizer()
    begins = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor, tokenizer.padding_side = begins, "left"
    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=seeded(transformers.GlmModel, config=config),
        vae=kl_autoencoder(),
        transformer=transformer,
        scheduler=flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )


def _hunyuan_dit(transformer: Any) -> Any:
    """BERT and T5 text encoders, DDPM with v-prediction, no safety checker."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    betas = {"beta_start": 0.00085, "beta_end": 0.03, "beta_schedule": "scaled_linear"}
    return diffusers.HunyuanDiTPipeline(
        vae=kl_autoencoder(),
        text_encoder=seeded(transformers.BertModel, config=transformers.BertConfig(vocab_size=16, **sizes)),
        tokenizer=word_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=word_tokenizer(),
        transformer=transformer,
        scheduler=diffusers.DDPMScheduler(**betas, clip_sample=False, prediction_type="v_prediction", steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _hunyuan_video(transformer: Any) -> Any:
    """Llama for the tokens of the text, CLIP for the pooled text."""
    sizes = {"block_out_channels": (4,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    return diffusers.HunyuanVideoPipeline(
        text_encoder=seeded(transformers.LlamaModel, config=transformers.LlamaConfig(**language_model(layers=3))),
        tokenizer=text_tokenizer(),
        transformer=transformer,
        vae=autoencoder("AutoencoderKLHunyuanVideo", **sizes, mid_block_add_attention=False),
        scheduler=flow(shift=7.0),
        text_encoder_2=clip_text(),
        tokenizer_2=text_tokenizer(),
    )


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
        text_encoder_2=t5(32),
        tokenizer_2=text_tokenizer(),
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipe.prompt_template_encode_start_idx, pipe.tokenizer_max_length = 1, TEXT_TOKENS
    pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 4, 3
    return pipe


def _latte(transformer: Any) -> Any:
    """T5, an autoencoder of images, DDIM, clipped lest a random model's latents hide the last step."""
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")
    parts = {"tokenizer": word_tokenizer(), "text_encoder": t5(32), "vae": kl_autoencoder()}
    return diffusers.LattePipeline(**parts, transformer=transformer, scheduler=scheduler)


def _ltx(transformer: Any) -> Any:
    """T5, an autoencoder of strides (4, 16, 16) with statistics of its channels, flow matching shifted by size."""
    width, layers, scaling = (8,) * 4, (1,) * 5, (True, True, False, False)
    vae = autoencoder(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=width,
        decoder_block_out_channels=width,
        layers_per_block=layers,
        decoder_layers_per_block=layers,
        spatio_temporal_scaling=scaling,
        decoder_spatio_temporal_scaling=scaling,
    )
    generator = torch.Generator().manual_seed(7)
    vae.latents_mean.normal_(0.0, 0.1, generator=generator)
    vae.latents_std.uniform_(0.1, 0.3, generator=generator)
    shift = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    scheduler = flow(use_dynamic_shifting=True, **shift, shift_terminal=0.1)
    parts = {"tokenizer": word_tokenizer(), "text_encoder": t5(24), "vae": vae}
    return diffusers.LTXPipeline(**parts, transformer=transformer, scheduler=scheduler)


def _ltx2(transformer: Any) -> Any:
    """Gemma with connectors for video and sound, autoencoders of both, of the video with strides (4, 16, 16)."""
    text, sound = sana_pipeline().components, {"latent_channels": 4, "mel_bins": 8, "base_channels": 8}
    both = ("num_attention_heads", 2), ("attention_head_dim", 16), ("num_layers", 1), ("num_learnable_registers", 4)
    connectors = seeded(
        LTX2TextConnectors,
        caption_channels=8,
        text_proj_in_factor=2,
        per_modality_projections=True,
        video_hidden_dim=32,
        audio_hidden_dim=32,
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in both},
    )
    width, layers = (8, 8), (1, 1, 1)
    vae = autoencoder(
        "AutoencoderKLLTX2Video",
        latent_channels=8,
        block_out_channels=width,
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=width,
        layers_per_block=layers,
        decoder_layers_per_block=layers,
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(False,) * 2,
        upsample_factor=(1, 1),
    )
    generator = torch.Generator().manual_seed(7)
    vae.latents_mean.normal_(0.0, 0.1, generator=generator)
    vae.latents_std.uniform_(0.1, 0.3, generator=generator)
    vocoder = {"in_channels": 16, "hidden_channels": 16, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    vocoder |= {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]}
    return diffusers.LTX2Pipeline(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        audio_vae=autoencoder("AutoencoderKLLTX2Audio", **sound, ch_mult=(1,), num_res_blocks=1, resolution=32),
        text_encoder=text["text_encoder"],
        tokenizer=word_tokenizer(),
        connectors=connectors,
        transformer=transformer,
        vocoder=seeded(LTX2Vocoder, **vocoder),
    )


def _mochi(transformer: Any) -> Any:
    """T5, an autoencoder of strides (6, 8, 8) with statistics of its channels, flow matching the other way round."""
    width = (32,) * 4
    vae = autoencoder(
        "AutoencoderKLMochi",
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    parts = {"tokenizer": text_tokenizer(), "text_encoder": t5(32), "vae": vae}
    return diffusers.MochiPipeline(**parts, transformer=transformer, scheduler=flow(invert_sigmas=True))


def _lumina2(transformer: Any) -> Any:
    """Gemma 2 as text encoder; the autoencoder must halve three times, which the pipeline takes for granted."""
    text = sana_pipeline().components
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=flow(shift=6.0),
        vae=kl_autoencoder(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=text["text_encoder"],
        tokenizer=text["tokenizer"],
    )


class _OfLatents(MiniMaxH3ModularPipeline):
    """The modular pipeline, called as others are."""

    def __call__(self, **call: Any) -> Any:
        return SimpleNamespace(frames=super().__call__(output="latents", **call))


def minimax_h3(transformer: Any) -> Any:
    """From an encoded prompt to latents; its own schedules of video and sound."""
    pipe = _OfLatents(blocks=MiniMaxH3CoreDenoiseStep())
    schedulers = {"scheduler": 12.0, "audio_scheduler": 3.0}
    parts = {name: diffusers.MiniMaxH3Scheduler(shift=shift) for name, shift in schedulers.items()}
    pipe.update_components(transformer=transformer, **parts)
    return pipe


def _pixart(transformer: Any, kind: str = "PixArtAlphaPipeline") -> Any:
    """T5 and DPM-Solver, whose few steps do not begin at noise alone: it would hide what a random model does later."""
    scheduler = DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, timestep_spacing="leading")
    parts = {"tokenizer": word_tokenizer(), "text_encoder": t5(32), "vae": kl_autoencoder()}
    return getattr(diffusers, kind)(**parts, transformer=transformer, scheduler=scheduler)


def _qwenimage(transformer: Any) -> Any:
    """Qwen2.5-VL as text encoder; two forwards for guidance."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=qwen(layers=2), vision_config=vision)
    scale = {"latents_mean": [0.1, -0.1, 0.2, 0.0], "latents_std": [1.1, 0.9, 1.2, 1.0]}
    stages = {"dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    pipe = diffusers.QwenImagePipeline(
        scheduler=flow(use_dynamic_shifting=True, max_shift=0.9, shift_terminal=0.02),
        vae=autoencoder("AutoencoderKLQwenImage", base_dim=3, z_dim=4, **stages, **scale),
        text_encoder=seeded(transformers.Qwen2_5_VLForConditionalGeneration, config=config),
        tokenizer=text_tokenizer(),
        transformer=transformer,
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = TEXT_TEMPLATE, 1
    return pipe


def _sana_video(transformer: Any, kind: str = "SanaVideoPipeline", scheduler: Any = None) -> Any:
    """Gemma 2 text encoder, Wan's autoencoder, DPM-Solver on flow matching."""
    text = sana_pipeline().components
    usual = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    parts = {"tokenizer": text["tokenizer"], "text_encoder": text["text_encoder"], "vae": wan_pipeline().vae}
    return getattr(diffusers, kind)(**parts, transformer=transformer, scheduler=scheduler or usual)


def _sana_image_to_video(transformer: Any) -> Any:
    return _sana_video(transformer, "SanaImageToVideoPipeline", flow(shift=8.0))


def _z_image(transformer: Any) -> Any:
    """Qwen3 as text encoder; guidance in one forward."""
    config = transformers.Qwen3Config(**language_model(layers=2), head_dim=8)
    return diffusers.ZImagePipeline(
        scheduler=flow(shift=3.0),
        vae=half_autoencoder(0.1),
        text_encoder=seeded(transformers.Qwen3Model, config=config),
        tokenizer=text_tokenizer(),
        transformer=transformer,
    )


def _of_wan(kind: str, flow_shift: float = 5.0, image_channels: int | None = None) -> Callable[[Any], Any]:
    """A pipeline with the components of Wan."""
    return lambda transformer: getattr(diffusers, kind)(
        transformer=transformer, **wan_components(flow_shift, image_channels)
    )


@dataclass(frozen=True)
class Case:
    """A tiny model with random weights, its inputs and its pipeline."""

    name: str
    """Key of ``CASES``."""
    family: str
    make: Callable[[Any], Any]
    """A pipeline with a transformer."""
    call: Mapping[str, Any]
    """Arguments of a short call of the pipeline."""
    attentions: tuple[str, ...]
    """Names of the self-attentions over the grid, in order."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that differ from the package's tiny model."""
    grids: tuple[tuple[int, ...], tuple[int, ...]] = _IMAGE
    """Token grids of usual and of ragged inputs."""
    channels: int | None = None
    """Of latents as the family's files have them, if not those that the family tells."""
    frames: int | None = None
    """Latent frames that are no axis of the grid."""
    texts: Mapping[str, int] = field(default_factory=dict)
    """Tokens of texts, if not ``TEXT_TOKENS``; 0 for as many as the model takes."""
    change: Callable[[dict[str, Any], tuple[int, ...]], dict[str, Any]] = lambda arguments, grid: arguments
    """What differs from the arguments that the family makes."""
    extra: tuple[int, int] = (0, 0)
    """Tokens before and after the grid's in the sequence that the attention works on, of the usual inputs."""
    checkpointed: int = 2
    """Samples of a batch under gradient checkpointing."""
    compiles_whole: bool = True
    """Whether the model's own forward compiles to one graph."""
    one_time: bool = False
    """Whether samples of a batch share their time."""
    noise: float = 0.15
    """Of weights; where more of it would make attention a trifle, less."""

    @property
    def of_family(self) -> Family:
        """The family of the package."""
        return get_family(self.family)

    @property
    def grid(self) -> tuple[int, ...]:
        """Token grid of the usual inputs."""
        return self.grids[0]

    @property
    def ragged_grid(self) -> tuple[int, ...]:
        """Token grid of inputs with ``ragged=True``."""
        return self.grids[1]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block counts that divide the grid, and not the ragged one."""
        return (2, 2, 3) if len(self.grid) == 3 else (4, 2)

    @property
    def latents(self) -> tuple[int, ...]:
        """Latents (C, ...) of the usual grid, as the family's files have them."""
        return self._latents(self.grid)

    def _latents(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        model = _model_of(self.name)
        sizes = [count * length for count, length in zip(grid, self.of_family.patch(model), strict=True)]
        frames = [] if self.frames is None else [self.frames]
        return self.channels or self.of_family.channels(model.config), *frames, *sizes

    def transformer(self, **config: Any) -> Any:
        """The model; arguments of the class may differ."""
        model = models()[f"tiny-{self.family}"]
        settings = {**class_settings(model, small_size(model)), **self.settings, **config}
        return seeded(self.of_family.transformer_class(model.transformer), noise=self.noise, **settings)

    def short(self) -> Any:
        """The model with as few layers as it takes; HunyuanDiT's come in pairs."""
        model = models()[f"tiny-{self.family}"]
        return self.transformer(**dict.fromkeys(model.more_layers, 1), **{model.layers_argument: 2 - model.layers % 2})

    def pipeline(self, **config: Any) -> Any:
        """The pipeline, with a transformer of these arguments."""
        return quiet(self.make(self.transformer(**config)))

    def drawn(self, grid: tuple[int, ...], batch: int, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Latents and conditioning of the shapes that the family tells, for at most three samples, no two alike."""
        draw, conditioning = drawer(batch, seed), {}
        latents = draw(*self._latents(grid))
        for name, value in self.of_family.conditioning_shapes(_model_of(self.name).config).items():
            shape, is_float = list(value.shape), value.dtype.is_floating_point
            if not shape:
                conditioning[name] = torch.tensor([3, 7, 1000])[:batch]
                continue
            if len(shape) == 2 or not is_float:
                shape[0] = self.texts.get(name, TEXT_TOKENS) or shape[0]
            own = min(shape[0], TEXT_TOKENS)
            mask = functional.pad(keep_some(batch, own), (0, shape[0] - own))
            conditioning[name] = draw(*shape) if is_float else mask.to(value.dtype)
        return latents, conditioning

    def inputs(self, batch: int = 2, ragged: bool = False, seed: int = 1) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward."""
        family, grid = self.of_family, self.grids[ragged]
        is_sigma = family.takes_sigma or family.process_class is ReversedFlowMatching
        timestep = torch.tensor([0.5, 0.25, 0.75] if is_sigma else [500, 250, 750])[:batch]
        timestep = timestep[:1].expand(batch) if self.one_time else timestep
        latents, conditioning = self.drawn(grid, batch, seed)
        return self.change(family.forward_arguments(_model_of(self.name), latents, timestep, conditioning), grid)


@cache
def _model_of(name: str) -> Any:
    """A model of a case, for its configuration."""
    return CASES[name].transformer()


def _layers(count: int, name: str = "transformer_blocks.{}.attn1") -> tuple[str, ...]:
    return tuple(name.format(layer) for layer in range(count))


def _with_pictures(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """Poses and faces that move a character."""
    draw, (frames, height, width) = drawer(len(arguments["hidden_states"]), 9), grid
    poses = draw(16, frames - 1, 2 * height, 2 * width)
    return {**arguments, "pose_hidden_states": poses, "face_pixel_values": draw(3, 4 * (frames - 2) + 1, 16, 16)}


def _first_frame_known(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """A time for every token, 0 in the first frame."""
    later = torch.ones(1, 1, *grid)
    later[:, :, 0] = 0
    return {**arguments, "timestep": arguments["timestep"].view(-1, 1, 1, 1, 1) * later}


def _forcing(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """A time for every frame, later blocks of two frames noisier."""
    later = torch.arange(grid[0]) // 2 * 100
    return {**arguments, "timestep": arguments["timestep"][:, None] + later, "enable_diffusion_forcing": True}


def _no_image(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    return {**arguments, "image_embeds": torch.zeros(len(arguments["hidden_states"]), 3, 8)}


def _long_text(arguments: dict[str, Any], grid: tuple[int, ...]) -> dict[str, Any]:
    """The second text is so long that the batch is padded, and masked."""
    first, *others = arguments["cap_feats"]
    return {**arguments, "cap_feats": [first, drawer(1, 9)(40, 16)[0], *others[1:]]}


_CLIP = {"num_frames": 13, "height": 64, "width": 96, "num_inference_steps": 2, "output_type": "pt"}
_SMALL = {"prompt": "a red ball", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
_LARGE = {**_SMALL, "prompt": "the red dog", "height": 128, "width": 128}
_PICTURE = {"image": Image.new("RGB", (96, 64), "red")}
_ROWS = {"settings": {"rope_max_seq_len": 32}, "grids": _VIDEO}
_SHOWN = {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24, "rope_max_seq_len": 32}
_SHOWN_TEXTS = {"encoder_hidden_states": IMAGE_TEXT_TOKENS, "encoder_hidden_states_image": 5}
_OF_WAN_SHOWN: dict[str, Any] = {"settings": _SHOWN, "texts": _SHOWN_TEXTS, "grids": _VIDEO}
_HUNYUAN_TEXTS = ("encoder_hidden_states", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")
_TWO_STREAMS = (*_layers(2, "transformer_blocks.{}.attn"), *_layers(2, "single_transformer_blocks.{}.attn"))
_SD3_SETTINGS = {
    "attention_head_dim": 16,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 24,
    "sample_size": 16,
    "pos_embed_max_size": 16,
}
_SD3_CALL = {**_SMALL, "negative_prompt": "dog", "guidance_scale": 5.0, "max_sequence_length": 8}
_COG_SETTINGS = {
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 13,
    "max_text_seq_length": TEXT_TOKENS,
}
_COG_CALL = {
    **_CLIP,
    "prompt": "a red ball moves",
    "negative_prompt": "dog",
    "guidance_scale": 6.0,
    "max_sequence_length": TEXT_TOKENS,
}
# guidance that skips an attention runs in a block that the tiny model has
_LTX2_CALL = {**_CLIP, "prompt": "a cat surfing", "max_sequence_length": 8, "spatio_temporal_guidance_blocks": [1]}
SOUND_CALL: dict[str, Any] = {
    "prompt_embeds": drawer(1, seed=5)(TEXT_TOKENS, 16),
    "text_token_tags": torch.ones(TEXT_TOKENS, dtype=torch.int64),
    "num_frames": 124,
    "height": 64,
    "width": 96,
    "num_inference_steps": 3,  # the last of which is where the steps end
}
"""Of MiniMax-H3's modular pipeline."""
_Z_SETTINGS = {"in_channels": 4, "cap_feat_dim": 16, "axes_lens": [1024, 32, 32]}
_Z_CALL = {**_SMALL, "negative_prompt": "dog", "guidance_scale": 4.0, "max_sequence_length": 8}
_PIXART_CALL = {**_LARGE, "use_resolution_binning": False, "clean_caption": False, "guidance_scale": 1.5}
_PIXART_CALL["max_sequence_length"] = 8
_SANA_VIDEO = {"attention_head_dim": 24, "cross_attention_dim": 48}  # no query is negative in all channels
_SANA_CALL = {"prompt": "a cat surfing", "frames": 13, "height": 64, "width": 96, "num_inference_steps": 2}
_SANA_CALL |= {"max_sequence_length": 8, "complex_human_instruction": None, "use_resolution_binning": False}
_SANA_CALL["output_type"] = "pt"
_FORCING_CALL = {**_CLIP, **embeddings(TEXT_TOKENS), "prompt": None, "ar_step": 1, "causal_block_size": 2}
_REASONING = {"enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}
_EDIT = {**embeddings(IMAGE_TEXT_TOKENS), **_PICTURE, **_CLIP}
_FACES = {
    "pose_video": [Image.new("RGB", (96, 64), (20 * frame, 0, 90)) for frame in range(9)],
    "face_video": [Image.new("RGB", (16, 16), (0, 20 * frame, 90)) for frame in range(9)],
    "segment_frame_length": 9,
    "guidance_scale": 2.0,
}


def _without_frames(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "num_frames"}


_TABLE = (
    Case(
        "auraflow",
        "auraflow",
        _auraflow,
        {**_LARGE, "negative_prompt": "dog", "guidance_scale": 3.5, "max_sequence_length": 8},
        (*_layers(2, "joint_transformer_blocks.{}.attn"), *_layers(2, "single_transformer_blocks.{}.attn")),
        {"num_single_dit_layers": 2, "sample_size": 16},
        extra=(8 + TEXT_TOKENS, 0),
    ),
    Case(
        "chronoedit",
        "chronoedit",
        _of_wan("ChronoEditPipeline", 5.0, 8),
        {**_EDIT, **_REASONING},  # four latent frames in the first step and two in the second
        _layers(3, "blocks.{}.attn1"),
        **_OF_WAN_SHOWN,
    ),
    Case(
        "chronoedit_edit",
        "chronoedit",
        _of_wan("ChronoEditPipeline", 5.0, 8),
        _without_frames(_EDIT),  # two latent frames in every step
        _layers(3, "blocks.{}.attn1"),
        **{**_OF_WAN_SHOWN, "grids": ((2, 4, 6), (2, 5, 4))},
    ),
    Case(
        "chroma",
        "chroma",
        _chroma,
        {**_SMALL, "negative_prompt": "dog", "guidance_scale": 4.0, "max_sequence_length": 8},
        _TWO_STREAMS,
        {"num_single_layers": 2},
        extra=(TEXT_TOKENS, 0),
        checkpointed=1,  # diffusers then drops the mask of texts of other lengths
    ),
    Case("cogvideox", "cogvideox", _cogvideox, _COG_CALL, _layers(3), _COG_SETTINGS, _VIDEO, extra=(TEXT_TOKENS, 0)),
    Case(
        "cogvideox_two_frames",
        "cogvideox",
        _cogvideox,
        _COG_CALL,
        _layers(3),
        {**_COG_SETTINGS, "sample_width": 300, "sample_height": 300, "patch_size_t": 2, "patch_bias": False},
        _VIDEO,
        extra=(TEXT_TOKENS, 0),
    ),
    Case(
        "cogview4",
        "cogview4",
        _cogview4,
        {**_LARGE, "negative_prompt": "dog", "guidance_scale": 5.0, "max_sequence_length": 16},
        _layers(3),
        extra=(TEXT_TOKENS, 0),
    ),
    Case(
        "dig",
        "dig",
        dit_pipeline,
        {"class_labels": [3], "num_inference_steps": 2, "output_type": "pt"},
        _layers(3),
        {"sample_size": 16},
        ((8, 8), (7, 7)),
    ),
    Case(
        "flux",
        "flux",
        _flux,
        {**_SMALL, "guidance_scale": 3.5, "max_sequence_length": 8},
        _TWO_STREAMS,
        {"num_single_layers": 2, "guidance_embeds": True},
        extra=(TEXT_TOKENS, 0),
    ),
    Case(
        "flux2",
        "flux2",
        _flux2,
        {**_SMALL, "guidance_scale": 4.0, "max_sequence_length": 8},
        _TWO_STREAMS,
        {"num_single_layers": 2},
        extra=(TEXT_TOKENS, 0),
    ),
    Case(
        "hunyuan_dit",
        "hunyuan_dit",
        _hunyuan_dit,
        {**_LARGE, "use_resolution_binning": False},
        _layers(4, "blocks.{}.attn1"),
        {"mlp_ratio": 2.0, "sample_size": 16},
        texts=dict.fromkeys(_HUNYUAN_TEXTS, 0),
        noise=0.1,
    ),
    Case(
        "hunyuan_video",
        "hunyuan_video",
        _hunyuan_video,
        {
            **_CLIP,
            "prompt": "a red ball moves",
            "guidance_scale": 6.0,
            "prompt_template": {"template": TEXT_TEMPLATE, "crop_start": 1},
            "max_sequence_length": TEXT_TOKENS,
        },
        _TWO_STREAMS,
        {"num_single_layers": 2},
        _VIDEO,
        extra=(0, TEXT_TOKENS),
    ),
    Case(
        "hunyuan_video15",
        "hunyuan_video15",
        _hunyuan_video15,
        # what stands in quotation marks is encoded a second time
        {**_CLIP, "prompt": 'a dog on "the red wave"', "negative_prompt": "ball", "num_frames": 7}
        | {"height": 16, "width": 24},
        _layers(3, "transformer_blocks.{}.attn"),
        {"target_size": 16},
        _VIDEO,
        texts={"encoder_hidden_states_2": 4, "encoder_attention_mask_2": 4},
        change=_no_image,
        extra=(0, 3 + 4 + TEXT_TOKENS),
        compiles_whole=False,  # its forward branches on whether all image embeddings are 0
    ),
    Case(
        "latte",
        "latte",
        _latte,
        {**_LARGE, "prompt": "a cat surfing", "video_length": 3, "clean_caption": False},
        _layers(3),
        {"sample_size": 16, "video_length": 3},
        frames=3,
    ),
    Case(
        "ltx",
        "ltx",
        _ltx,
        {**_CLIP, "prompt": "a cat surfing", "max_sequence_length": 8},
        _layers(3),
        grids=_VIDEO,
    ),
    Case("ltx2", "ltx2", _ltx2, _LTX2_CALL, _layers(3), grids=_VIDEO),
    Case(
        "ltx2_first",  # as LTX-2.0: no gates, text that the transformer itself projects; and the other RoPE
        "ltx2",
        _ltx2,
        _LTX2_CALL,
        _layers(3),
        {
            **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), False),
            **{"perturbed_attn": False, "use_prompt_embeddings": True, "rope_type": "interleaved"},
        },
        _VIDEO,
    ),
    Case(
        "mochi",
        "mochi",
        _mochi,
        {**_CLIP, "num_frames": 19, "prompt": "a red ball moves", "negative_prompt": "dog", "guidance_scale": 4.5}
        | {"max_sequence_length": TEXT_TOKENS},
        _layers(3),
        grids=_VIDEO,
        extra=(0, TEXT_TOKENS),
    ),
    Case(
        "lumina2",
        "lumina2",
        _lumina2,
        {**_LARGE, "negative_prompt": "dog", "guidance_scale": 4.0, "system_prompt": "the", "max_sequence_length": 8},
        ("noise_refiner.0.attn", *_layers(3, "layers.{}.attn")),
        compiles_whole=False,  # its forward reads the lengths of texts
    ),
    Case(
        "minimax_h3",
        "minimax_h3",
        minimax_h3,
        SOUND_CALL,
        _layers(3, "transformer_blocks.{}.attn"),
        grids=_VIDEO,
        extra=(2 * TEXT_TOKENS, 0),  # text, and as many rows of sound
        one_time=True,
    ),
    Case("pixart", "pixart", _pixart, _PIXART_CALL, _layers(3), {"sample_size": 128}),
    Case(
        "pixart_sigma",
        "pixart",
        lambda transformer: _pixart(transformer, "PixArtSigmaPipeline"),
        _PIXART_CALL,
        _layers(3),
        {"sample_size": 64, "use_additional_conditions": False},
    ),
    Case(
        "qwenimage",
        "qwenimage",
        _qwenimage,
        {**_SMALL, "negative_prompt": "dog", "true_cfg_scale": 4.0, "max_sequence_length": 8},
        _layers(3, "transformer_blocks.{}.attn"),
        {"joint_attention_dim": 16},
        extra=(TEXT_TOKENS, 0),
    ),
    Case("sana_video", "sana_video", _sana_video, _SANA_CALL, _layers(3), _SANA_VIDEO, _VIDEO),
    Case(
        "sana_video_image",
        "sana_video",
        _sana_image_to_video,
        {**_SANA_CALL, **_PICTURE},
        _layers(3),
        _SANA_VIDEO,
        _VIDEO,
        change=_first_frame_known,
    ),
    Case(
        "sd3",
        "sd3",
        _sd3,
        _SD3_CALL,
        _layers(3, "transformer_blocks.{}.attn"),
        _SD3_SETTINGS,
        extra=(0, TEXT_TOKENS),
    ),
    Case(
        "sd3_dual",  # as SD 3.5: query and key normed, and in the first layer a second attention over the image alone
        "sd3",
        _sd3,
        _SD3_CALL,
        ("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"),
        {**_SD3_SETTINGS, "num_layers": 2, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        extra=(0, TEXT_TOKENS),
    ),
    Case(
        "skyreels_v2",
        "skyreels_v2",
        _of_wan("SkyReelsV2Pipeline", 8.0),
        {**_CLIP, **embeddings(TEXT_TOKENS)},
        _layers(3, "blocks.{}.attn1"),
        **_ROWS,
    ),
    Case(
        "skyreels_v2_forcing",  # two latent frames in a block, each block sees itself and the ones before it
        "skyreels_v2",
        _of_wan("SkyReelsV2DiffusionForcingPipeline", 8.0),
        _FORCING_CALL,
        _layers(3, "blocks.{}.attn1"),
        {"rope_max_seq_len": 32, "num_frame_per_block": 2},
        ((4, 4, 6), (2, 5, 4)),
        change=_forcing,
    ),
    Case(
        "skyreels_v2_image",
        "skyreels_v2",
        _of_wan("SkyReelsV2ImageToVideoPipeline", 5.0, 8),
        {**_CLIP, **embeddings(IMAGE_TEXT_TOKENS), **_PICTURE},
        _layers(3, "blocks.{}.attn1"),
        **_OF_WAN_SHOWN,
    ),
    Case(
        "wan_animate",
        "wan_animate",
        _of_wan("WanAnimatePipeline", 5.0, 8),
        {**_without_frames(_EDIT), **_FACES},
        _layers(4, "blocks.{}.attn1"),
        {**_SHOWN, "latent_channels": 16, "num_layers": 4, "inject_face_latents_blocks": 2},
        _VIDEO,
        texts=_SHOWN_TEXTS,
        change=_with_pictures,
    ),
    Case("z_image", "z_image", _z_image, _Z_CALL, _layers(3, "layers.{}.attention"), _Z_SETTINGS, extra=(0, 32)),
    Case(
        "z_image_uneven",
        "z_image",
        _z_image,
        _Z_CALL,
        _layers(3, "layers.{}.attention"),
        _Z_SETTINGS,
        change=_long_text,
        extra=(0, 64),
    ),
)
CASES = {case.name: case for case in _TABLE}
NAMES = tuple(case.name for case in _TABLE if case.name == case.family)
"""Of a case of each family."""


def case_of(name: str) -> Case:
    """One of the cases."""
    return CASES[name]


ROUNDING = 2e-5
"""Relative: float32 sums in another order, through all layers."""


@torch.no_grad()
def output(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What a transformer predicts, without gradients; of Z-Image's list a batch."""
    found = model(**arguments, return_dict=False)[0]
    return found if isinstance(found, torch.Tensor) else torch.stack(list(found))


def all_exact(name: str) -> dict[str, Any]:
    """Settings with which a patch computes the attention that it replaces: all pairs listed; one block where linear."""
    case = case_of(name)
    ones = (1,) * len(case.grid)
    if case.of_family.own_attention == "linear":
        # what MHLA adds to every feature as small as what SANA adds to its normaliser
        return {"blocks": ones, "eps": 1e-15, "sparse": "none"}
    return {"blocks": ones, "sparse": "content", "density": 1.0}


def plain(name: str, **settings: Any) -> dict[str, Any]:
    """MHLA alone, unless the settings say otherwise."""
    return {"blocks": case_of(name).blocks, "sparse": "none", **settings}
