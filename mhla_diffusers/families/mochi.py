"""Mochi 1: ``MochiTransformer3DModel``.

Joint attention in blocks of two streams: video, then 256 tokens of text, whose masked ones are cut off in every sample.
RoPE rotates the tokens of the video alone, by frequencies that each head has learned. A token is a patch of one
latent frame. Time runs from the noise to the data. Default blocks cut 28x30x53 tokens, 163 frames at 480p, into about
three latent frames by ten tokens each way.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionInputs, JointAdapter
from .family import Attention, Family, Forward, Training, masked_text
from .models import Clip, Model, tiny_video
from .values import WithoutValues

_CLASS = "MochiTransformer3DModel"
_TEXT_TOKENS = 256
_FRAMES: dict[str, Any] = {"frames": 163, "temporal_stride": 6}
_TINY = {"pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 8}


class MochiAdapter(JointAdapter):
    """RoPE has a table for each head, the mask covers the text alone, and masked text is moved last."""

    rope_by_head = True
    text_mask = "attention_mask"

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (1, N, H, D), of tables (N, H, D / 2) with an angle for each channel pair."""
        if (rotary := arguments.get("rotary_emb")) is not None:
            tables = tuple(table[None].repeat_interleave(2, dim=-1) for table in rotary)
            arguments = {**arguments, "rotary_emb": tables}
        return super().rotary(attn, arguments)

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Return text as the model does: tokens that take part first, and 0 for the others."""
        if inputs.key_mask is not None and inputs.context is not None:
            count = inputs.context.shape[1]
            kept, text = inputs.key_mask[:, -count:], output[:, -count:]
            order = kept.int().argsort(dim=1, descending=True, stable=True)[:, :, None, None]
            text = (text * kept[:, :, None, None]).gather(1, order.expand_as(text))
            output = torch.cat([output[:, :-count], text], dim=1)
        return super().project_output(attn, output, inputs)


class _Forward(Forward):
    def patch(self, transformer: Any) -> tuple[int, ...]:
        """Return a patch of one latent frame."""
        size = transformer.config.patch_size
        return 1, size, size


MOCHI = Family(
    name="mochi",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=MochiAdapter(),
        class_path="MochiAttention",
        processor="diffusers.models.attention_processor.MochiAttnProcessor2_0",
        extra=(0, None),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        axes=3,
        time_is_reversed=True,
        # T5's
        conditions=masked_text(_TEXT_TOKENS, "text_embed_dim", torch.bool),
        # The processor reads which text is masked, and RoPE disables autocast for the device of its frequencies.
        without_values=partial(WithoutValues, lambda x: isinstance(x, nn.Parameter) and x.ndim == 3),
    ),
    trained=Training(),
    mhla_blocks=(9, 3, 5),
    default_clip=Clip(frames=163, fps=30.0, sizes=((480, 848),)),
    models=(
        Model("mochi-1", _CLASS, 24, 128, 48, (9, 3, 5), ((480, 848),), **_FRAMES, has_rope=False),
        tiny_video("mochi", _CLASS, _TINY, frames=13, temporal_stride=6, has_rope=False),
    ),
)
