"""Stable Diffusion 3 and 3.5: ``SD3Transformer2DModel``.

Joint attention in every block over the image, then 333 tokens of CLIP's and T5's text; no RoPE, since positions are
added to the tokens once. Some blocks of 3.5-medium have a second attention, ``attn2``, over the image alone. Default
blocks are those of all images.
"""

from typing import Any

from .adapters import AttentionAdapter, JointAdapter
from .family import Attention, Condition, Family, Forward, Training
from .models import Model, image_model, tiny_image

_CLASS = "SD3Transformer2DModel"
_CLIP_TOKENS, _T5_TOKENS = 77, 256
"""Tokens as in training, and by the pipeline's default."""
_TINY = {"caption_projection_dim": 24, "joint_attention_dim": 32, "pooled_projection_dim": 12}
_TINY |= {"in_channels": 4, "out_channels": 4}


def _model(name: str, heads: int, layers: int, **settings: Any) -> Model:
    # the table of positions is larger than those of the checkpoints, so that 4096 px can be measured
    usual = {"caption_projection_dim": 64 * heads, "qk_norm": "rms_norm", "pos_embed_max_size": 512}
    return image_model(name, _CLASS, heads, 64, layers, settings={**usual, **settings}, has_rope=False)


class _Attention(Attention):
    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """Return the joint adapter, or for ``attn2`` that of an attention without text."""
        return self.adapter if attn.add_q_proj is not None else AttentionAdapter()


SD3 = Family(
    name="sd3",
    transformers=(_CLASS,),
    attention=_Attention(
        attentions=("attn", "attn2"),
        adapter=JointAdapter(),
        processor="diffusers.models.attention_processor.JointAttnProcessor2_0",
        extra=(0, None),
        extra_tokens=_CLIP_TOKENS + _T5_TOKENS,
    ),
    forward=Forward(
        # of CLIP and T5, and of CLIP
        conditions=(
            Condition("encoder_hidden_states", (_CLIP_TOKENS + _T5_TOKENS, "joint_attention_dim")),
            Condition("pooled_projections", ("pooled_projection_dim",), output=2),
        )
    ),
    trained=Training(text_settings={"prompt_2": None, "prompt_3": None, "max_sequence_length": _T5_TOKENS}),
    models=(
        _model("sd3.5-medium", 24, 24, dual_attention_layers=tuple(range(13))),
        _model("sd3.5-large", 38, 38),
        tiny_image("sd3", _CLASS, _TINY, has_rope=False),
    ),
)
