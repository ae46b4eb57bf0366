"""Attentions of transformers get a processor, as diffusers' have one: their class becomes one with a place for it.

A class is changed on instances alone, those of a patched model, and changed back when the patch is removed.
"""

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any


class OwnAttention:
    """Stands where no processor is: the layer does what its class of transformers does."""


_OWN = OwnAttention()


class WithProcessor:
    """Base class, beside one of transformers' attentions, of an attention of a patched model."""

    processor: Any = _OWN

    def set_processor(self, processor: Any) -> None:
        """As diffusers' attentions have it; :class:`OwnAttention` takes the processor away."""
        if not isinstance(processor, OwnAttention):
            self.processor = processor
        elif "processor" in vars(self):
            del self.processor

    def get_processor(self) -> Any:
        """As diffusers' attentions have it."""
        return self.processor

    @property
    def has_processor(self) -> bool:
        """Whether one has been set."""
        return not isinstance(self.processor, OwnAttention)


def give_classes(attentions: Iterable[Any], classes: Mapping[type, type]) -> None:
    """Make attentions such ones.

    Args:
        attentions: of one model.
        classes: transformers' class → the one with a processor.
    """
    for attn in attentions:
        before = type(attn)
        attn.__class__ = classes.get(before, before)
        # accelerate, which spreads a model over devices, keeps the forward of before and calls it by this name
        kept = vars(attn).get("_old_forward")
        if getattr(kept, "__func__", None) is before.forward:
            attn._old_forward = MethodType(type(attn).forward, attn)


def take_classes(attentions: Iterable[Any], classes: Mapping[type, type]) -> None:
    """The inverse of :func:`give_classes`."""
    give_classes(attentions, {kind: base for base, kind in classes.items()})


def refuse_weights(dropout: float, asked: bool) -> None:
    """Raise if a call needs weights of softmax, which MHLA does not make.

    Args:
        dropout: of weights, in this call.
        asked: whether the caller wants to see them.

    Raises:
        ValueError: naming the way out.
    """
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout} drops weights of softmax, which MHLA does not make; set it to 0 in the "
            "configuration before the model is made (there attention_probs_dropout_prob of some), or in the layers of "
            "one that is made, attn.attention_dropout (attn.dropout of SigLIP)."
        )
    if asked:
        raise ValueError(
            "output_attentions=True asks for weights of softmax, which MHLA does not make. Leave it out, or call "
            "within mhla_disabled(model); weights() of one of mhla_layers(model) tells what MHLA gives to every key."
        )
