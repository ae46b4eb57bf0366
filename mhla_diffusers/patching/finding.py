"""Find what can be patched or is patched: transformers, their attentions and processors, their MHLA layers."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..config import MHLAConfig
from ..families import find_family, get_family, unwrapped
from .layer import MHLALayer, layer_of
from .processor import MHLAProcessor

Hook = TypeVar("Hook")


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """The supported transformers of a pipeline by component name, or the transformer itself as ``transformer``.

    Raises:
        ValueError: if there is none, a model that has MHLA built in, or what :func:`refuse_wrapped` refuses.
    """
    refuse_wrapped(model)
    found = supported_transformers(model)
    if not found:
        _refuse_built_in(model)
        for name, module in _modules(model).items():
            if name.startswith("transformer"):
                get_family(module)
        components = ", ".join(getattr(model, "components", {})) or "none"
        raise ValueError(
            f"{type(model).__name__} has no transformer that MHLA supports (components: {components}). Pass a pipeline "
            'or a model that the page "Models" of the documentation (docs/models.md) lists.'
        )
    return found


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
    """Raise if a model predicts from the past alone, where what is asked for compares what sees everything.

    Args:
        model: a pipeline or a transformer.
        what: is asked for.

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
    """Raise unless all supported models of a pipeline are diffusion models.

    Args:
        model: a pipeline or a transformer.
        what: is asked for.

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

    Args:
        configs: of all layers or transformers.
        what: is asked for.

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


def attentions_of(transformer: nn.Module) -> dict[str, Any]:
    """Name and module of every attention, cross-attention included."""
    return {name: module for name, module in transformer.named_modules() if hasattr(module, "set_processor")}


def hook_of(transformer: nn.Module, kind: type[Hook]) -> Hook | None:
    """The forward pre-hook of a kind that patching has put on a transformer."""
    hooks = transformer._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


def trunk_of(transformer: nn.Module) -> Any:
    """The module of a transformer that is given the pixels or latents, which has the hooks of the token grid."""
    return get_family(transformer).trunk(transformer)


def is_patched(model: Any) -> bool:
    """Whether any attention of a pipeline or transformer runs MHLA or holds its weights."""
    return any(
        hasattr(attn, "mhla") or isinstance(attn.processor, MHLAProcessor)
        for transformer in supported_transformers(model).values()
        for attn in attentions_of(transformer).values()
    )


def _built_in_layers(model: Any) -> dict[str, MHLALayer]:
    """Like :func:`mhla_layers`, of a model that has MHLA without a patch: an ``nn.Module`` with none of a family in it.

    PEFT may have wrapped it.
    """
    if not isinstance(model, nn.Module) or any(find_family(module) is not None for module in model.modules()):
        return {}
    layers = {path: layer_of(module) for path, module in unwrapped(model).named_modules()}
    return {f"{path}.mhla": layer for path, layer in layers.items() if layer is not None}


def _refuse_built_in(model: Any) -> None:
    layers = _built_in_layers(model)
    if layers:
        raise ValueError(
            f"{type(model).__name__} has MHLA built in ({len(layers)} layers, the first is {next(iter(layers))}), so "
            "nothing can patch it or take the patch away. Its settings are those of its configuration, such as "
            "VLTConfig(mhla=…), and its save_pretrained() saves it."
        )


def mhla_layers(model: Any) -> dict[str, MHLALayer]:
    """Name and module of every MHLA layer that is in use, put in by a patch or built into the model, as into VLT.

    The name is the attention's with ``.mhla``; for a pipeline the component's name stands before it.
    """
    transformers = supported_transformers(model)
    if not transformers:
        return _built_in_layers(model)
    prefixes = {name: f"{name}." if not isinstance(model, nn.Module) else "" for name in transformers}
    return {
        f"{prefixes[name]}{path}.mhla": layer
        for name, transformer in transformers.items()
        for path, attn in attentions_of(transformer).items()
        if (layer := layer_of(attn)) is not None
    }


def require_layers(model: Any) -> dict[str, MHLALayer]:
    """Like :func:`mhla_layers`.

    Raises:
        ValueError: if there are none, with the way to get them, or to a model that lies inside this one.
    """
    layers = mhla_layers(model)
    if not layers:
        refuse_wrapped(model)
    if not layers and is_patched(model):
        raise ValueError(
            "The model has no MHLA weights yet: diffusers' own set_attn_processor makes them at the first forward. "
            "Run one, or use mhla_diffusers.set_attn_processor(transformer, processor)."
        )
    if not layers:
        raise ValueError("The model is not patched with MHLA; call apply_mhla() first.")
    return layers


def attn_processors(transformer: Any) -> dict[str, Any]:
    """Like diffusers' ``attn_processors``, for a transformer of any family, DiT included: name → processor.

    Raises:
        ValueError: a pipeline, or no model.
    """
    if not isinstance(transformer, nn.Module):
        get_family(transformer)
    return {f"{name}.processor": module.get_processor() for name, module in attentions_of(transformer).items()}


def register_mixing_clip(optimizer: torch.optim.Optimizer, model: Any) -> RemovableHandle:
    """Clip every mixing matrix into (0, 1) after each step of ``optimizer``, as the paper does (Sec. 4.2).

    Layers whose configuration has ``mixing_clip=False`` are left alone.

    Raises:
        ValueError: if the model has no MHLA layers, or ``optimizer`` was made before them and lacks a matrix that
            takes gradients.
    """
    layers = list(require_layers(model).values())
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(layer.mixing.requires_grad and id(layer.mixing) not in optimized for layer in layers):
        raise ValueError(
            "The optimizer lacks a mixing matrix that takes gradients. Make the optimizer after apply_mhla(), or "
            "freeze the matrices with mixing_learnable=False."
        )

    def clip(*_: Any) -> None:
        for layer in layers:
            layer.clip_mixing_()

    return optimizer.register_step_post_hook(clip)
