"""AuraFlow: ``AuraFlowTransformer2DModel``.

Joint attention without RoPE: first dual-stream blocks, then single-stream blocks. Register tokens, which the model has
learned, stand before the text, and both before the image.
"""

from .adapters import JointAdapter
from .family import Condition
from .models import image_model, tiny_image
from .styles import ImageFamily, JointFamily

_CLASS = "AuraFlowTransformer2DModel"
_TEXT_TOKENS = 256
"""Length that the pipeline pads text to, with zeros, which take part."""
_REGISTER_TOKENS = 8
_TINY = {"caption_projection_dim": 24, "joint_attention_dim": 32, "pos_embed_max_size": 8 * 8}


class AuraFlowFamily(JointFamily, ImageFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "auraflow"
    transformers = (_CLASS,)
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")
    adapter = JointAdapter(context_first=True)
    processor = "diffusers.models.attention_processor.AuraFlowAttnProcessor2_0"
    dispatches_attention = False
    extra_tokens = _REGISTER_TOKENS + _TEXT_TOKENS
    takes_sigma = True
    # T5's
    conditions = (Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),)
    models = (
        image_model(
            "auraflow",
            _CLASS,
            12,
            256,
            4,
            layers_argument="num_mmdit_layers",
            more_layers={"num_single_dit_layers": 32},
            # the table of positions is larger than that of the checkpoints, so that 4096 px can be measured
            settings={"pos_embed_max_size": 256 * 256},
        ),
        tiny_image(
            "auraflow",
            _CLASS,
            layers=2,
            layers_argument="num_mmdit_layers",
            more_layers={"num_single_dit_layers": 1},
            settings=_TINY,
        ),
    )
