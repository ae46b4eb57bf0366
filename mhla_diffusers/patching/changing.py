"""Change the settings of a patched model in place."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..families import Family, get_family
from .denoising_steps import StepHooks
from .finding import attentions_of, find_transformers, hook_of, mhla_layers, require_layers
from .layer import MHLALayer, layer_of
from .other_processors import ProcessorWatch
from .plan import check_settings, choose_attentions
from .processor import MHLAProcessor, make_layer
from .removal import original_processor
from .resizing import resized

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def change_mhla(model: Model, *, backend: str | None = None, **settings: Any) -> Model:
    """Change blocks, layers, density, backend or other settings of a patched model, without loading it again.

    What the layers that stay patched have learned is kept: mixing matrices are interpolated to other blocks, as
    :func:`load_mhla` does it; a layer that is patched now starts fresh, and one that is no longer patched gets its
    processor of before. A warning tells what was learned and has no place with other settings, or was learned with
    other uniform blocks. Layers have new parameters afterwards, so make optimizers after it. Where something else has
    set processors, MHLA runs again. If anything is refused the model is unchanged.

    Args:
        model: patched pipeline or transformer.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`; None for the one it has.
        **settings: fields of :class:`MHLAConfig` that change.

    Returns:
        ``model``.

    Raises:
        ValueError: not patched or switched off, settings that do not fit, or weights that they do not fit.
    """
    require_layers(model)
    patched = [part for part in find_transformers(model).values() if mhla_layers(part)]
    changes = [make_change(part, backend, settings) for part in patched]
    for change in changes:
        if change.loss is not None:
            warnings.warn(change.loss, stacklevel=2)
        carry_out_change(change, model)
    return model


@dataclass(frozen=True)
class Change:
    """Checked other settings of one patched transformer."""

    transformer: nn.Module
    processor: MHLAProcessor
    layers: dict[str, MHLALayer]
    """Name of every attention that is to be patched, with its new layer."""
    loss: str | None = None
    """What to tell of weights that were learned and have no place any more, or are not for the new settings."""


def make_change(transformer: nn.Module, backend: str | None, settings: Mapping[str, Any]) -> Change:
    """Check other settings and change nothing.

    Args:
        transformer: patched.
        backend: None for the one it has.
        settings: fields of :class:`MHLAConfig` that change.

    Raises:
        ValueError: switched off, settings that do not fit, or weights that they do not fit.
    """
    watch = hook_of(transformer, ProcessorWatch)
    if watch is not None and watch.paused:
        raise ValueError("The patch is switched off; leave mhla_disabled() before change_mhla().")
    if any(_is_wrapped(attn) for attn in attentions_of(transformer).values()):
        raise ValueError("An adapter has copies of the MHLA layers (modules_to_save); merge or unload it first.")
    family = get_family(transformer)
    attentions = family.self_attentions(transformer)
    before = {name: layer for name, attn in attentions.items() if (layer := layer_of(attn)) is not None}
    some_layer, old_processor = next(iter(before.values())), _processor(transformer, watch)
    config = some_layer.config.replace(**settings)
    check_settings(transformer, config)
    if config.softmax_steps and watch is None:
        raise ValueError(
            f"softmax_steps={config.softmax_steps!r} needs a patch of apply_mhla(), which keeps the processors of "
            "before; diffusers' own set_attn_processor drops them."
        )
    if config.mixing_init != some_layer.config.mixing_init:
        raise ValueError(
            f"mixing_init={config.mixing_init!r} says how fresh mixing matrices begin, and these are kept; call "
            "remove_mhla() and apply_mhla() to begin anew."
        )
    chosen = choose_attentions(transformer, config)
    layers = {name: make_layer(attn, config, family) for name, attn in chosen.items()}
    kept = {name: before[name] for name in chosen if name in before}
    tensors = {f"{name}.mhla.{key}": x for name, layer in kept.items() for key, x in layer.state_dict().items()}
    fitting = resized(tensors, some_layer.config, config)
    for name, layer in layers.items():
        layer.original_processor = before[name].original_processor if name in before else attentions[name].processor
    for name, old in kept.items():
        prefix = f"{name}.mhla."
        own = {key.removeprefix(prefix): x for key, x in fitting.items() if key.startswith(prefix)}
        _carry_over(name, old, layers[name], own)
    processor = MHLAProcessor(config, grid=old_processor.grid, backend=backend or old_processor.backend)
    if "_attention_backend" in vars(old_processor):  # set since it was patched, and not the class's None
        processor._attention_backend = old_processor._attention_backend
    loss = _loss({name: (attentions[name], old, layers[name]) for name, old in kept.items()}, family)
    return Change(transformer, processor, layers, loss)


def _loss(layers: Mapping[str, tuple[Any, MHLALayer, MHLALayer]], family: Family) -> str | None:
    """What to tell of what some layers have learned, given each with its attention and the layer after it."""
    dropped, learned = set(), set()
    for attn, old, new in layers.values():
        fresh = make_layer(attn, old.config, family).state_dict()
        names = {key for key, x in old.state_dict().items() if not x.is_meta and not torch.equal(x, fresh[key])}
        dropped |= names - set(new.state_dict())
        learned |= names
    if not learned:
        return None
    _, old, new = next(iter(layers.values()))
    before, after = old.config, new.config
    tells = [f"What the patch has learned of {', '.join(sorted(dropped))} is dropped."] if dropped else []
    if (before.sparse, before.block_size) != (after.sparse, after.block_size):
        was, now = (
            f"blocks of {config.block_size} tokens" if config.sparse == "content" else f"sparse={config.sparse!r}"
            for config in (before, after)
        )
        tells.append(f"The patch has learned with {was}, and runs with {now} now; adapt it again.")
    return " ".join(tells) or None


def _processor(transformer: nn.Module, watch: ProcessorWatch | None) -> MHLAProcessor:
    """The processor of the patch as it is, also where something else has set others."""
    if watch is not None:
        return watch.processor
    found = (attn.processor for attn in attentions_of(transformer).values())
    processor = next((one for one in found if isinstance(one, MHLAProcessor)), None)
    if processor is None:
        raise ValueError(
            "No attention of this model runs MHLA now: its patch is switched off, or other processors have been set "
            "since. Leave mhla_disabled(), or set the processor again with transformer.set_attn_processor()."
        )
    return processor


def _is_wrapped(attn: Any) -> bool:
    return not isinstance(getattr(attn, "mhla", None), MHLALayer | None)


def _carry_over(name: str, before: MHLALayer, after: MHLALayer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a new layer the tensors of the one before, as far as it has them, and what is frozen stays frozen."""
    state = after.state_dict(keep_vars=True)
    for key in state.keys() & tensors.keys():
        if state[key].shape != tensors[key].shape:
            raise ValueError(
                f"{name}.mhla.{key} has shape {tuple(tensors[key].shape)}, which these settings would make "
                f"{tuple(state[key].shape)}; what it has learned cannot be carried over. Call remove_mhla() and "
                "apply_mhla() to begin anew."
            )
        with torch.no_grad():
            state[key].copy_(tensors[key])
    old = dict(before.named_parameters())
    for key, parameter in after.named_parameters():
        is_set_anew = key == "mixing" and before.config.mixing_learnable != after.config.mixing_learnable
        if key in old and not is_set_anew:
            parameter.requires_grad_(old[key].requires_grad)


def carry_out_change(change: Change, model: Any) -> None:
    """Change a transformer, which is ``model`` or a part of it."""
    transformer = change.transformer
    family, watch = get_family(transformer), hook_of(transformer, ProcessorWatch)
    own = family.self_attentions(transformer)
    for attn in attentions_of(transformer).values():
        name = next((name for name, one in own.items() if one is attn), None)
        if name in change.layers:
            attn.mhla = change.layers[name]
            attn.set_processor(change.processor)
        elif name is not None and (hasattr(attn, "mhla") or isinstance(attn.processor, MHLAProcessor)):
            attn.set_processor(original_processor(attn, family, transformer))
            if hasattr(attn, "mhla"):
                del attn.mhla
        elif isinstance(attn.processor, MHLAProcessor):  # a cross-attention, in diffusers' own form
            attn.set_processor(change.processor)
    if watch is not None:
        watch.processor = change.processor
    steps = hook_of(transformer, StepHooks)
    if steps is not None:
        steps.softmax_steps = change.processor.config.softmax_steps
        if not isinstance(model, nn.Module):
            steps.call_from(model)
