"""diffusers' own way to set and read processors, for every family."""

from collections.abc import Mapping
from typing import Any

from ..families import get_family
from ..processor import MHLAProcessor
from .finding import attentions_of
from .plan import carry_out, make_plan


def set_attn_processor(transformer: Any, processor: Any) -> None:
    """Like diffusers' ``set_attn_processor``, for a transformer of any family, DiT included.

    A :class:`MHLAProcessor` goes to the self-attentions that its configuration chooses and makes their weights at once.
    Another processor goes to every attention, and a dict (name → processor, as :func:`attn_processors` returns) gives
    each its own; the dict is left as it is.

    Raises:
        ValueError: unsupported transformer, already patched, or a dict whose names are not those of the attentions.
    """
    if isinstance(processor, MHLAProcessor):
        carry_out(make_plan(transformer, processor))
        return
    get_family(transformer)
    attentions = attentions_of(transformer)
    names = {f"{name}.processor": module for name, module in attentions.items()}
    if isinstance(processor, Mapping):
        if set(processor) != set(names):
            wrong = sorted(set(processor) ^ set(names))
            raise ValueError(f"The processors' names do not match the attentions'; differing: {', '.join(wrong[:6])}.")
        for name, module in names.items():
            module.set_processor(processor[name])
    else:
        for module in names.values():
            module.set_processor(processor)


def attn_processors(transformer: Any) -> dict[str, Any]:
    """Like diffusers' ``attn_processors``, for a transformer of any family, DiT included: name → processor."""
    return {f"{name}.processor": module.get_processor() for name, module in attentions_of(transformer).items()}
