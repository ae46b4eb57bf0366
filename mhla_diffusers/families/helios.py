"""Helios: ``HeliosTransformer3DModel``, Wan's blocks over one window of a video.

Before the window's tokens stand those of earlier frames, at three scales; RoPE rotates all of them. Some models weigh
the keys of earlier frames. Default blocks cut 9x24x40 tokens, a window of 33 frames at 384x640, into 3x8x8 tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.layout import Extra
from ..attention.rope import Rotary
from .adapters import Arguments, AttentionAdapter, Projected
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .models import Clip, Model
from .values import WithoutValues
from .wan import tiny_wan

_CLASS = "HeliosTransformer3DModel"
_HISTORY = {"long": 16, "mid": 2, "short": 1}
"""Latent frames of each scale, as the pipeline gives them; with the last goes the first frame of the video."""
_HISTORY_TOKENS = 4 * 6 * 10 + 12 * 20 + 2 * 24 * 40
"""Their tokens at 384x640."""
_LENGTH = "original_context_length"


class HeliosAdapter(AttentionAdapter):
    """Frames of the history stand before the grid."""

    has_extra = True

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Keep the number of the window's tokens, the fifth argument, which the model's own processor needs."""
        fifth = args[4] if len(args) > 4 else kwargs.get(_LENGTH, kwargs.get("key_rotary_emb"))
        return {**super().arguments(args, kwargs), _LENGTH: fifth}

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count the tokens before the grid; ValueError if the window is not the grid."""
        if arguments[_LENGTH] != tokens:
            super().extra(arguments, tokens)
        return arguments["hidden_states"].shape[1] - tokens, 0

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens; the model passes cosines and sines in one table (B, N, 2 D)."""
        cos, sin = arguments["rotary_emb"].unsqueeze(2).chunk(2, dim=-1)
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Weigh the keys of the history as the model does, which RoPE does not change."""
        query, key, value = super().project(attn, arguments)
        history = key.shape[1] - arguments[_LENGTH]
        if attn.is_amplify_history and history:
            scale = 1 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1)
            key = torch.cat([key[:, :history] * scale[:, None], key[:, history:]], dim=1)
        return query, key, value


class _Forward(Forward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a history without content, which ends where the window begins."""
        arguments, place = super().arguments(transformer, latents, timestep, conditioning), 1
        for name, frames in _HISTORY.items():
            places = torch.arange(place, place := place + frames)
            places = torch.cat([torch.zeros(1, dtype=torch.int64), places]) if name == "short" else places
            arguments[f"indices_latents_history_{name}"] = places[None]
            shape = *latents.shape[:2], len(places), *latents.shape[3:]
            arguments[f"latents_history_{name}"] = latents.new_zeros(shape)
        return {**arguments, "indices_hidden_states": torch.arange(place, place + latents.shape[2])[None]}


HELIOS = Family(
    name="helios",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("blocks",),
        adapter=HeliosAdapter(),
        dispatches=True,
        extra=(None, 0),
        extra_tokens=_HISTORY_TOKENS,
        attentions=("attn1",),
    ),
    forward=_Forward(
        axes=3,
        conditions=(Condition("encoder_hidden_states", (512, "text_dim")),),
        # RoPE asks for the autocast of its places' device
        without_values=lambda: WithoutValues(lambda tensor: tensor.ndim == 4),
    ),
    trained=(
        "Helios learns windows of a video with the frames before them, which mhla encode does not make. "
        "apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(3, 3, 5),
    default_clip=Clip(frames=33, fps=24.0, sizes=((384, 640),)),
    models=(
        Model("helios", _CLASS, 40, 128, 40, (3, 3, 5), ((384, 640),), frames=33, temporal_stride=4),
        tiny_wan("helios", _CLASS, {"rope_dim": (4, 4, 4)}),
    ),
)
