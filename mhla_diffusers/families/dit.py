"""DiT: ``DiTTransformer2DModel``.

Softmax self-attention only; positions are added to the tokens once, before the first block. diffusers' class lacks
``attn_processors`` and ``set_attn_processor``, so a patched instance becomes one of the subclass in
``dit_with_processors.py`` until the patch is removed; diffusers' own class stays as it is.
"""

from typing import Any

from ..config import MHLAConfig
from .base import Family


class DiTFamily(Family):
    """Class-conditional image transformers with a (height, width) token grid."""

    name = "dit"
    transformers = ("DiTTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config = MHLAConfig(blocks=(4, 4))

    def self_attention_processor(self) -> Any:
        """``AttnProcessor2_0``."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def prepare(self, transformer: Any) -> None:
        """Give this instance ``attn_processors`` and ``set_attn_processor``."""
        from diffusers.models.transformers import dit_transformer_2d

        from .dit_with_processors import DiTTransformer2DModel

        if type(transformer) is dit_transformer_2d.DiTTransformer2DModel:
            transformer.__class__ = DiTTransformer2DModel
            # what diffusers writes into model_index.json; the class keeps its own, so that pickle finds it
            transformer.__dict__["__module__"] = dit_transformer_2d.__name__

    def restore(self, transformer: Any) -> None:
        """Make the instance diffusers' own class again."""
        from diffusers.models.transformers import dit_transformer_2d

        from .dit_with_processors import DiTTransformer2DModel

        if type(transformer) is DiTTransformer2DModel:
            transformer.__class__ = dit_transformer_2d.DiTTransformer2DModel
            del transformer.__dict__["__module__"]
