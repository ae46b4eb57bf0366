"""FramePack: ``HunyuanVideoFramepackTransformer3DModel``.

HunyuanVideo's blocks over one window of a video. Before its tokens stand those of given and earlier frames, at three
scales; after them those of a picture and of up to 256 of text, which RoPE does not rotate. Default blocks cut 9x45x80
tokens, a window of 33 frames at 720p, into three latent frames by 15 by 16 tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..attention.layout import Extra, Shape
from .adapters import Arguments, AttentionAdapter, AttentionInputs, JointAdapter
from .attentions import Counts
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .models import Clip, Model, tiny_video
from .values import WithoutValues

_CLASS = "HunyuanVideoFramepackTransformer3DModel"
_TEXT_TOKENS, _IMAGE_TOKENS = 256, 729
_HISTORY = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
"""Latent frames of each scale, as the pipeline gives them."""
_HISTORY_PATCHES = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}
"""Latents per token of each scale, the last filled up."""
_HISTORY_TOKENS = 2 * 45 * 80 + ceil(45 / 2) * 40 + 4 * ceil(45 / 4) * 20
"""Their tokens at 720p."""
_SHOWN = {"has_image_proj": True, "has_clean_x_embedder": True}
_TINY: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16, **_SHOWN}
_TINY |= {"pooled_projection_dim": 12, "rope_axes_dim": (4, 4, 4), "image_proj_dim": 8}
_REAL: dict[str, Any] = {"frames": 33, "temporal_stride": 4, "more_layers": {"num_single_layers": 40}}


def _history(arguments: Mapping[str, Any]) -> Counts:
    """Count the tokens of the history, which the transformer takes where their indices are given as well."""
    count = 0
    for name, patch in _HISTORY_PATCHES.items():
        if (latents := arguments.get(name)) is not None and arguments.get(f"indices_{name}") is not None:
            count += math.prod(ceil(size / length) for size, length in zip(latents.shape[2:], patch, strict=True))
    return count, None


class FramepackAdapter(JointAdapter):
    """Frames of the history stand before the grid, and the context after it."""

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count the tokens before and after the grid; ValueError for fewer than the grid has."""
        count = arguments["hidden_states"].shape[1]
        if count < tokens:
            AttentionAdapter.extra(self, arguments, tokens)
        return count - tokens, arguments["encoder_hidden_states"].shape[1]

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Leave the history to query, key and value: a gate reads the tokens of the grid."""
        inputs = super().read(attn, arguments, grid, tokens)
        return replace(inputs, hidden_states=inputs.hidden_states[:, inputs.extra[0] :])


class _Forward(Forward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a picture and a history without content, which begins where the window ends."""
        size, first = latents.shape[3:], latents.shape[2]
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        image = latents.new_zeros(len(latents), _IMAGE_TOKENS, transformer.config.image_proj_dim)
        arguments |= {"image_embeds": image, "indices_latents": torch.arange(first)}
        for name, frames in _HISTORY.items():
            arguments[name] = latents.new_zeros(*latents.shape[:2], frames, *size)
            arguments[f"indices_{name}"] = torch.arange(first, first := first + frames)
        return arguments


FRAMEPACK = Family(
    name="framepack",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        feed_forwards=("ff", "ff_context", "proj_mlp", "proj_out"),
        adapter=FramepackAdapter(),
        processor="diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0",
        dispatches=True,
        extra=_history,
        extra_tokens=_HISTORY_TOKENS + _IMAGE_TOKENS + _TEXT_TOKENS,
    ),
    forward=_Forward(
        axes=3,
        guidance=6000.0,  # a thousand times HunyuanVideo's default
        # Llama's tokens after the pipeline's own instruction, and CLIP's pooled text
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),
            Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=2, dtype=torch.int64),
            Condition("pooled_projections", ("pooled_projection_dim",), output=1),
        ),
        without_values=WithoutValues,  # the transformer reads the length of a single text
    ),
    trained=(
        "FramePack learns windows of a video with the frames before them, which mhla encode does not make. "
        "apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(3, 3, 5),
    default_clip=Clip(frames=33, fps=30.0, sizes=((720, 1280),)),
    models=(
        Model("framepack", _CLASS, 24, 128, 20, (3, 3, 5), ((720, 1280),), _SHOWN, **_REAL),
        tiny_video("framepack", _CLASS, _TINY, layers=2, more_layers={"num_single_layers": 1}),
    ),
)
