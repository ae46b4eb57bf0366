"""EasyAnimate 5.1: ``EasyAnimateTransformer3DModel``.

Joint attention in blocks of two streams over up to 256 tokens of padded text, which takes part, then the video, which
RoPE rotates. A token is a patch of one latent frame. Default blocks cut 13x32x32 tokens, 49 frames of 512x512, into
about three latent frames by eight tokens each way.
"""

from typing import Any

from torch import Tensor

from .adapters import AttentionInputs, JointAdapter
from .family import Attention, Condition, Family, Forward
from .models import Clip, Model, tiny_video

_CLASS = "EasyAnimateTransformer3DModel"
_TEXT_TOKENS = 256
_TINY: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "text_embed_dim": 16}
_TINY |= {"time_embed_dim": 16}
_REAL: dict[str, Any] = {"settings": {"in_channels": 16, "out_channels": 16, "patch_size": 2}, "frames": 49}


class EasyAnimateAdapter(JointAdapter):
    """Blocks whose projections serve both streams do not project the output of the text."""

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Return the tokens of the video, projected, and those of the text."""
        tokens, text = super().project_output(attn, output, inputs)
        has_own = getattr(attn, "to_add_out", None) is not None
        return tokens, text if has_own or inputs.context is None else output.flatten(2)[:, : inputs.context.shape[1]]


EASYANIMATE = Family(
    name="easyanimate",
    transformers=(_CLASS,),
    attention=Attention(
        attentions=("attn1",),
        feed_forwards=("ff", "txt_ff"),
        adapter=EasyAnimateAdapter(context_first=True),
        processor="diffusers.models.transformers.transformer_easyanimate.EasyAnimateAttnProcessor2_0",
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=Forward(
        axes=3,
        fixed_patch=(1, 2, 2),
        # Qwen2-VL's
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),),
    ),
    trained=(
        "EasyAnimate's pipelines differ in what they encode beside the text, which mhla encode does not make. "
        "apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(4, 4, 4),
    default_clip=Clip(frames=49, fps=8.0, sizes=((512, 512),)),
    models=(
        Model("easyanimate-5.1", _CLASS, 48, 64, 48, (4, 4, 4), ((512, 512),), temporal_stride=4, **_REAL),
        # the last block has one stream
        tiny_video("easyanimate", _CLASS, _TINY, head_dim=16, more_layers={"mmdit_layers": 2}),
    ),
)
