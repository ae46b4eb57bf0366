"""Kandinsky 6: ``Kandinsky6Transformer3DModel``, of videos with sound.

Kandinsky 5's layout over the video, whose softmax self-attention is patched; that of the sound, and what video and
sound attend to in each other, stay. A given picture is one more frame on the token grid, behind the others. Default
blocks are Kandinsky 5's.
"""

import math
from typing import Any

from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, Projected, without
from .family import Attention, Condition, Family, Kwargs, Sample
from .kandinsky5 import KANDINSKY5, Kandinsky5Adapter, Kandinsky5Forward
from .models import Model, tiny_video

_CLASS = "Kandinsky6Transformer3DModel"
_SOUND_PER_FRAME = 4 / 24 * 44_100 / 1024
"""Tokens of sound for a latent frame."""
_RELEASED = {"ca_rope": True, "cross_gates": True, "fix_modulation": True}
_TINY: dict[str, Any] = {"in_text_dim": 16, "in_text_dim2": 12, "time_dim": 16, "model_dim": 24, "ff_dim": 32}
_TINY |= {"axes_dims": (4, 4, 4), "in_visual_dim": 4, "out_visual_dim": 4, **_RELEASED}
_LAYERS: dict[str, Any] = {"layers_argument": "num_visual_blocks"}


class Kandinsky6Adapter(Kandinsky5Adapter):
    """RoPE as matrices (N, 1, D / 2, 2, 2), one for query and key."""

    rope_by_head = False

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return the cosines and sines of the matrices."""
        matrices = arguments["rotary_emb"]
        cos, sin = (matrices[..., row, 0].repeat_interleave(2, dim=-1)[None] for row in (0, 1))
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs)
        query, key, value = (x.unflatten(-1, (-1, self.heads(attn)[1])) for x in projected)
        return attn.query_norm(query), attn.key_norm(key), value

    def run(self, processor: Any, attn: Any, arguments: Arguments) -> Any:
        """Return value of the model's own processor, which takes RoPE of query and key apart."""
        return processor(attn, **arguments, rotary_emb_kv=arguments["rotary_emb"])


class _Forward(Kandinsky5Forward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add silence, as long as the video."""
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        tokens = math.ceil(latents.shape[2] * _SOUND_PER_FRAME)
        silence = latents.new_zeros(len(latents), tokens, transformer.config.in_audio_dim)
        return {**without(arguments, "text_rope_pos"), "audio_hidden_states": silence}


KANDINSKY6 = Family(
    name="kandinsky6",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("visual_transformer_blocks",),
        attentions=("video_dec_block.self_attention",),
        feed_forwards=("video_dec_block.feed_forward", "audio_dec_block.feed_forward"),
        adapter=Kandinsky6Adapter(),
        dispatches=True,
    ),
    forward=_Forward(
        axes=3,
        channels_name="in_visual_dim",
        # Qwen2.5-VL's tokens, and CLIP's pooled text
        conditions=(
            Condition("encoder_hidden_states", (1024, "in_text_dim")),
            Condition("pooled_projections", ("in_text_dim2",), output=1),
        ),
    ),
    trained=(
        "Kandinsky 6 learns videos with their sound, beside a picture and a mask, which mhla encode does not make. "
        "apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=KANDINSKY5.mhla_blocks,
    default_clip=KANDINSKY5.default_clip,
    models=(
        Model(
            "kandinsky-6",
            _CLASS,
            32,
            128,
            60,
            KANDINSKY5.mhla_blocks,
            ((512, 768),),
            _RELEASED,
            frames=121,
            temporal_stride=4,
            more_layers={"num_text_blocks": 4},
            **_LAYERS,
        ),
        tiny_video("kandinsky6", _CLASS, _TINY, **_LAYERS, more_layers={"num_text_blocks": 1}),
    ),
)
