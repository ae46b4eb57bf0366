"""Patch, change, remove. Each checks everything first, changes nothing until then, and carries out what it planned."""

import logging
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.call import check_denominator
from ..config import (
    AUTOMATIC,
    CausalConfig,
    LayerChoice,
    LinearConfig,
    Patch,
    PatchConfig,
    SparseConfig,
    check_settings,
    is_automatic,
    load_patch,
    parse_layers,
)
from ..families import get_family
from ..settings import check_value
from .any_model import Extras, Grid, any_patches, apply_to_any, change_any, remove_from_any
from .calibrate import check_run, measure_sensitivity, record_calls, refuse_causal
from .finding import (
    find_patched,
    find_transformers,
    is_patched,
    mhla_layers,
    refuse_wrapped,
    require_layers,
)
from .handle import Patched
from .installing import check_removable, install, remove
from .layer import MHLALayer, PatchedLayer, attentions_of, share_parameters
from .processor import MHLAProcessor, holds_weights, make_layer
from .steps import DenoisingLoop
from .weights import OFFLOADED, group_offloading, resized

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""
_SHOWN_NAMES = 4
"""How many layers an error names."""


def apply_mhla(
    model: Model,
    patch: PatchConfig | str | Path | None = None,
    *,
    backend: str = "auto",
    calibration: Callable[[], object] | None = None,
    grid: Grid | None = None,
    extra: Extras = (0, 0),
    **settings: Any,
) -> Model:
    """Replace the self-attention of a pipeline or transformer, in place.

    A patch runs one of three attentions, which the names of its settings decide. ``apply_mhla(pipe)`` takes the
    family's default, sparse attention in the place of softmax attention, which needs no training;
    ``apply_mhla(pipe, density=0.05)`` changes it. ``apply_mhla(pipe, blocks=(7, 3, 5), layers="2/3")`` is the paper's
    MHLA, which has to be adapted; with ``causal`` it sees the past alone. ``apply_mhla(pipe, "wan2.1-t2v-1.3b")`` takes
    a preset. Cross-attention stays as it is. If anything is refused, the model is unchanged.

    Args:
        model: a pipeline (all its supported transformers are patched) or one transformer.
        patch: settings, the name of a preset, or the path of a patch YAML; None for the family's defaults.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        calibration: with ``layers="auto:2/3"``, runs the model on typical inputs, for example
            ``lambda: pipe("a cat", num_inference_steps=4)``. Those layers are replaced whose replacement alone moves
            the output least, which costs one run of each call per layer; their list is recorded in the configuration.
        grid: for a model without a family, whose calls of PyTorch's ``scaled_dot_product_attention`` sparse attention
            then takes: the token grid, such as (21, 30, 52), or a function of the forward's arguments that returns it.
        extra: with ``grid``, the tokens before and after those of the grid in one sequence, such as text, or such a
            function.
        **settings: fields of :class:`MHLAConfig`, :class:`SparseConfig` or :class:`CausalConfig` that replace those of
            ``patch``.

    Returns:
        ``model``.

    Raises:
        ValueError: unsupported model, already patched, a patch for another family, settings that do not fit, or a
            calibration without layers to choose.
    """
    if grid is not None:
        if not isinstance(patch, SparseConfig | None) or backend != "auto" or calibration is not None:
            raise ValueError(
                f"A model without a family (grid={grid!r}) runs sparse attention alone: give fields of SparseConfig, "
                "and neither backend nor calibration."
            )
        check_settings(
            settings, SparseConfig, "For the other attention add the model as a family (docs/add-a-model.md)."
        )
        apply_to_any(model, (patch or SparseConfig()).replace(**settings), grid, extra)
        return model
    transformers = find_transformers(model)
    if not isinstance(patch, PatchConfig | str | Path | None):
        raise ValueError(
            f"patch={patch!r} must be settings such as MHLAConfig(...), the name of a preset or the path of a patch "
            "YAML; single settings are keywords, for example blocks=(4, 4)."
        )
    chosen = load_patch(patch) if isinstance(patch, str | Path) else patch
    configs = {}
    for name, transformer in transformers.items():
        family = get_family(transformer)
        if isinstance(chosen, Patch) and chosen.family != family.name:
            raise ValueError(
                f"This patch is for the {chosen.family!r} family (made for {chosen.base_model}), but the model belongs "
                f"to {family.name!r}."
            )
        config = chosen.config if isinstance(chosen, Patch) else chosen
        configs[name] = family.complete(settings) if config is None else config.replace(**settings)
    if calibration is not None:
        check_run(calibration, "calibration")
        refuse_causal(configs.values(), "calibration")
        if not any(is_automatic(config.layers) for config in configs.values()):
            raise ValueError("calibration chooses layers, and this patch names them; set layers='auto:2/3' as well.")
        configs = _choose_automatically(transformers, configs, calibration, backend)
    plans = [plan_patch(transformers[name], MHLAProcessor(config, backend=backend)) for name, config in configs.items()]
    try:
        for patched, layers in plans:
            install(patched, layers, model)
    except BaseException:  # no memory, or interrupted
        for patched, _ in plans:
            if is_patched(patched.transformer):
                remove_mhla(patched.transformer)
        raise
    for patched, _ in plans:
        _tell_what_runs(patched)
    return model


def _tell_what_runs(patched: Patched) -> None:
    """Log which attention a new patch runs, and warn where it has yet to be adapted; not of one without weights."""
    if all(parameter.is_meta for parameter in patched.transformer.parameters()):
        return
    config, kind = patched.config, type(patched.transformer).__name__
    runs = f"{config.attention} in {len(patched.layers)} of the {len(patched.attentions)} self-attentions of {kind}"
    if isinstance(config, LinearConfig) and patched.family.computes == "softmax":
        logger.warning(
            "%s: nothing of it is adapted yet, so the outputs are not usable. Train it, or load an adapted patch with "
            "load_mhla(). Sparse attention, apply_mhla(model), needs no training.",
            runs,
        )
    else:
        logger.info("%s", runs)


def plan_patch(transformer: nn.Module, processor: MHLAProcessor) -> tuple[Patched, dict[str, PatchedLayer]]:
    """Check everything and change nothing: the handle to install, and the new layer of every attention to patch.

    Raises:
        ValueError: unsupported or offloaded transformer, already patched, or settings that do not fit.
    """
    if is_patched(transformer):
        running = " and ".join({layer.config.attention for layer in mhla_layers(transformer).values()}) or "MHLA"
        raise ValueError(
            f"This {type(transformer).__name__} is already patched with {running}; change_mhla() changes its settings, "
            "or call remove_mhla() first."
        )
    patched, config = Patched(transformer, processor), processor.config
    chosen = _chosen_attentions(patched, config)
    return patched, {name: make_layer(attn, config, patched.family) for name, attn in chosen.items()}


def _choose_automatically(
    transformers: Mapping[str, nn.Module],
    configs: Mapping[str, PatchConfig],
    calibration: Callable[[], object],
    backend: str,
) -> dict[str, PatchConfig]:
    """Put the layers that hurt least in place of "auto:…", and leave the transformers as they are."""
    for config in configs.values():
        if isinstance(config, LinearConfig) and config.output_norm:
            raise ValueError(
                "layers='auto:…' cannot judge an output norm that is not fitted yet. Patch all layers, call "
                "calibrate_output_norm(), look at layer_sensitivity(), and patch again with the list of layers."
            )
    plans = {
        name: plan_patch(transformers[name], MHLAProcessor(config.replace(layers="all"), backend=backend))
        for name, config in configs.items()
    }
    calls = record_calls(transformers, calibration)
    chosen = {}
    for name, (patched, layers) in plans.items():
        install(patched, layers, None)
        try:
            sensitivities = measure_sensitivity(patched, calls[name])
        finally:
            remove(patched)
        values = list(sensitivities.values())
        least = sorted(range(len(values)), key=values.__getitem__)
        count = len(choose_layers(str(configs[name].layers).removeprefix(AUTOMATIC), len(values)))
        chosen[name] = configs[name].replace(layers=tuple(sorted(least[:count])))
    return chosen


def set_attn_processor(transformer: Any, processor: Any) -> None:
    """Set processors as diffusers' ``set_attn_processor`` does, for a transformer of any family, DiT included.

    A :class:`MHLAProcessor` goes to the self-attentions that its configuration chooses and makes their weights at once.
    Another processor goes to every attention, and a dict (name → processor, as :func:`attn_processors` returns) gives
    each its own; the dict is left as it is.

    Raises:
        ValueError: unsupported transformer or a class of one, already patched, what is not a processor, or a dict whose
            names are not those of the attentions.
    """
    refuse_wrapped(transformer)
    if isinstance(processor, MHLAProcessor):
        patched, layers = plan_patch(transformer, processor)
        install(patched, layers, None)
        return
    get_family(transformer)
    attentions = attentions_of(transformer)
    names = {f"{name}.processor": module for name, module in attentions.items()}
    for one in processor.values() if isinstance(processor, Mapping) else [processor]:
        if isinstance(one, type) or not callable(one):
            raise ValueError(
                f"processor={one!r} is not a processor; allowed: MHLAProcessor(...), a processor of diffusers "
                "such as AttnProcessor2_0(), or a dict of them as attn_processors(transformer) gives it."
            )
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
    """Return processors by name as diffusers' ``attn_processors`` does, for a transformer of any family, DiT included.

    Raises:
        ValueError: a pipeline, a class, or no model.
    """
    refuse_wrapped(transformer)
    if not isinstance(transformer, nn.Module):
        get_family(transformer)
    return {f"{name}.processor": module.get_processor() for name, module in attentions_of(transformer).items()}


def remove_mhla(model: Model, *, strict: bool = False) -> Model:
    """Undo :func:`apply_mhla` and :func:`load_mhla`: restore processors, modules, hooks and methods.

    Weights of the model that an adapted patch replaced are restored bit for bit.

    Attentions that were patched through diffusers' own ``set_attn_processor``, which keeps no record, get the
    processors that diffusers gives a new model.

    Args:
        model: pipeline or transformer. One that is not patched stays as it is, and the log says so.
        strict: raise for a model that is not patched.

    Returns:
        ``model``.

    Raises:
        ValueError: no model, with ``strict`` one that is not patched, or weights that the patch replaced and that
            cannot be brought back. The model is unchanged then.
    """
    handles = find_patched(model).values()
    if not handles and any_patches(model):
        remove_from_any(model)
        return model
    if not handles:
        refuse_wrapped(model)
        if strict or not (isinstance(model, nn.Module) or hasattr(model, "components")):
            raise ValueError(f"{type(model).__name__} is not patched with MHLA; there is nothing to remove.")
        logger.warning("%s is not patched; nothing was removed.", type(model).__name__)
    for patched in handles:
        check_removable(patched)
    for patched in handles:
        remove(patched, model)
    return model


def change_mhla(model: Model, *, backend: str | None = None, **settings: Any) -> Model:
    """Change blocks, layers, density, backend or other settings of a patched model, without loading it again.

    What the layers that stay patched have learned is kept: mixing matrices are interpolated to other blocks, as
    :func:`load_mhla` does it, and what has learned nothing is as in a fresh layer of the new settings. A layer that is
    patched now starts fresh, and one that is no longer patched gets its original processor. A warning names what was
    learned and is dropped. Another backend and other dense steps keep all parameters; with other blocks or
    parts layers have new ones, so make optimizers after it. Where something else has set processors, the patch runs
    again. If anything is refused the model is unchanged.

    Args:
        model: patched pipeline or transformer.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`; None for the one it has.
        **settings: fields of its :class:`PatchConfig` that change; which attention runs stays.

    Returns:
        ``model``.

    Raises:
        ValueError: not patched or switched off, settings that do not fit, or weights that they do not fit.
    """
    if any_patches(model):
        if backend is not None:
            raise ValueError(f"backend={backend!r}: a model without a family takes no backend; leave it out.")
        change_any(model, settings)
        return model
    require_layers(model)
    handles = [patched for patched in find_patched(model).values() if patched.layers]
    plans = [_plan_change(patched, backend, settings) for patched in handles]
    for patched, (processor, layers, _) in zip(handles, plans, strict=True):
        for name, attn in patched.attentions.items():
            if name in layers:
                layers[name].config = processor.config
                attn.mhla = layers[name]
                attn.set_processor(processor)
            elif hasattr(attn, "mhla") or isinstance(attn.processor, MHLAProcessor):
                attn.set_processor(patched.original_processor(attn))
                if hasattr(attn, "mhla"):
                    del attn.mhla
        for attn in attentions_of(patched.transformer).values():
            if isinstance(attn.processor, MHLAProcessor):  # a cross-attention, in diffusers' own form
                attn.set_processor(processor)
        patched.processor = processor
        patched.runs.clear()
        if patched.is_installed and not isinstance(model, nn.Module):
            patched.loop = DenoisingLoop(patched.family, model)
    for loss in (loss for *_, loss in plans if loss is not None):  # when all is done: a warning may be an error
        warnings.warn(loss, stacklevel=2)
    return model


def _plan_change(
    patched: Patched, backend: str | None, settings: Mapping[str, Any]
) -> tuple[MHLAProcessor, dict[str, PatchedLayer], str | None]:
    """Check other settings and change nothing.

    Returns:
        The new processor; name of every attention that is to be patched, with a new layer or the one it has; and a
        warning about what layers have learned and lose.

    Raises:
        ValueError: switched off, settings that do not fit, or weights that they do not fit.
    """
    if patched.running_processor().is_off:
        raise ValueError("The patch is switched off; leave mhla_disabled() before change_mhla().")
    attentions, family = patched.attentions, patched.family
    if any(not isinstance(getattr(attn, "mhla", None), PatchedLayer | None) for attn in attentions.values()):
        raise ValueError("An adapter has copies of the MHLA layers (modules_to_save); merge or unload it first.")
    before, old_config, old_processor = patched.layers, patched.config, patched.running_processor()
    config = old_config.replace(**settings)
    chosen = _chosen_attentions(patched, config)
    if config.asks_for_dense_steps and not patched.is_installed:
        raise ValueError(
            f"{config.dense_words} needs a patch of apply_mhla(), which keeps the processors of "
            "before; diffusers' own set_attn_processor drops them."
        )
    if isinstance(config, LinearConfig) and config.mixing_init != getattr(old_config, "mixing_init", None):
        raise ValueError(
            f"mixing_init={config.mixing_init!r} says how fresh mixing matrices begin, and these are kept; call "
            "remove_mhla() and apply_mhla() to begin again."
        )
    processor = MHLAProcessor(config, grid=old_processor.grid, backend=backend or old_processor.backend)
    if "_attention_backend" in vars(old_processor):  # set since it was patched, and not the class's None
        processor._attention_backend = old_processor._attention_backend
    keeps_parameters = share_parameters(old_config, config)
    tensors = {f"{name}.mhla.{key}": x for name, layer in before.items() for key, x in layer.state_dict().items()}
    fitting = resized(tensors, old_config, config)
    layers: dict[str, PatchedLayer] = {}
    dropped = set[str]()
    for name, attn in chosen.items():
        old = before.get(name)
        if old is not None and keeps_parameters:
            layers[name] = old
        else:
            layers[name] = make_layer(attn, config, family)
            layers[name].original_processor = processor.enter(attn) if old is None else old.original_processor
        if old is None:
            continue
        fresh = make_layer(attn, old_config, family).state_dict()
        names = {key for key, x in old.state_dict().items() if not x.is_meta and not torch.equal(x, fresh[key])}
        if not keeps_parameters:
            prefix = f"{name}.mhla."
            own = {key.removeprefix(prefix): x for key, x in fitting.items() if key.startswith(prefix)}
            # what has learned nothing starts as in a fresh layer of the new settings
            _carry_over(name, old, layers[name], {key: x for key, x in own.items() if key in names or x.is_meta})
        dropped |= names - set(layers[name].state_dict())
    loss = f"What the patch has learned of {', '.join(sorted(dropped))} is dropped." if dropped else None
    return processor, layers, loss


def _carry_over(name: str, before: PatchedLayer, after: PatchedLayer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a new layer the tensors of the one before, as far as it has them, and what is frozen stays frozen."""
    state = after.state_dict(keep_vars=True)
    for key in state.keys() & tensors.keys():
        if state[key].shape != tensors[key].shape:
            raise ValueError(
                f"{name}.mhla.{key} has shape {tuple(tensors[key].shape)}, which these settings would make "
                f"{tuple(state[key].shape)}; what it has learned cannot be carried over. Call remove_mhla() and "
                "apply_mhla() to begin again."
            )
        with torch.no_grad():
            state[key].copy_(tensors[key])
    old = dict(before.named_parameters())
    for key, parameter in after.named_parameters():
        learnable = [getattr(layer.config, "mixing_learnable", None) for layer in (before, after)]
        is_set_anew = key == "mixing" and learnable[0] != learnable[1]
        if key in old and not is_set_anew:
            parameter.requires_grad_(old[key].requires_grad)


def register_mixing_clip(optimizer: torch.optim.Optimizer, model: Any) -> RemovableHandle:
    """Clip every mixing matrix into (0, 1) after each step of ``optimizer``, as the paper does (Sec. 4.2).

    Layers whose configuration has ``mixing_clip=False`` are left alone.

    Raises:
        ValueError: if the model has no mixing matrices, or ``optimizer`` was made before them and lacks a matrix that
            takes gradients.
    """
    layers = [layer for layer in require_layers(model).values() if isinstance(layer, MHLALayer)]
    if not layers:
        raise ValueError("The model runs sparse attention, which has no mixing matrix to clip.")
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


# Which settings fit, and which layers they choose


def _chosen_attentions(patched: Patched, config: PatchConfig) -> dict[str, Any]:
    """Choose self-attentions by name, after checking that the transformer can have these settings.

    Raises:
        ValueError: settings that do not fit, offloaded weights, or attentions whose processors have weights.
    """
    family, kind = patched.family, type(patched.transformer).__name__
    if isinstance(config, LinearConfig):
        if len(config.blocks) != family.axes:
            raise ValueError(
                f"blocks={config.blocks} has {len(config.blocks)} axes, but {kind} has {family.axes}; for example "
                f"blocks={family.mhla_blocks}."
            )
        causal = config.causal if isinstance(config, CausalConfig) else None
        extra = family.adapter.has_extra
        check_denominator(config.feature_map, config.eps, config.normalize, extra, causal)
        if family.adapter.rope_by_head and config.rope != "before":
            raise ValueError(
                f"rope={config.rope!r} would need one table for all heads, and {kind} rotates every head by other "
                "angles; set rope='before'."
            )
    elif family.computes != "softmax":
        raise ValueError(
            f"{config.attention.capitalize()} approximates softmax attention, and the own attention of {kind} is "
            f"{family.computes}; patch it with MHLA, blocks={family.mhla_blocks}."
        )
    if isinstance(config, CausalConfig) and family.adapter.has_extra:
        raise ValueError(
            f"causal={config.causal!r} orders the tokens of the grid, and {kind} attends to extra tokens too, such as "
            "text or a class token, which have no place in that order; leave it out."
        )
    if (why := family.why_not_patched(patched.transformer, config)) is not None:
        raise ValueError(why)
    if group_offloading(patched.transformer):
        raise ValueError(OFFLOADED)
    found = list(patched.attentions.items())
    indices = choose_layers(config.layers, len(found))
    if not indices:
        raise ValueError(f"layers={config.layers!r} chooses none of the {len(found)} layers.")
    processors = [getattr(attn, "processor", None) for _, attn in found]
    holding = [index for index in indices if holds_weights(processors[index])]
    if holding:
        names = ", ".join(found[index][0] for index in holding[:_SHOWN_NAMES])
        more = f" and {len(holding) - _SHOWN_NAMES} more" if len(holding) > _SHOWN_NAMES else ""
        others = [index for index in indices if index not in holding]
        way_out = f"Leave these layers as they are with layers={others}, or take" if others else "Take"
        raise ValueError(
            f"{names}{more} run {type(processors[holding[0]]).__name__}, which has weights of its own, as those of "
            f"IP-Adapters have, and what it adds would be lost. {way_out} the adapter away first, for example with "
            "pipe.unload_ip_adapter()."
        )
    return dict(found[index] for index in indices)


def choose_layers(choice: LayerChoice, count: int) -> list[int]:
    """Choose the layers to replace: their indices, ascending.

    A fraction keeps the remaining layers evenly spread, beginning with layer 0: "2/3" keeps layers 0, 3, 6, …, the
    hybrid of the paper's Sec. 5.3.

    Args:
        choice: "all", a fraction as text or number, or indices; negative indices count from the end.
        count: number of self-attentions of the model.

    Raises:
        ValueError: unknown choice, an index out of range, or a choice that is made by measuring.
    """
    parsed = parse_layers(choice)
    if is_automatic(choice):
        raise ValueError(
            f"layers={choice!r} is chosen by measuring an unpatched model: call remove_mhla(model) if it is patched, "
            f"and apply_mhla(model, layers={choice!r}, calibration=run), with run() a function that runs the model on "
            "typical inputs. Or give the list of layers that it chose."
        )
    if isinstance(parsed, Fraction):
        kept = 1 - parsed
        return [i for i in range(count) if not kept or (i > 0 and int(i * kept) == int((i - 1) * kept))]
    check_value("layers", list(parsed), list[int], at_least=-count, at_most=count - 1)
    return sorted({index % count for index in parsed})
