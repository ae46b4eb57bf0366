"""Wan: ``WanTransformer3DModel`` (2.1 text- and image-to-video, 2.2 A14B, 2.2 TI2V-5B) and VACE.

Self-attention is softmax with RMSNorm over all channels of query and key and 3-D RoPE, handed to every attention as
``rotary_emb``. A VACE transformer has its control blocks in a second list, ``vace_blocks``; their layers count on after
the main ones. A Wan 2.2 A14B pipeline has two transformers, which are patched alike.
"""

from typing import Any

from ..config import MHLAConfig
from .base import Family


class WanFamily(Family):
    """Video transformers with a (frames, height, width) token grid."""

    name = "wan"
    transformers = ("WanTransformer3DModel", "WanVACETransformer3DModel")
    axes = 3
    block_lists = ("blocks", "vace_blocks")
    default_config = MHLAConfig(blocks=(7, 3, 5))

    def self_attention_processor(self) -> Any:
        """``WanAttnProcessor``."""
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        return WanAttnProcessor()

    def cross_attention_processor(self) -> Any:
        """``WanAttnProcessor`` as well."""
        return self.self_attention_processor()
