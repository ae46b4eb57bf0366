"""AuraFlow as a model family: all that the package has to be told of it."""

from mhla_diffusers.families import Condition, ImageFamily, JointAdapter, JointFamily, Model

_TEXT_TOKENS = 256
"""Length that the pipeline pads text to."""
_REGISTER_TOKENS = 8
"""What the model puts before the text."""


class AuraFlowFamily(JointFamily, ImageFamily):
    """Text-to-image transformers with a (height, width) token grid; joint attention with the text, without RoPE."""

    name = "auraflow"
    transformers = ("AuraFlowTransformer2DModel",)
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")
    adapter = JointAdapter(context_first=True)
    processor = "diffusers.models.attention_processor.AuraFlowAttnProcessor2_0"
    dispatches_attention = False
    extra_tokens = _REGISTER_TOKENS + _TEXT_TOKENS
    takes_sigma = True
    conditions = (Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),)
    models = (
        Model(
            name="auraflow",
            transformer="AuraFlowTransformer2DModel",
            settings={"pos_embed_max_size": 128 * 128},
            heads=12,
            head_dim=256,
            layers=4,
            layers_argument="num_mmdit_layers",
            more_layers={"num_single_dit_layers": 32},
            blocks=(4, 4),
            sizes=((1024, 1024), (2048, 2048)),
            grids={"1024px": (64, 64), "2048px": (128, 128)},
        ),
        Model(
            name="tiny-auraflow",
            transformer="AuraFlowTransformer2DModel",
            settings={"caption_projection_dim": 24, "joint_attention_dim": 32},
            heads=2,
            head_dim=12,
            layers=2,
            layers_argument="num_mmdit_layers",
            more_layers={"num_single_dit_layers": 2},
            blocks=(2, 2),
            sizes=((64, 64),),
            grids={"64px": (4, 4)},
        ),
    )
