"""Patch, change, remove. Each checks everything first, changes nothing until then, and carries out what it planned."""

import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention import BACKENDS
from ..attention.call import check_denominator
from ..attention.layout import check_grid
from ..config import (
    CausalConfig,
    LayerChoice,
    LinearConfig,
    Patch,
    PatchConfig,
    SparseConfig,
    check_settings,
    load_patch,
    parse_layers,
)
from ..errors import check, check_choice
from ..families import Family, find_family, get_family, why_refused
from .call import Counts
from .describe import applied_in_words
from .finding import (
    find_patched,
    find_transformers,
    is_patched,
    models_of,
    refuse_wrapped,
    require_layers,
    require_patched,
)
from .layer import OFFLOADED, MHLALayer, attentions_of, layer_of, make_layer, setting_of_parameters
from .patched import Facts, Patched, check_counts
from .processor import MHLAProcessor, holds_weights, is_fused
from .weights import base_weights, check_writable, group_offloading, has_lora, remove_lora

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""
Grid = tuple[int, ...] | Callable[..., tuple[int, ...]]
Extras = Counts | Callable[..., Counts]
Layers = dict[str, MHLALayer]
"""Name of every self-attention that MHLA is put in → its layer."""


def apply_mhla(
    model: Model,
    patch: PatchConfig | str | Path | None = None,
    *,
    backend: str = "auto",
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
        model: a pipeline (all its supported transformers are patched), an object with ``transformer`` and
            ``scheduler``, or one transformer.
        patch: settings, a profile ("faithful", "balanced" or "fast"), the name of a preset, or the path of a patch
            YAML; None for the family's defaults: "faithful", or MHLA where a model's own attention is linear.
        backend: of MHLA, see :func:`mhla_diffusers.attention.mhla_attention`.
        grid: for a model without a family, whose calls of PyTorch's ``scaled_dot_product_attention`` sparse attention
            then answers: the token grid, such as (21, 30, 52), or a function of the forward's arguments that returns
            it.
        extra: with ``grid``, the tokens before and after those of the grid in one sequence, such as text, or such a
            function.
        **settings: fields of :class:`MHLAConfig`, :class:`SparseConfig` or :class:`CausalConfig` that replace those of
            ``patch``.

    Returns:
        ``model``.

    Raises:
        ValueError: unsupported model, already patched, a patch for another family, or settings that do not fit.
    """
    check_choice("backend", backend, BACKENDS)
    if not isinstance(patch, PatchConfig | str | Path | None):
        raise ValueError(
            f"patch={patch!r} must be settings such as MHLAConfig(...), the name of a preset or the path of a patch "
            "YAML; single settings are keywords, for example blocks=(4, 4)."
        )
    if grid is not None:
        plans = [(patched, Layers()) for patched in _plan_by_grid(model, patch, grid, extra, settings)]
    else:
        transformers = find_transformers(model)
        configs = {name: _config_for(get_family(one), patch, settings) for name, one in transformers.items()}
        plans = [plan_patch(transformers[name], config, model, backend) for name, config in configs.items()]
    try:
        for patched, layers in plans:
            attach(patched, layers)
    except BaseException:  # no memory, or interrupted
        for patched, _ in plans:
            detach(patched)
        raise
    for patched, _ in plans:
        _log_patch(patched, model)
    return model


def _config_for(family: Family, patch: PatchConfig | str | Path | None, settings: Mapping[str, Any]) -> PatchConfig:
    """Return the settings of a patch for a model of a family; ValueError for those of another family."""
    chosen: Any = load_patch(patch) if isinstance(patch, str | Path) else patch
    if isinstance(chosen, Patch):
        if chosen.family not in ("", family.name):
            raise ValueError(
                f"This patch is for the {chosen.family!r} family (made for {chosen.base_model}), but the model belongs "
                f"to {family.name!r}."
            )
        chosen = chosen.patch
    config: PatchConfig = family.complete(settings) if chosen is None else chosen.replace(**settings)
    return config


def _plan_by_grid(
    model: Any, patch: PatchConfig | str | Path | None, grid: Grid, extra: Extras, settings: Mapping[str, Any]
) -> list[Patched]:
    """Plan the patches of a model without a family, or of those of a pipeline named ``transformer…`` or ``unet``."""
    if not isinstance(patch, SparseConfig | None):
        raise ValueError(
            f"A model without a family (grid={grid!r}) runs only sparse attention; give settings of SparseConfig."
        )
    check_settings(settings, SparseConfig, "For the other attention add the model as a family (docs/models.md).")
    config = (patch or SparseConfig()).replace(**settings)
    _check_by_grid(config)
    facts = Facts(grid if callable(grid) else check_grid(grid), extra if callable(extra) else check_counts(extra))
    modules = models_of(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} is neither a model nor a pipeline with a transformer or a unet.")
    for module in modules:
        if why_refused(type(module)) is not None:
            get_family(module)  # raises the reason
        if (family := find_family(module)) is not None:
            raise ValueError(
                f"{type(module).__name__} belongs to the family {family.name!r}, which reads the token grid of every "
                "call; leave grid and extra out."
            )
        for part in module.modules():
            if is_patched(part):
                raise ValueError(f"This {type(part).__name__} is already patched; call remove_mhla() with it first.")
    return [Patched(module, config, None, facts, model) for module in modules]


def _check_by_grid(config: PatchConfig) -> None:
    if config.layers != "all":
        raise ValueError(f"layers={config.layers!r} needs a model with a family; leave it out.")


def _log_patch(patched: Patched, model: Any) -> None:
    """Log what a new patch runs; warn if it needs adapting."""
    if all(parameter.is_meta for parameter in patched.transformer.parameters()):
        return
    config, kind, family = patched.config, type(patched.transformer).__name__, patched.family
    if family is None:
        return logger.info("%s in the attentions over the grid of %s", config.attention, kind)
    if isinstance(config, SparseConfig):
        return logger.info("%s; quality not measured: mhla tune", applied_in_words(patched, model))
    runs = f"{config.attention} in {len(patched.chosen)} of the {len(patched.attentions)} self-attentions of {kind}"
    if family.computes != "softmax":
        return logger.info("%s", runs)
    logger.warning(
        "%s is not adapted yet, so its outputs are unusable. Train it, load an adapted patch with load_mhla(), or "
        "use sparse attention, apply_mhla(model), which needs no training.",
        runs,
    )


def plan_patch(
    transformer: nn.Module, config: PatchConfig, pipe: Any = None, backend: str = "auto"
) -> tuple[Patched, Layers]:
    """Check everything and change nothing: the handle to attach, and the new layers of MHLA.

    Args:
        transformer: of a family.
        config: settings.
        pipe: pipeline that calls it; a transformer or None where that is not known.
        backend: of MHLA.

    Raises:
        ValueError: unsupported or offloaded transformer, already patched, or settings that do not fit.
    """
    if is_patched(transformer):
        (running,) = find_patched(transformer).values()
        raise ValueError(
            f"This {type(transformer).__name__} is already patched with {running.config.attention}; change_mhla() "
            "changes its settings, or call remove_mhla() first."
        )
    family = get_family(transformer)
    patched = Patched(transformer, config, family, None, pipe, backend)
    chosen = _chosen_attentions(patched, config)
    patched.chosen = tuple(chosen)
    if not isinstance(config, LinearConfig):
        return patched, {}
    return patched, {name: make_layer(attn, config, family) for name, attn in chosen.items()}


def attach(patched: Patched, layers: Layers) -> None:
    """Carry out a plan."""
    if layers:
        processor = MHLAProcessor(patched.config, backend=patched.backend)
        processor.fused = next(filter(is_fused, (patched.attentions[name].processor for name in layers)), None)
        for name, layer in layers.items():
            attn = patched.attentions[name]
            before, original = attn.processor, layer.original_processor
            if not isinstance(before, MHLAProcessor) and (original is None or is_fused(original)):
                layer.original_processor = before
            processor._parallel_config = processor._parallel_config or getattr(before, "_parallel_config", None)
            attn.mhla = layer
            attn.set_processor(processor)
    patched.attach()


def set_attn_processor(transformer: nn.Module, processor: MHLAProcessor) -> None:
    """Do what diffusers' ``set_attn_processor`` does with a :class:`MHLAProcessor`, also for DiT, which has none.

    Raises:
        ValueError: unsupported transformer or a class of one, already patched, or another processor.
    """
    refuse_wrapped(transformer)
    if not isinstance(processor, MHLAProcessor):
        raise ValueError(
            f"processor={processor!r} must be an MHLAProcessor(...); call set_processor() of every attention for "
            "others."
        )
    attach(*plan_patch(transformer, processor.config, None, processor.backend))


def remove_mhla(model: Model, *, strict: bool = False) -> Model:
    """Undo :func:`apply_mhla` and :func:`load_mhla`: the model is as before, bit for bit.

    Weights of the model that an adapted patch replaced come back. Attentions that were patched through diffusers' own
    ``set_attn_processor``, which keeps no record, get the processors that diffusers gives a new model.

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
    if not handles:
        refuse_wrapped(model)
        if strict or not (isinstance(model, nn.Module) or hasattr(model, "components")):
            raise ValueError(f"{type(model).__name__} is not patched with MHLA; there is nothing to remove.")
        logger.warning("%s is not patched; nothing was removed.", type(model).__name__)
    for patched in handles:
        _check_removable(patched)
    for patched in handles:
        detach(patched)
    return model


def _check_removable(patched: Patched) -> None:
    """Raise ValueError unless the replaced weights of the model can be restored."""
    for name, part in patched.transformer.named_modules():
        if patched.lora in (getattr(part, "merged_adapters", None) or ()):
            raise ValueError(
                f"The patch's LoRA {patched.lora!r} is fused with the weights of {name}; call unfuse_lora() before "
                "remove_mhla()."
            )
    if patched.replaced_weights is None:
        raise ValueError(
            "The weights that this patch replaced were not kept (load_mhla(..., keep_replaced=False)), so they "
            "cannot be restored. Load the model again with from_pretrained()."
        )
    check_writable(patched.transformer, patched.replaced_weights, "remove the patch")


@torch.no_grad()
def replace_weights(patched: Patched, tensors: Mapping[str, torch.Tensor], keep: bool) -> None:
    """Write tensors over the model's, by name in a plain model; ``keep`` those that change, on the CPU, for removal."""
    places = base_weights(patched.transformer)
    replaced: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        first = places[name][0]
        new = tensor.to(first.device, first.dtype)
        if first.is_meta or torch.equal(first, new):
            continue
        if keep:
            replaced[name] = first.to("cpu", copy=True)
        patched.replaced_weights = replaced if keep else None  # before it is written, should that be interrupted
        for place in places[name]:
            place.copy_(new)


@torch.no_grad()
def detach(patched: Patched) -> None:
    """Take everything away that a patch has put in, and bring back weights that it replaced."""
    if patched.lora is not None and has_lora(patched.transformer, patched.lora):
        remove_lora(patched.transformer, patched.lora)
    elif patched.lora is not None:
        logger.warning(
            "The patch's LoRA %r was unloaded before the patch. If it was fused, its weights are still in the model; "
            "then load the model again with from_pretrained().",
            patched.lora,
        )
    if patched.replaced_weights:
        places = base_weights(patched.transformer)
        for name, tensor in patched.replaced_weights.items():
            for place in places[name]:
                place.copy_(tensor)
    patched.lora, patched.replaced_weights = None, {}
    fused_from = getattr(patched.transformer, "original_attn_processors", None) or {}
    for name, attn in attentions_of(patched.transformer).items():
        if isinstance(fused_from.get(f"{name}.processor"), MHLAProcessor):  # which unfusing would put back
            fused_from[f"{name}.processor"] = getattr(layer_of(attn), "original_processor", None)
        _take_out(patched, attn)
    patched.detach()


def _take_out(patched: Patched, attn: Any) -> None:
    """Restore an attention's processor, or set a new default one."""
    if isinstance(attn.processor, MHLAProcessor):
        attn.set_processor(patched.original_processor(attn)) if hasattr(attn, "set_processor") else setattr(
            attn, "processor", patched.original_processor(attn)
        )
    if hasattr(attn, "mhla"):
        del attn.mhla


def change_mhla(model: Model, *, backend: str | None = None, **settings: Any) -> Model:
    """Change density, steps, layers or other settings of a patched model, without loading it again.

    Layers of MHLA that stay keep what they have learned. A layer that is patched now starts fresh, and one that is no
    longer patched gets its original processor. Where something else has set processors, the patch runs again. If
    anything is refused the model is unchanged.

    Args:
        model: patched pipeline or transformer; a pipeline becomes the one whose steps are counted.
        backend: of MHLA, see :func:`mhla_diffusers.attention.mhla_attention`; None for the one it has.
        **settings: fields of its :class:`PatchConfig` that change; which attention runs stays.

    Returns:
        ``model``.

    Raises:
        ValueError: not patched or switched off, settings that do not fit, or that need other parameters, as blocks do.
    """
    check_choice("backend", backend, (*BACKENDS, None))
    handles = list(require_patched(model).values())
    plans = [_plan_change(patched, model, backend, settings) for patched in handles]
    for patched, (new, layers) in zip(handles, plans, strict=True):
        for name, attn in patched.attentions.items():
            if name not in layers:
                _take_out(patched, attn)
        patched.detach()
        new.replaced_weights, new.lora = patched.replaced_weights, patched.lora
        for layer in layers.values():
            assert isinstance(new.config, LinearConfig)
            layer.config = new.config
        attach(new, layers)
    return model


def _plan_change(
    patched: Patched, model: Any, backend: str | None, settings: Mapping[str, Any]
) -> tuple[Patched, Layers]:
    """Check new settings without changing anything; return the new handle and its MHLA layers."""
    if patched.is_off:
        raise ValueError("The patch is switched off; leave mhla_disabled() before change_mhla().")
    old = patched.config
    config = old.replace(**settings)
    pipe = patched.pipeline.owner if isinstance(model, nn.Module) else model
    new = Patched(patched.transformer, config, patched.family, patched.facts, pipe, backend or patched.backend)
    if patched.family is None:
        _check_by_grid(config)
        return new, {}
    chosen = _chosen_attentions(patched, config)
    new.chosen = tuple(chosen)
    if not isinstance(config, LinearConfig):
        return new, {}
    if any(not isinstance(getattr(attn, "mhla", None), MHLALayer | None) for attn in patched.attentions.values()):
        raise ValueError("An adapter has copies of the MHLA layers (modules_to_save); merge or unload it first.")
    if (name := setting_of_parameters(old, config)) is not None:
        raise ValueError(
            f"{name}={getattr(config, name)!r} changes the shapes of the layers' parameters. Save and load with "
            "load_mhla(..., blocks=...) to interpolate them, or start again with remove_mhla() and apply_mhla()."
        )
    kept, family = patched.layers, patched.of_family
    return new, {name: kept.get(name) or make_layer(attn, config, family) for name, attn in chosen.items()}


def register_mixing_clip(optimizer: torch.optim.Optimizer, model: Any) -> RemovableHandle:
    """Clip every mixing matrix into (0, 1) after each step of ``optimizer``, as the paper does (Sec. 4.2).

    Layers whose configuration has ``mixing_clip=False`` are left alone.

    Raises:
        ValueError: if the model has no mixing matrices, or ``optimizer`` was made before them and lacks a matrix that
            takes gradients.
    """
    layers = list(require_layers(model).values())
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(layer.mixing.requires_grad and id(layer.mixing) not in optimized for layer in layers):
        raise ValueError(
            "The optimizer lacks a trainable mixing matrix. Create the optimizer after apply_mhla(), or freeze the "
            "matrices with mixing_learnable=False."
        )

    def clip(*_: Any) -> None:
        for layer in layers:
            layer.clip_mixing_()

    return optimizer.register_step_post_hook(clip)


# Which settings fit, and which layers they choose


def _chosen_attentions(patched: Patched, config: PatchConfig) -> dict[str, Any]:
    """Choose self-attentions by name; ValueError for settings that the transformer cannot have."""
    family, kind = patched.of_family, type(patched.transformer).__name__
    if isinstance(config, LinearConfig):
        if family.mhla is None:
            raise ValueError(
                f"MHLA runs in SANA, DiT and Wan, and in models that share their attention, not in {kind}; use sparse "
                "attention: apply_mhla(model, density=0.1)."
            )
        if len(config.blocks) != family.axes:
            raise ValueError(
                f"blocks={config.blocks} has {len(config.blocks)} axes, but {kind} has {family.axes}; for example "
                f"blocks={family.mhla_blocks}."
            )
        causal = config.causal if isinstance(config, CausalConfig) else None
        check_denominator(config.feature_map, config.eps, config.normalize, False, causal)
    elif family.computes != "softmax":
        raise ValueError(
            f"{config.attention.capitalize()} approximates softmax attention, and the own attention of {kind} is "
            f"{family.computes}; patch it with MHLA, blocks={family.mhla_blocks}."
        )
    if (why := family.why_not_patched(patched.transformer, config)) is not None:
        raise ValueError(why)
    found = list(patched.attentions.items())
    indices = choose_layers(config.layers, len(found))
    if isinstance(config, SparseConfig):
        indices = [index for index in indices if index >= config.dense_layers]
    if not indices:
        words = f"layers={config.layers!r}, dense_layers={getattr(config, 'dense_layers', 0)}"
        raise ValueError(
            f"{words} leaves none of the {len(found)} layers to patch; choose other layers or fewer dense ones."
        )
    chosen = dict(found[index] for index in indices)
    if isinstance(config, LinearConfig):
        if group_offloading(patched.transformer):
            raise ValueError(OFFLOADED)
        holding = [name for name, attn in chosen.items() if holds_weights(attn.processor)]
        if holding:
            raise ValueError(
                f"{holding[0]} runs {type(chosen[holding[0]].processor).__name__}, which has its own weights, as "
                "IP-Adapters do. Unload the adapter first, for example with pipe.unload_ip_adapter()."
            )
    return chosen


def choose_layers(choice: LayerChoice, count: int) -> list[int]:
    """Choose the layers to replace: their indices, ascending.

    A fraction keeps the remaining layers evenly spread, beginning with layer 0: "2/3" keeps layers 0, 3, 6, …, the
    hybrid of the paper's Sec. 5.3.

    Args:
        choice: "all", a fraction as text or number, or indices; negative indices count from the end.
        count: number of self-attentions of the model.

    Raises:
        ValueError: unknown choice, or an index out of range.
    """
    parsed = parse_layers(choice)
    if isinstance(parsed, Fraction):
        kept = 1 - parsed
        return [i for i in range(count) if not kept or (i > 0 and int(i * kept) == int((i - 1) * kept))]
    for index in parsed:
        check(-count <= index < count, f"layers={parsed}: {index} must be from {-count} to {count - 1}.")
    return sorted({index % count for index in parsed})
