"""LTX-2: ``LTX2VideoTransformer3DModel``, video with sound.

The self-attention of the video is as in LTX-Video, and may have a gate for each head. That of the sound, the attention
between video and sound, and the attention to text keep softmax. RoPE may rotate the halves of a head against each
other. Pictures, keyframes and references that the pipelines append come after the video's tokens. Files for training
hold no sound: the video is then predicted as in modality guidance, without attention to sound. Default blocks have 128
tokens at 121 frames of 512x768 pixels, nearly as high as wide.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionInputs
from .family import Attention, Condition, Family, Kwargs, Sample, scaled_latents
from .ltx import STRIDES, LTXAdapter
from .models import Clip, Model, tiny_video
from .packed_videos import PackedVideoForward, PackedVideoTraining

_CLASS = "LTX2VideoTransformer3DModel"
_PROCESSOR = "diffusers.models.transformers.transformer_ltx2.LTX2PerturbedAttnProcessor"
_TEXT_TOKENS, _SOUND_TOKENS = 1024, 126
"""Defaults of the pipeline: the length that it pads text to, and five seconds of sound."""
_VERSION_2_3: dict[str, Any] = {
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
    **{"perturbed_attn": True, "use_prompt_embeddings": False, "rope_type": "split"},
}
_TINY: dict[str, Any] = {
    **dict.fromkeys(("in_channels", "out_channels", "audio_in_channels", "audio_out_channels"), 8),
    **dict.fromkeys(("cross_attention_dim", "audio_cross_attention_dim", "caption_channels"), 32),
    **{"audio_num_attention_heads": 2, "audio_attention_head_dim": 16},
}


def _model(name: str, settings: dict[str, Any]) -> Model:
    sizes = ((512, 768), (1088, 1920))
    return Model(name, _CLASS, 32, 128, 48, (4, 3, 4), sizes, settings, frames=121, **STRIDES, has_rope=False)


class LTX2Adapter(LTXAdapter):
    """Further tokens come after the grid, each head may have a gate, and guidance may skip the attention of samples."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (B, N, H, D); of halves tables (B, H, N, D / 2), an angle for each channel pair."""
        if "rotary_emb" not in arguments or not self.rotates_halves(attn):
            return super().rotary(attn, arguments)
        cos, sin = (table.transpose(1, 2).repeat_interleave(2, dim=-1) for table in arguments["rotary_emb"])
        return cos, sin

    def extra(self, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Count all tokens after the grid, which comes first."""
        return super().extra(arguments, tokens)[::-1]

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Give tokens of samples that guidance skips their own value, then gate the heads."""
        if inputs.attended is not None:
            output = torch.lerp(inputs.value.to(output), output, inputs.attended.to(output)[..., None])
        if attn.to_gate_logits is not None:
            output = output * (2 * attn.to_gate_logits(inputs.hidden_states).sigmoid())[..., None]
        return super().project_output(attn, output, inputs)


class _Forward(PackedVideoForward):
    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return text and mask that the connectors make for the video."""
        width = "caption_channels" if config.use_prompt_embeddings else "cross_attention_dim"
        mask = Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=1, dtype=torch.int64)
        return Condition("encoder_hidden_states", (_TEXT_TOKENS, width)), mask

    def conditioning_shapes(self, config: Any) -> Sample:
        """Add sound and its text, which files lack."""
        width = config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim
        sound = torch.empty(_SOUND_TOKENS, config.audio_in_channels, device="meta")
        text = torch.empty(_TEXT_TOKENS, width, device="meta")
        shapes = super().conditioning_shapes(config)
        return {**shapes, "audio_hidden_states": sound, "audio_encoder_hidden_states": text}

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add sound, at the usual frame rate; without any the video attends to none."""
        shapes = self.conditioning_shapes(transformer.config)
        missing = [name for name in shapes if name.startswith("audio") and name not in conditioning]
        sound = {name: latents.new_zeros(len(latents), 1, shapes[name].shape[1]) for name in missing}
        own = super().arguments(transformer, latents, timestep, {**sound, **conditioning})
        tokens, sigma = own["audio_hidden_states"].shape[1], timestep.reshape(len(latents), -1).amax(dim=1)
        times = {"sigma": sigma, "audio_timestep": sigma}
        return {**own, **times, "audio_num_frames": tokens, "isolate_modalities": bool(missing)}


class _Training(PackedVideoTraining):
    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Encode text, and run the connectors on it."""
        embeddings, mask, *_ = super().encode_text(pipe, prompt, settings)
        text, _, kept = pipe.connectors(embeddings, mask, padding_side=pipe.tokenizer.padding_side)
        return text, kept

    def generate_latents(self, pipe: Any, *settings: Any, **named: Any) -> Tensor:
        """Scale the latents, which the pipeline returns in the scale of its autoencoder."""
        return scaled_latents(pipe.vae, super().generate_latents(pipe, *settings, **named)[None])[0]


LTX2 = Family(
    name="ltx2",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=LTX2Adapter("query_rotary_emb"),
        class_path="LTX2Attention",
        # does what the other of its two does, where no guidance skips attention
        processor=_PROCESSOR,
        cross_processor=_PROCESSOR,
        dispatches=True,
        extra=(0, None),
    ),
    forward=_Forward(
        axes=3,
        packs_latents=True,
    ),
    trained=_Training(),
    mhla_blocks=(4, 3, 4),
    default_clip=Clip(frames=121, fps=24.0, sizes=((512, 768),)),
    models=(
        _model("ltx-2", {"rope_type": "split"}),
        _model("ltx-2.3", _VERSION_2_3),
        tiny_video(
            "ltx2", _CLASS, {**_VERSION_2_3, **_TINY}, head_dim=16, sizes=((128, 192),), **STRIDES, has_rope=False
        ),
    ),
)
