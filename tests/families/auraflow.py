"""AuraFlow as a model family: all that the package has to be told of it."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import AuraFlowAttnProcessor2_0

from mhla_diffusers import Family, MHLAConfig
from mhla_diffusers.families import DiffusionProcess, FlowMatching, JointAdapter, Model, Sample

_TEXT_TOKENS = 256
"""Length that the pipeline pads text to."""
_REGISTER_TOKENS = 8
"""What the model puts before the text."""


class AuraFlowFamily(Family):
    """Text-to-image transformers with a (height, width) token grid; joint attention with the text, without RoPE."""

    name = "auraflow"
    transformers = ("AuraFlowTransformer2DModel",)
    axes = 2
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")
    attentions = ("attn",)
    adapter = JointAdapter(context_first=True)
    extra_tokens = _REGISTER_TOKENS + _TEXT_TOKENS
    feed_forwards = ("ff", "ff_context")
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
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
            stride=8,
            patch=2,
            sizes=((1024, 1024), (2048, 2048)),
            grids={"1024px": (64, 64), "2048px": (128, 128)},
        ),
        Model(
            name="tiny-auraflow",
            transformer="AuraFlowTransformer2DModel",
            settings={
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "caption_projection_dim": 24,
                "joint_attention_dim": 32,
            },
            heads=2,
            head_dim=12,
            layers=2,
            layers_argument="num_mmdit_layers",
            more_layers={"num_single_dit_layers": 2},
            blocks=(2, 2),
            stride=8,
            patch=2,
            sizes=((64, 64),),
            grids={"64px": (4, 4)},
        ),
    )

    def self_attention_processor(self) -> Any:
        """``AuraFlowAttnProcessor2_0``."""
        return AuraFlowAttnProcessor2_0()

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching; the transformer takes σ."""
        return FlowMatching(flow_shift, timestep_scale=1e-3)

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """A thousand times σ."""
        return 1000 * timestep

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (256, channels), of which the padding is 0."""
        embeddings, *_ = self.encode_text(pipe, prompt, settings or {})
        return {"encoder_hidden_states": embeddings[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """What :meth:`encode_prompt` gives, without values."""
        return {"encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.joint_attention_dim, device="meta")}
