"""All families as one table; comments name a model's other attentions and its extra tokens."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from . import grids, inputs, training
from .calling import Calling, ClassCalling, MiniMaxH3Calling, TrueGuidanceCalling, WanCalling
from .family import Counts, Family, usual_latent_frames
from .inputs import Condition, masked_text
from .mhla import AttentionAdapter
from .models import MODELS, Clip
from .processes import LearnedVarianceDDPM

_TEXT_FIRST: Counts = (None, 0)
_TEXT_LAST: Counts = (0, None)


def _clip(frames: int, fps: float, height: int, width: int) -> Clip:
    return Clip(frames=frames, fps=fps, sizes=((height, width),))


def _allegro_frames(config: Any, frames: int, stride: int) -> int:
    """The first frame of an odd number is a latent frame of its own."""
    return frames // stride + frames % 2


def _cogvideox_frames(config: Any, frames: int, stride: int) -> int:
    in_token = int(config.patch_size_t or 1)
    return math.ceil(usual_latent_frames(config, frames, stride) / in_token) * in_token


def _minimax_h3_frames(config: Any, frames: int, stride: int) -> int:
    return 5 * math.ceil((frames - 5) / 17) + 2


def _wan_animate_frames(config: Any, frames: int, stride: int) -> int:
    return usual_latent_frames(config, frames, stride) + 1


_HISTORY = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}
"""FramePack's latents per token of each scale, the last filled up."""


def _framepack_extra(arguments: Mapping[str, Any]) -> Counts:
    """Count the history's tokens, which the transformer uses only if their indices are given."""
    count = 0
    for name, patch in _HISTORY.items():
        if (latents := arguments.get(name)) is not None and arguments.get(f"indices_{name}") is not None:
            count += math.prod(math.ceil(size / side) for size, side in zip(latents.shape[2:], patch, strict=True))
    return count, None


def _family(name: str, *transformers: str, **facts: Any) -> Family:
    return Family(name=name, transformers=transformers, models=MODELS.get(name, ()), **facts)


_SANA_ADAPTER, _SANA_VIDEO_ADAPTER = (
    AttentionAdapter(
        processor=f"diffusers.models.{own}", cross=f"diffusers.models.transformers.{module}.SanaAttnProcessor2_0"
    )
    for own, module in (
        ("attention_processor.SanaLinearAttnProcessor2_0", "sana_transformer"),
        ("transformers.transformer_sana_video.SanaLinearAttnProcessor3_0", "transformer_sana_video"),
    )
)
# blocks with a stream each for image and text, then blocks with one for both
_TWO_STREAMS: dict[str, Any] = {"block_lists": ("transformer_blocks", "single_transformer_blocks"), "dispatches": True}
_TWO_STREAMS["feed_forwards"] = ("ff", "ff_context", "proj_mlp", "proj_out")
_OF_FLUX: dict[str, Any] = {**_TWO_STREAMS, "grid": grids.image_ids, "patch": (2, 2)}
_OF_FLUX |= {"extra": _TEXT_FIRST, "extra_tokens": 512, "refuses": ("kv_cache_mode", "image_cond_hidden_states")}
_OF_KANDINSKY: dict[str, Any] = {"axes": 3, "default_clip": _clip(121, 24.0, 512, 768), "dispatches": True}
_OF_KANDINSKY |= {"block_lists": ("visual_transformer_blocks",), "grid": grids.channels_last}
# nabla, the own sparse attention of the 10-second models, reorders tokens
_OF_KANDINSKY["refuses"] = ("sparse_params",)
_OF_WAN: dict[str, Any] = {"axes": 3, "block_lists": ("blocks", "vace_blocks"), "dispatches": True}

# What transformers get from a prompt


def _text(tokens: int | str, width: str) -> Condition:
    return Condition("encoder_hidden_states", (tokens, width))


_POOLED = ("pooled_projection_dim",)
_COGVIDEOX_TEXT = (_text("max_text_seq_length", "text_embed_dim"),)
# T5's tokens and CLIP's pooled text; of CLIP and T5, and of CLIP
_FLUX_TEXT = _text(512, "joint_attention_dim"), Condition("pooled_projections", _POOLED, output=1)
_SD3_TEXT = _text(77 + 256, "joint_attention_dim"), Condition("pooled_projections", _POOLED, output=2)
# Llama's tokens after the pipeline's own instruction, and CLIP's pooled text
_HUNYUAN_VIDEO_TEXT = (
    _text(256, "text_embed_dim"),
    Condition("encoder_attention_mask", (256,), output=2, dtype=torch.int64),
    Condition("pooled_projections", _POOLED, output=1),
)
_QWEN_IMAGE_TEXT = (
    _text(512, "joint_attention_dim"),
    Condition("encoder_hidden_states_mask", (512,), output=1, dtype=torch.int64),
)
_SANA_TEXT = masked_text(300, "caption_channels", torch.int64)  # Gemma's
_WAN_TEXT = (_text(512, "text_dim"),)  # not masked, so that its length matters

# fmt: off
FAMILIES = (
    _family("allegro", "AllegroTransformer3DModel", axes=3, attentions=("attn1",), latent_frames=_allegro_frames,
        default_clip=_clip(88, 15.0, 720, 1280)),
    # Wan distilled to steps of any length
    _family("anyflow", "AnyFlowTransformer3DModel", axes=3, block_lists=("blocks",), attentions=("attn1",),
        grid=grids.frames_first, dispatches=True, default_clip=_clip(81, 16.0, 480, 832)),
    # text after 8 learned registers
    _family("auraflow", "AuraFlowTransformer2DModel",
        block_lists=("joint_transformer_blocks", "single_transformer_blocks"), extra=_TEXT_FIRST, extra_tokens=8 + 256),
    # Flux without pooled text; blocks make a mask of pairs of one of tokens
    _family("chroma", "ChromaTransformer2DModel", **_OF_FLUX, rows_alike=True),
    # Wan's image-to-video as an editor of pictures; the grid changes within a call
    _family("chronoedit", "ChronoEditTransformer3DModel", **_OF_WAN, default_clip=_clip(5, 16.0, 720, 1280),
        calling=WanCalling(), mhla=AttentionAdapter(class_path="transformer_chronoedit.WanAttention")),
    # 2B, 5B and 1.5, in which a token covers two latent frames
    _family("cogvideox", "CogVideoXTransformer3DModel", axes=3, grid=grids.frames_first, extra=_TEXT_FIRST,
        latent_frames=_cogvideox_frames, extra_tokens=226, default_clip=_clip(49, 8.0, 480, 720),
        inputs=inputs.CogVideoXInputs(conditions=_COGVIDEOX_TEXT),
        trained=training.CogVideoXTraining()),
    # its attention adds a mask of pairs, 1 or 0, to the scores; tables of RoPE pack samples of several sizes
    _family("cogview4", "CogView4Transformer2DModel", extra=_TEXT_FIRST, rows_alike=True, extra_tokens=224,
        refuses=("image_rotary_emb",)),
    # conditioned on a class
    _family("dit", "DiTTransformer2DModel", squares_only=True, default_clip=_clip(1, 1.0, 256, 256),
        calling=ClassCalling(), mhla=AttentionAdapter(),
        inputs=inputs.Inputs(conditions=(Condition("class_labels", (), dtype=torch.int64),)),
        trained=training.DiTTraining(ddpm=LearnedVarianceDDPM)),
    _family("easyanimate", "EasyAnimateTransformer3DModel", axes=3, attentions=("attn1",), extra=_TEXT_FIRST,
        extra_tokens=256, default_clip=_clip(49, 8.0, 512, 512)),
    _family("flux", "FluxTransformer2DModel", **_OF_FLUX,
        inputs=inputs.FluxInputs(conditions=_FLUX_TEXT, packs_latents=True, takes_sigma=True, guidance=3.5),
        trained=training.Training()),
    # dev and Klein
    _family("flux2", "Flux2Transformer2DModel", **_OF_FLUX),
    # blocks of the text alone stay dense
    _family("flux3", "Flux3Transformer2DModel",
        **(_OF_FLUX | {"block_lists": ("mode_blocks.image", "single_transformer_blocks")})),
    # one window; given and earlier frames at three scales before it, a picture and text after it
    _family("framepack", "HunyuanVideoFramepackTransformer3DModel", axes=3, **_TWO_STREAMS, extra=_framepack_extra,
        extra_tokens=(2 * 45 * 80 + 23 * 40 + 4 * 12 * 20) + 729 + 256, default_clip=_clip(33, 30.0, 720, 1280)),
    # one window, with earlier frames at three scales before it
    _family("helios", "HeliosTransformer3DModel",
        axes=3, block_lists=("blocks",), attentions=("attn1",), extra=(None, 0),
        dispatches=True, extra_tokens=4 * 6 * 10 + 12 * 20 + 2 * 24 * 40, default_clip=_clip(33, 24.0, 384, 640)),
    _family("hunyuan_dit", "HunyuanDiT2DModel", block_lists=("blocks",)),
    # masked text is sorted last; the attention that refines it stays dense, as in HunyuanVideo; the refiner has frames
    _family("hunyuan_image", "HunyuanImageTransformer2DModel", **_TWO_STREAMS, extra=_TEXT_LAST,
        extra_tokens=1000 + 128, default_clip=_clip(1, 1.0, 2048, 2048)),
    # image-to-video takes a picture as the first latent frame (token_replace) or as channels (latent_concat, SkyReels)
    _family("hunyuan_video", "HunyuanVideoTransformer3DModel", axes=3, **_TWO_STREAMS, extra=_TEXT_LAST,
        extra_tokens=256, default_clip=_clip(129, 24.0, 720, 1280),
        inputs=inputs.HunyuanVideoInputs(conditions=_HUNYUAN_VIDEO_TEXT, guidance=6000.0),
        trained=training.HunyuanVideoTraining(text_settings={"max_sequence_length": 256})),
    # masked text neither sees nor is seen
    _family("hunyuan_video15", "HunyuanVideo15Transformer3DModel", axes=3, extra=_TEXT_LAST, rows_alike=True,
        dispatches=True, extra_tokens=1000 + 256 + 729, default_clip=_clip(121, 24.0, 480, 848)),
    # segments keep padding apart, which nothing else sees
    _family("ideogram4", "Ideogram4Transformer2DModel", block_lists=("layers",), attentions=("attention",),
        grid=grids.ideogram4, patch=(2, 2), extra=_TEXT_FIRST, rows_alike=True, dispatches=True, extra_tokens=2048,
        default_clip=_clip(1, 1.0, 2048, 2048)),
    _family("kandinsky5", "Kandinsky5Transformer3DModel", **_OF_KANDINSKY, attentions=("self_attention",)),
    # with sound, whose attention stays dense; a given picture is one more frame of the grid
    _family("kandinsky6", "Kandinsky6Transformer3DModel", **_OF_KANDINSKY,
        attentions=("video_dec_block.self_attention",)),
    _family("krea2", "Krea2Transformer2DModel",
        grid=grids.position_ids, patch=(2, 2), extra=_TEXT_FIRST, dispatches=True,
        extra_tokens=512),
    # frames see themselves in spatial blocks; temporal blocks, over as many tokens as frames, stay dense
    _family("latte", "LatteTransformer3DModel", grid=grids.each_frame, default_clip=_clip(16, 8.0, 512, 512)),
    _family("longcat_image", "LongCatImageTransformer2DModel", **_OF_FLUX,
        # the pipeline would else rewrite prompts by its language model
        calling=Calling(settings={"enable_prompt_rewrite": False})),
    # pictures and keyframes stand before the grid
    _family("ltx", "LTXVideoTransformer3DModel", axes=3, grid=grids.coordinates_or_numbers, extra=(None, 0),
        dispatches=True, default_clip=_clip(161, 25.0, 512, 704),
        inputs=inputs.LTXInputs(packs_latents=True, conditions=masked_text(128, "caption_channels", torch.bool)),
        trained=training.Training()),
    # with sound, whose attention stays dense; pictures, keyframes and references stand after the grid
    _family("ltx2", "LTX2VideoTransformer3DModel", axes=3, grid=grids.numbers, extra=(0, None), dispatches=True,
        default_clip=_clip(121, 24.0, 512, 768)),
    # one sequence per sample: its own text, the image, padding; the refiners of the text stay dense
    _family("lumina2", "Lumina2Transformer2DModel", block_lists=("noise_refiner", "layers"), extra=_TEXT_FIRST,
        pads_behind_grid=True, extra_tokens=256),
    # text, given pictures and videos, and sound before the generated video
    _family("minimax_h3", "MiniMaxH3Transformer3DModel",
        axes=3, grid=grids.minimax_h3, extra=(None, 0), dispatches=True,
        latent_frames=_minimax_h3_frames, extra_tokens=256 + 414, default_clip=_clip(124, 24.0, 768, 1344),
        calling=MiniMaxH3Calling()),
    # every sample attends without its masked text
    _family("mochi", "MochiTransformer3DModel", axes=3, extra=_TEXT_LAST, extra_tokens=256,
        default_clip=_clip(163, 30.0, 480, 848)),
    # α and Σ
    _family("pixart", "PixArtTransformer2DModel", mhla=AttentionAdapter(),
        # of α's pipeline
        inputs=inputs.PixArtInputs(conditions=masked_text(120, "caption_channels", torch.int64)),
        trained=training.Training(ddpm=LearnedVarianceDDPM, text_settings={"clean_caption": True})),
    _family("qwenimage", "QwenImageTransformer2DModel", feed_forwards=("img_mlp", "txt_mlp"), grid=grids.image_shapes,
        patch=(2, 2), extra=_TEXT_FIRST, dispatches=True, extra_tokens=512, calling=TrueGuidanceCalling(),
        inputs=inputs.QwenImageInputs(conditions=_QWEN_IMAGE_TEXT, packs_latents=True, takes_sigma=True),
        trained=training.QwenImageTraining()),
    # 1.0, 1.5 with qk-norm, Sprint. Its own attention equals MHLA with one block
    _family("sana", "SanaTransformer2DModel", computes="linear", mhla=_SANA_ADAPTER,
        softmax_processor="diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0", eps=1e-15,
        inputs=inputs.Inputs(conditions=_SANA_TEXT), trained=training.SanaTraining()),
    # SANA's attention with RoPE after the feature map, in the numerator alone
    _family("sana_video", "SanaVideoTransformer3DModel",
        axes=3, computes="linear", default_clip=_clip(81, 16.0, 480, 832),
        mhla=_SANA_VIDEO_ADAPTER,
        # norms and rotates query and key as SANA-Video does
        softmax_processor="diffusers.models.transformers.transformer_wan.WanAttnProcessor", eps=1e-15,
        inputs=inputs.Inputs(conditions=_SANA_TEXT), trained=training.SanaVideoTraining()),
    # 3 and 3.5; some blocks of 3.5-medium have a second attention, over the image alone
    _family("sd3", "SD3Transformer2DModel", attentions=("attn", "attn2"), extra=_TEXT_LAST, extra_tokens=77 + 256,
        inputs=inputs.Inputs(conditions=_SD3_TEXT),
        trained=training.Training(text_settings={"prompt_2": None, "prompt_3": None, "max_sequence_length": 256})),
    # diffusion forcing's mask of later frames lies between tokens
    _family("skyreels_v2", "SkyReelsV2Transformer3DModel", **_OF_WAN, default_clip=_clip(97, 24.0, 544, 960),
        calling=WanCalling(), mhla=AttentionAdapter(class_path="transformer_skyreels_v2.SkyReelsV2Attention"),
        mhla_blocks=(8, 3, 6),
        times_per_frame=("SkyReelsV2Transformer3DModel",), inputs=inputs.SkyReelsInputs(conditions=_WAN_TEXT),
        trained=training.WanTraining()),
    # 2.1 text- and image-to-video, 2.2 A14B with two transformers, 2.2 TI2V-5B, VACE
    _family("wan", "WanTransformer3DModel", "WanVACETransformer3DModel", **_OF_WAN,
        default_clip=_clip(81, 16.0, 480, 832),
        calling=WanCalling(), mhla=AttentionAdapter(class_path="transformer_wan.WanAttention"),
        times_per_frame=("WanTransformer3DModel",), inputs=inputs.WanInputs(conditions=_WAN_TEXT),
        trained=training.WanTraining()),
    # a character moved by pose and face of a video; the face is seen by cross-attention
    _family("wan_animate", "WanAnimateTransformer3DModel", **_OF_WAN, latent_frames=_wan_animate_frames,
        default_clip=_clip(77, 30.0, 720, 1280), calling=WanCalling(),
        mhla=AttentionAdapter(class_path="transformer_wan_animate.WanAttention")),
    # learned tokens fill image and text up to multiples of 32 and take part; the refiners stay dense; Omni has a mask
    _family("z_image", "ZImageTransformer2DModel", block_lists=("layers",), attentions=("attention",),
        grid=grids.list_of_images, patch=(2, 2), latents_name="x", extra=_TEXT_LAST, dispatches=True, extra_tokens=512,
        refuses=("image_noise_mask",)),
)
# fmt: on
