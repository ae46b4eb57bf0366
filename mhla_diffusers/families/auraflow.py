"""AuraFlow: ``AuraFlowTransformer2DModel``.

Joint attention without RoPE: first dual-stream blocks, then single-stream blocks. Tokens are 8 learned registers, the
text, then the image. Default blocks are those of all images, 16x16 tokens at 1024 px.
"""

from typing import Any

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Training
from .models import image_model, tiny_image

_CLASS = "AuraFlowTransformer2DModel"
_TEXT_TOKENS = 256
"""Length that the pipeline pads T5's text to, with zeros, which take part."""
_LAYERS: dict[str, Any] = {"layers_argument": "num_mmdit_layers"}
# a larger table of positions than that of the checkpoints, so that 4096 px can be measured
_LARGE: dict[str, Any] = {"settings": {"pos_embed_max_size": 256 * 256}, "more_layers": {"num_single_dit_layers": 32}}
_TINY = {"caption_projection_dim": 24, "joint_attention_dim": 32, "pos_embed_max_size": 8 * 8}


AURAFLOW = Family(
    name="auraflow",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("joint_transformer_blocks", "single_transformer_blocks"),
        adapter=JointAdapter(context_first=True),
        processor="diffusers.models.attention_processor.AuraFlowAttnProcessor2_0",
        extra=(None, 0),
        extra_tokens=8 + _TEXT_TOKENS,
    ),
    forward=Forward(
        takes_sigma=True, conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),)
    ),
    trained=Training(),
    models=(
        image_model("auraflow", _CLASS, 12, 256, 4, **_LARGE, **_LAYERS, has_rope=False),
        tiny_image(
            "auraflow", _CLASS, _TINY, layers=2, more_layers={"num_single_dit_layers": 1}, **_LAYERS, has_rope=False
        ),
    ),
)
