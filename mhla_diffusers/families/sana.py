"""SANA: ``SanaTransformer2DModel`` (1.0, 1.5 with qk-norm, Sprint).

Its own self-attention is already plain linear attention with φ = ReLU, so MHLA with one block is what it has. There is
no positional embedding; the convolutional feed-forward needs the tokens in raster order.
"""

from typing import Any

from ..config import MHLAConfig
from .base import Family


class SanaFamily(Family):
    """Image transformers with a (height, width) token grid."""

    name = "sana"
    transformers = ("SanaTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config = MHLAConfig(blocks=(4, 4))

    def self_attention_processor(self) -> Any:
        """``SanaLinearAttnProcessor2_0``."""
        from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0

        return SanaLinearAttnProcessor2_0()

    def cross_attention_processor(self) -> Any:
        """``SanaAttnProcessor2_0``."""
        from diffusers.models.transformers.sana_transformer import SanaAttnProcessor2_0

        return SanaAttnProcessor2_0()
