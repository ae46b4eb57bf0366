"""Find the transformers of a pipeline, those that are patched and their layers, or say why there are none."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..families import find_family, get_family, unwrapped
from .any_model import any_disabled, any_patches
from .handle import ATTRIBUTE, Patched
from .layer import PatchedLayer, attentions_of
from .processor import has_mhla_processor

logger = logging.getLogger(__name__)


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """Find the supported transformers of a pipeline by component name, or the transformer itself as ``transformer``.

    Raises:
        ValueError: if there is none, or what :func:`refuse_wrapped` refuses.
    """
    refuse_wrapped(model)
    found = supported_transformers(model)
    if found:
        return found
    if any_patches(model):
        raise ValueError(_without_family(model))
    for name, module in _modules(model).items():
        if name.startswith("transformer"):
            get_family(module)  # raises what is unsupported about it
    components = ", ".join(getattr(model, "components", {})) or "none"
    raise ValueError(
        f"{type(model).__name__} has no transformer that MHLA supports (components: {components}). Pass a pipeline "
        'or a model that the page "Models" of the documentation (docs/models.md) lists.'
    )


def _without_family(model: Any) -> str:
    """Explain why a model patched by apply_mhla(model, grid=…) has no layers."""
    kinds = ", ".join(type(module).__name__ for module in any_patches(model))
    return (
        f"{kinds} has a patch without a family: sparse attention that has no parameters and no layers of its own, so "
        "nothing of it is saved, loaded or calibrated. apply_mhla(model, grid=…) with the same arguments makes it "
        "again, change_mhla() changes its settings, describe() says what runs."
    )


def supported_transformers(model: Any) -> dict[str, nn.Module]:
    """Find what :func:`find_transformers` finds, or nothing."""
    return {name: module for name, module in _modules(model).items() if find_family(module) is not None}


def _modules(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, type):
        raise ValueError(f"{model.__name__} is a class; give an instance, such as {model.__name__}.from_pretrained(…).")
    components = {"transformer": model} if isinstance(model, nn.Module) else getattr(model, "components", {})
    return {name: unwrapped(part) for name, part in components.items() if isinstance(part, nn.Module)}


def refuse_wrapped(model: Any) -> None:
    """Raise if the model that was meant lies inside what was given.

    Raises:
        ValueError: a class, a pipeline of transformers, or PEFT's wrapper, with the way to what is inside.
    """
    inside = getattr(model, "model", None)
    if not isinstance(model, nn.Module) and isinstance(inside, nn.Module) and find_family(inside) is not None:
        raise ValueError(
            f"{type(model).__name__} has its {type(inside).__name__} as .model; pass that: pipe.model of a pipeline of "
            "transformers."
        )
    for name, module in _modules(model).items():
        # PEFT's PeftModel would go on with a patched model inside, but is saved and called in its own ways
        take_out: Any = getattr(module, "get_base_model", None)
        if callable(take_out) and find_family(take_out()) is not None:
            raise ValueError(
                f"The {name} is wrapped in PEFT's {type(module).__name__}. Pass the model inside, which keeps the "
                f"adapters: {name}.get_base_model(), in a pipeline pipe.{name} = pipe.{name}.get_base_model(). "
                f"diffusers' own {name}.add_adapter(...) wraps nothing."
            )


# What is patched


def find_patched(model: Any) -> dict[str, Patched]:
    """Find the handle of every patched transformer of a pipeline by component name, of a model as ``transformer``."""
    found = {}
    for name, transformer in supported_transformers(model).items():
        held = vars(transformer).get(ATTRIBUTE)
        if held is None:  # diffusers' own form leaves no handle
            attentions = attentions_of(transformer).values()
            processor = next((attn.processor for attn in attentions if has_mhla_processor(attn)), None)
            if processor is not None or any(hasattr(attn, "mhla") for attn in attentions):
                held = Patched(transformer, processor)
        if held is not None:
            found[name] = held
    return found


def require_patched(model: Any) -> dict[str, Patched]:
    """Find the handles of :func:`find_patched`.

    Raises:
        ValueError: no transformer is patched, or what :func:`find_transformers` raises.
    """
    found = find_patched(model)
    if not found:
        find_transformers(model)  # raises the fitting error for a model that cannot be patched
        raise ValueError("The model is not patched with MHLA; call apply_mhla() first.")
    return found


def is_patched(model: Any) -> bool:
    """Whether any attention of a pipeline or transformer runs MHLA or holds its weights."""
    return bool(find_patched(model) or any_patches(model))


def mhla_layers(model: Any) -> dict[str, PatchedLayer]:
    """Find every layer of a patch that is in use, by name.

    The name is the attention's with ``.mhla``; for a pipeline the component's name stands before it.
    """
    if any_patches(model):
        logger.warning("%s", _without_family(model))
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{name}.mhla": layer
        for component, patched in find_patched(model).items()
        for name, layer in patched.layers.items()
    }


def require_layers(model: Any) -> dict[str, PatchedLayer]:
    """Find the layers of :func:`mhla_layers`.

    Raises:
        ValueError: if there are none, with the way to get them, or to a model that lies inside this one.
    """
    layers = {} if any_patches(model) else mhla_layers(model)
    if not layers:
        require_patched(model)
        raise ValueError(
            "The model has no MHLA weights yet: diffusers' own set_attn_processor makes them at the first forward. "
            "Run one, or use mhla_diffusers.set_attn_processor(transformer, processor)."
        )
    return layers


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Let the model attend as before the patch within the context, in this thread alone, with the same weights.

    Raises:
        ValueError: if the model is not patched.
    """
    with ExitStack() as stack:
        if any_patches(model):
            stack.enter_context(any_disabled(model))
            yield
            return
        for patched in require_patched(model).values():
            stack.enter_context(patched.disabled())
        yield
