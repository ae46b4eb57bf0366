"""Find the transformers of a pipeline, those that are patched and their layers, or say why there are none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..families import find_family, get_family, unwrapped
from .call import held
from .layer import MHLALayer
from .patched import ATTRIBUTE, Patched
from .processor import MHLAProcessor


def components_of(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline or another object by first name; a model itself as ``transformer``."""
    if isinstance(model, type):
        raise ValueError(f"{model.__name__} is a class; give an instance, such as {model.__name__}.from_pretrained(…).")
    if isinstance(model, nn.Module):
        return {"transformer": unwrapped(model)}
    parts = getattr(model, "components", None) or getattr(model, "__dict__", {})
    modules = {name: unwrapped(part) for name, part in parts.items() if isinstance(part, nn.Module)}
    first = {module: name for name, module in reversed(modules.items())}
    return {name: module for name, module in modules.items() if first[module] == name}


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """Find supported transformers by component name, a model itself as ``transformer``; ValueError without one."""
    components = components_of(model)
    found = {name: module for name, module in components.items() if find_family(module) is not None}
    if found:
        return found
    for name, module in components.items():
        if name.startswith("transformer"):
            get_family(module)  # raises what is unsupported about it
    raise ValueError(
        f"{type(model).__name__} has no transformer that MHLA supports (components: "
        f"{', '.join(components) or 'none'}). Pass a model or pipeline listed in docs/models.md."
    )


def find_patched(model: Any) -> dict[str, Patched]:
    """Find the handle of every patched transformer of a pipeline by component name, of a model as ``transformer``."""
    handles = {name: _handle_of(module) for name, module in components_of(model).items()}
    return {name: handle for name, handle in handles.items() if handle is not None}


def _handle_of(transformer: Any) -> Patched | None:
    if isinstance(handle := vars(transformer).get(ATTRIBUTE), Patched):
        return handle
    if (family := find_family(transformer)) is None:
        return None
    attentions = family.self_attentions(transformer).items()  # diffusers' own form leaves no handle
    processors = {name: getattr(attn, "processor", None) for name, attn in attentions}
    chosen = {x: attn for x, attn in attentions if hasattr(attn, "mhla") or isinstance(processors[x], MHLAProcessor)}
    if not chosen:
        return None
    first = next(iter(chosen.values()))
    config = (first.mhla if hasattr(first, "mhla") else first.processor).config
    made = Patched(transformer, config, family, backend=getattr(first.processor, "backend", "auto"))
    made.chosen = tuple(chosen)
    return made


def require_patched(model: Any) -> dict[str, Patched]:
    """Find the handles of :func:`find_patched`; ValueError if there are none."""
    found = find_patched(model)
    if not found:
        find_transformers(model)  # raises the fitting error for a model that cannot be patched
        raise ValueError("The model is not patched; call apply_mhla() first.")
    return found


def is_patched(model: Any) -> bool:
    """Whether any attention of a pipeline or transformer runs a patch or holds the weights of one."""
    return bool(find_patched(model))


def mhla_layers(model: Any) -> dict[str, MHLALayer]:
    """Find MHLA's layers by name, ``<attention>.mhla``, in a pipeline after its component's name."""
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{name}.mhla": layer
        for component, patched in find_patched(model).items()
        for name, layer in patched.layers.items()
    }


def require_layers(model: Any) -> dict[str, MHLALayer]:
    """Find the layers of :func:`mhla_layers`; ValueError if there are none."""
    layers = mhla_layers(model)
    if not layers:
        (patched, *_) = require_patched(model).values()
        raise ValueError(
            f"The model runs {patched.config.attention} without weights of MHLA: sparse attention has none, and "
            "diffusers' own set_attn_processor makes them at the first forward."
        )
    return layers


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Let the model attend as before the patch, in this thread alone; ValueError for diffusers' own form of a patch."""
    handles = require_patched(model).values()
    if not all(patched.is_attached for patched in handles):
        raise ValueError(
            "diffusers' own set_attn_processor does not keep the original processors; patch with apply_mhla(pipe, ...)."
        )
    state = held()
    state.off = (*state.off, *handles)
    try:
        yield
    finally:  # takes out its own alone, since generators may end in any order
        off = list(state.off)
        for patched in handles:
            off.remove(patched)
        state.off = tuple(off)
