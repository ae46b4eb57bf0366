"""DiT with the processor methods that diffusers' other transformers have. Imported when a DiT is patched."""

from diffusers.models.attention import AttentionMixin
from diffusers.models.transformers import dit_transformer_2d


class DiTTransformer2DModel(AttentionMixin, dit_transformer_2d.DiTTransformer2DModel):
    """A patched DiT: ``attn_processors`` and ``set_attn_processor`` added, everything else inherited.

    The name is that of the base class because diffusers writes it into ``config.json``.
    """
