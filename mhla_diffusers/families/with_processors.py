"""Classes of diffusers that lack ``attn_processors`` and ``set_attn_processor``, with these methods.

A patched instance becomes one of these until the patch is removed; diffusers' own classes stay as they are. Imported
when one is patched.
"""

from typing import Any

from diffusers.models.attention import AttentionMixin
from diffusers.models.transformers import dit_transformer_2d, latte_transformer_3d, transformer_z_image


class DiTTransformer2DModel(AttentionMixin, dit_transformer_2d.DiTTransformer2DModel):
    """A patched DiT: everything else inherited.

    The name is that of the base class because diffusers writes it into ``config.json``.
    """


class LatteTransformer3DModel(AttentionMixin, latte_transformer_3d.LatteTransformer3DModel):
    """A patched Latte transformer, named as :class:`DiTTransformer2DModel` is."""


class ZImageTransformer2DModel(AttentionMixin, transformer_z_image.ZImageTransformer2DModel):
    """A patched Z-Image transformer, named as :class:`DiTTransformer2DModel` is."""


_WITH = {kind.__bases__[1]: kind for kind in (DiTTransformer2DModel, LatteTransformer3DModel, ZImageTransformer2DModel)}
"""diffusers' class → the one with the methods."""


def give_processor_methods(transformer: Any) -> None:
    """Make an instance of one of diffusers' classes one of that with the methods; any other stays what it is."""
    own = type(transformer)
    if own in _WITH:
        transformer.__class__ = _WITH[own]
        # what diffusers writes into model_index.json; the class keeps its own, so that pickle finds it
        transformer.__dict__["__module__"] = own.__module__


def take_processor_methods(transformer: Any) -> None:
    """The inverse of :func:`give_processor_methods`."""
    own = next((own for own, kind in _WITH.items() if kind is type(transformer)), None)
    if own is not None:
        transformer.__class__ = own
        del transformer.__dict__["__module__"]
