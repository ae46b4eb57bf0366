"""Stable Diffusion 3 and 3.5: ``SD3Transformer2DModel``.

Joint attention in every block, the text after the image; no RoPE, since positions are added to the tokens once. Some
blocks of 3.5-medium attend to the image alone once more, in ``attn2``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from .adapters import AttentionAdapter, JointAdapter
from .base import Family
from .processes import DiffusionProcess, FlowMatching
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Model
from .structure import Sample

_TEXT_TOKENS = 77 + 256
"""Of CLIP, and of T5 in training and in the pipeline's default."""


def _model(name: str, heads: int, layers: int, **settings: Any) -> Model:
    # the table of positions is larger than those of the checkpoints, so that 4096 px can be measured
    settings = {
        "num_attention_heads": heads,
        "caption_projection_dim": 64 * heads,
        "qk_norm": "rms_norm",
        "pos_embed_max_size": 512,
        **settings,
    }
    return Model(
        name,
        "SD3Transformer2DModel",
        settings,
        heads,
        64,
        layers,
        (4, 4),
        stride=8,
        patch=2,
        sizes=LARGE_SQUARES,
        grids=GRIDS_OF_LARGE_SQUARES,
    )


_TINY = Model(
    "tiny-sd3",
    "SD3Transformer2DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "caption_projection_dim": 24,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
    },
    2,
    12,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class SD3Family(Family):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "sd3"
    transformers = ("SD3Transformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    attentions = ("attn", "attn2")
    adapter = JointAdapter()
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("ff", "ff_context")
    models = (
        _model("sd3.5-medium", 24, 24, dual_attention_layers=tuple(range(13))),
        _model("sd3.5-large", 38, 38),
        _TINY,
    )
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """Of ``attn2`` that of an attention without text."""
        return self.adapter if attn.add_q_proj is not None else AttentionAdapter()

    def self_attention_processor(self) -> Any:
        """``JointAttnProcessor2_0``."""
        from diffusers.models.attention_processor import JointAttnProcessor2_0

        return JointAttnProcessor2_0()

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching."""
        return FlowMatching(flow_shift)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (333, channels) of CLIP and T5, and ``pooled_projections`` (channels,) of CLIP."""
        chosen = {"prompt_2": None, "prompt_3": None, **(settings or {})}
        text, _, pooled, _ = self.encode_text(pipe, prompt, chosen)
        return {"encoder_hidden_states": text[0], "pooled_projections": pooled[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (333, channels) and ``pooled_projections`` (channels,)."""
        return {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.joint_attention_dim, device="meta"),
            "pooled_projections": torch.empty(transformer.pooled_projection_dim, device="meta"),
        }
