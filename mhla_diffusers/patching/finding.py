"""Find what can be patched or is patched, from a pipeline or a model, and refuse the rest."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..config import MHLAConfig
from ..families import find_family, get_family, unwrapped
from .handle import Patched, installed_on
from .layer import MHLALayer, attentions_of, layer_of
from .processor import MHLAProcessor


def find_patched(model: Any) -> dict[str, Patched]:
    """The handle of every patched transformer of a pipeline by component name, or of a model as ``transformer``."""
    found = {name: _patched(transformer) for name, transformer in supported_transformers(model).items()}
    return {name: patched for name, patched in found.items() if patched is not None}


def _patched(transformer: nn.Module) -> Patched | None:
    held = installed_on(transformer)
    if held is not None:
        return held
    attentions = attentions_of(transformer).values()
    processor = next((attn.processor for attn in attentions if isinstance(attn.processor, MHLAProcessor)), None)
    if processor is None and not any(hasattr(attn, "mhla") for attn in attentions):
        return None
    return Patched(transformer, processor)


def require_patched(model: Any) -> dict[str, Patched]:
    """Like :func:`find_patched`.

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
    return bool(find_patched(model))


def mhla_layers(model: Any) -> dict[str, MHLALayer]:
    """Name and module of every MHLA layer that is in use, put in by a patch or built into the model, as into VLT.

    The name is the attention's with ``.mhla``; for a pipeline the component's name stands before it.
    """
    if not supported_transformers(model):
        return _built_in_layers(model)
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{name}.mhla": layer
        for component, patched in find_patched(model).items()
        for name, layer in patched.layers.items()
    }


def require_layers(model: Any) -> dict[str, MHLALayer]:
    """Like :func:`mhla_layers`.

    Raises:
        ValueError: if there are none, with the way to get them, or to a model that lies inside this one.
    """
    layers = mhla_layers(model)
    if not layers:
        require_patched(model)
        raise ValueError(
            "The model has no MHLA weights yet: diffusers' own set_attn_processor makes them at the first forward. "
            "Run one, or use mhla_diffusers.set_attn_processor(transformer, processor)."
        )
    return layers


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Within the context the model attends as before the patch, with the same weights.

    Raises:
        ValueError: if the model is not patched.
    """
    handles = require_patched(model).values()
    with ExitStack() as stack:
        for patched in handles:
            stack.enter_context(patched.disabled())
        yield


# Which transformers there are, and what is refused of them


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """The supported transformers of a pipeline by component name, or the transformer itself as ``transformer``.

    Raises:
        ValueError: if there is none, a model that has MHLA built in, or what :func:`refuse_wrapped` refuses.
    """
    refuse_wrapped(model)
    found = supported_transformers(model)
    if found:
        return found
    layers = _built_in_layers(model)
    if layers:
        raise ValueError(
            f"{type(model).__name__} has MHLA built in ({len(layers)} layers, the first is {next(iter(layers))}), so "
            "nothing can patch it or take the patch away. Its settings are those of its configuration, such as "
            "VLTConfig(mhla=…), and its save_pretrained() saves it."
        )
    for name, module in _modules(model).items():
        if name.startswith("transformer"):
            get_family(module)
    components = ", ".join(getattr(model, "components", {})) or "none"
    raise ValueError(
        f"{type(model).__name__} has no transformer that MHLA supports (components: {components}). Pass a pipeline "
        'or a model that the page "Models" of the documentation (docs/models.md) lists.'
    )


def supported_transformers(model: Any) -> dict[str, nn.Module]:
    """Like :func:`find_transformers`, but empty if there is none.

    A language or vision model in a pipeline encodes its prompts or pictures and is left alone.
    """
    is_alone = isinstance(model, nn.Module)
    return {
        name: module
        for name, module in _modules(model).items()
        if (family := find_family(module)) is not None and (is_alone or family.is_diffusion)
    }


def _modules(model: Any) -> dict[str, nn.Module]:
    components = {"transformer": model} if isinstance(model, nn.Module) else getattr(model, "components", {})
    return {name: unwrapped(part) for name, part in components.items() if isinstance(part, nn.Module)}


def _built_in_layers(model: Any) -> dict[str, MHLALayer]:
    """Layers of a model that has MHLA without a patch: an ``nn.Module`` with none of a family in it.

    PEFT may have wrapped it.
    """
    if not isinstance(model, nn.Module) or any(find_family(module) is not None for module in model.modules()):
        return {}
    layers = {path: layer_of(module) for path, module in unwrapped(model).named_modules()}
    return {f"{path}.mhla": layer for path, layer in layers.items() if layer is not None}


def refuse_wrapped(model: Any) -> None:
    """Raise if the model that was meant lies inside what was given.

    Raises:
        ValueError: a pipeline of transformers, or PEFT's wrapper, with the way to what is inside.
    """
    inside = getattr(model, "model", None)
    if not isinstance(model, nn.Module) and isinstance(inside, nn.Module) and find_family(inside) is not None:
        raise ValueError(
            f"{type(model).__name__} has its {type(inside).__name__} as .model; pass that: pipe.model of a pipeline of "
            "transformers."
        )
    for name, module in _modules(model).items():
        # of PEFT's PeftModel, which would go on with a patched model inside, but is saved and called in its own ways
        take_out: Any = getattr(module, "get_base_model", None)
        if callable(take_out) and find_family(take_out()) is not None:
            raise ValueError(
                f"The {name} is wrapped in PEFT's {type(module).__name__}. Pass the model inside, which keeps the "
                f"adapters: {name}.get_base_model(), in a pipeline pipe.{name} = pipe.{name}.get_base_model(). "
                f"diffusers' own {name}.add_adapter(...) wraps nothing."
            )


def refuse_language(model: Any, what: str) -> None:
    """Raise if a model predicts from the past alone, where ``what`` compares with attention that sees everything.

    Raises:
        ValueError: naming it.
    """
    for transformer in supported_transformers(model).values():
        if get_family(transformer).kind == "language":
            raise ValueError(
                f"{what} compares a patch with attention that sees all tokens, and {type(transformer).__name__} is a "
                "language model; patch it and train it, as docs/language.md shows."
            )


def require_diffusion(model: Any, what: str) -> None:
    """Raise unless all supported models of a pipeline are diffusion models, of which ``what`` compares predictions.

    Raises:
        ValueError: naming the one that is not.
    """
    for transformer in supported_transformers(model).values():
        family = get_family(transformer)
        if not family.is_diffusion:
            raise ValueError(
                f"{what} compares what a diffusion model predicts in its denoising steps, and "
                f"{type(transformer).__name__} is a {family.kind} model, which has none."
            )


def refuse_causal(configs: Iterable[MHLAConfig], what: str) -> None:
    """Raise if a patch is causal, where only attention that sees everything can stand in its place.

    Raises:
        ValueError: naming the order that the patch has.
    """
    for config in configs:
        if config.causal is not None:
            raise ValueError(
                f"{what} goes by attention that sees all tokens, and a patch with causal={config.causal!r} is not to "
                "see later ones: its mixing matrices and λ are trained, as docs/stream.md shows. causal=None is for "
                "attention that knows no order."
            )
