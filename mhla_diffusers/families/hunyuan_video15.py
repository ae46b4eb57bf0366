"""HunyuanVideo 1.5: ``HunyuanVideo15Transformer3DModel``.

Joint attention in blocks of two streams: video, then text, which RoPE does not rotate. The text is three kinds of
tokens: of an image, of letters to be drawn (glyphs), and of the prompt; masked tokens are sorted last. Beside the
noised latents the transformer takes the latents of given frames and a mask of where these are; both are 0 for
text-to-video. Default blocks cut 31x30x53 tokens, 121 frames at 480p, into three latent frames by ten tokens each way.
"""

from typing import Any

import torch
from torch import Tensor

from .adapters import AttentionInputs, JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip, Model, tiny_video
from .values import WithoutValues

_CLASS = "HunyuanVideo15Transformer3DModel"
_TEXT_TOKENS, _GLYPH_TOKENS, _IMAGE_TOKENS = 1000, 256, 729
"""Lengths that the pipeline pads to; image tokens are masked if there is no image."""
_TINY: dict[str, Any] = {"in_channels": 9, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16}
_TINY |= {"text_embed_2_dim": 32, "image_embed_dim": 8, "rope_axes_dim": (4, 4, 4), "task_type": "t2v"}
_REAL: dict[str, Any] = {"settings": {"task_type": "t2v"}, "stride": 16, "patch": 1, "frames": 121}
_REAL["temporal_stride"] = 4


class HunyuanVideo15Adapter(JointAdapter):
    """The mask covers the text alone."""

    text_mask = "attention_mask"

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Set the heads' output to 0 for masked text: the model masks queries as well."""
        if inputs.key_mask is not None:
            output = output * inputs.key_mask[:, :, None, None]
        return super().project_output(attn, output, inputs)


class _Forward(Forward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add empty given frames and no image."""
        config, batch = transformer.config, len(latents)
        nothing = latents.new_zeros(batch, config.in_channels - latents.shape[1], *latents.shape[2:])
        return {
            "hidden_states": torch.cat([latents, nothing], dim=1),
            "timestep": timestep.to(latents.dtype),  # whose type is the type that the transformer computes in
            "image_embeds": latents.new_zeros(batch, _IMAGE_TOKENS, config.image_embed_dim),
            **conditioning,
        }


class _Training(Training):
    def needs_pictures(self, config: Any) -> bool:
        """Whether the model is for anything but text-to-video."""
        return bool(config.task_type != "t2v")


HUNYUAN_VIDEO15 = Family(
    name="hunyuan_video15",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=HunyuanVideo15Adapter(),
        processor="diffusers.models.transformers.transformer_hunyuan_video15.HunyuanVideo15AttnProcessor2_0",
        dispatches=True,
        extra=(0, None),
        rows_alike=True,
        extra_tokens=_TEXT_TOKENS + _GLYPH_TOKENS + _IMAGE_TOKENS,
    ),
    forward=_Forward(
        axes=3,
        channels_name="out_channels",  # it also takes given frames
        # Qwen's tokens after the pipeline's own instruction, and ByT5's of the text in quotation marks
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),
            Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=1, dtype=torch.int64),
            Condition("encoder_hidden_states_2", (_GLYPH_TOKENS, "text_embed_2_dim"), output=2),
            Condition("encoder_attention_mask_2", (_GLYPH_TOKENS,), output=3, dtype=torch.int64),
        ),
        without_values=WithoutValues,  # the transformer reads whether there is an image and which tokens are masked
    ),
    trained=_Training(),
    mhla_blocks=(10, 3, 5),
    default_clip=Clip(frames=121, fps=24.0, sizes=((480, 848),)),
    models=(
        Model("hunyuan-video-1.5", _CLASS, 16, 128, 54, (10, 3, 5), ((480, 848), (720, 1280)), **_REAL),
        tiny_video("hunyuan_video15", _CLASS, _TINY, stride=16, patch=1),
    ),
)
