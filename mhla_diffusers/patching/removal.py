"""Take a patch away, for good or for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from ..families import Family, get_family
from .base_weights import check_restorable, restore_weights
from .denoising_steps import StepHooks
from .finding import attentions_of, find_transformers, hook_of, is_patched, refuse_wrapped, trunk_of
from .layer import replaced_processor
from .other_processors import ProcessorWatch, other_processors_wanted
from .processor import MHLAProcessor, default_cross_attention_processor, holds_weights, with_backend_of
from .token_grid import TokenGridHooks

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def remove_mhla(model: Model) -> Model:
    """Undo :func:`apply_mhla` and :func:`load_mhla`: processors, modules, hooks and methods are those of before.

    Weights of the model that an adapted patch replaced are those of before too, bit for bit.

    Attentions that were patched through diffusers' own ``set_attn_processor``, which keeps no record, get the
    processors that diffusers gives a new model.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched, or weights that the patch replaced cannot be brought back. The model is
            unchanged then.
    """
    if not is_patched(model):
        refuse_wrapped(model)
        raise ValueError("The model is not patched with MHLA; there is nothing to remove.")
    for transformer in find_transformers(model).values():
        check_restorable(transformer)
    for transformer in find_transformers(model).values():
        restore_weights(transformer)
        family = get_family(transformer)
        for attn in attentions_of(transformer).values():
            if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
                attn.set_processor(original_processor(attn, family, transformer))
            if hasattr(attn, "mhla"):
                del attn.mhla
        hooks, watch = hook_of(trunk_of(transformer), TokenGridHooks), hook_of(transformer, ProcessorWatch)
        steps = hook_of(transformer, StepHooks)
        if steps is not None:
            steps.remove(transformer)
        if hooks is not None:
            hooks.remove(transformer)
        if watch is not None and watch.handle is not None:
            watch.handle.remove()
        family.restore(transformer)
    return model


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Within the context the model attends as before the patch, with the same weights.

    Raises:
        ValueError: if the model is not patched.
    """
    if not is_patched(model):
        refuse_wrapped(model)
        raise ValueError("The model is not patched with MHLA; there is nothing to switch off.")
    switched = []
    for transformer in find_transformers(model).values():
        family = get_family(transformer)
        for attn in attentions_of(transformer).values():
            if isinstance(attn.processor, MHLAProcessor):
                switched.append((attn, attn.processor, hasattr(attn, "mhla")))
                attn.set_processor(original_processor(attn, family, transformer))
    try:
        with ExitStack() as stack:
            for transformer in find_transformers(model).values():
                stack.enter_context(other_processors_wanted(transformer))
            yield
    finally:
        for attn, processor, had_layer in switched:
            # the patch may have been removed meanwhile; in diffusers' own form there may be no layer yet
            if hasattr(attn, "mhla") or not had_layer:
                attn.set_processor(processor)


def original_processor(attn: Any, family: Family, transformer: nn.Module) -> Any:
    """The processor that an attention had before the patch, or a fresh one where no record was kept.

    It gets the backend that ``set_attention_backend`` has set meanwhile. One with weights that was set since the patch,
    as loading an IP-Adapter does, stays.
    """
    if holds_weights(attn.processor):
        return attn.processor
    original = replaced_processor(attn)
    if original is None:
        if any(attn is own for own in family.self_attentions(transformer).values()):
            original = family.self_attention_processor()
        else:
            original = default_cross_attention_processor(attn, family)
    return with_backend_of(attn.processor, original) if isinstance(attn.processor, MHLAProcessor) else original
