"""Patch, change and remove: each checks everything before it changes anything."""

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
from ..config import (
    CausalConfig,
    LayerChoice,
    LinearConfig,
    Patch,
    PatchConfig,
    SparseConfig,
    kind_of,
    load_patch,
)
from ..errors import check, check_choice
from ..families import Counts, Family, find_family, get_family, why_refused
from .describe import applied_in_words
from .finding import (
    components_of,
    find_patched,
    find_transformers,
    is_patched,
    require_layers,
    require_patched,
)
from .layer import OFFLOADED, SETTINGS_OF_PARAMETERS, MHLALayer, make_layer
from .patched import Patched
from .processor import MHLAProcessor
from .weights import base_weights, check_writable, group_offloading, has_lora, refuse_fused, remove_lora

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
Grid = tuple[int, ...] | Callable[..., tuple[int, ...]]
Extras = Counts | Callable[..., Counts]
Layers = dict[str, MHLALayer]


def apply_mhla(
    model: Model,
    patch: PatchConfig | str | Path | None = None,
    *,
    backend: str = "auto",
    grid: Grid | None = None,
    extra: Extras = (0, 0),
    **settings: Any,
) -> Model:
    """Replace the self-attention of a pipeline or transformer, in place, and return it.

    A patch runs one of three attentions, which the names of its settings decide. ``apply_mhla(pipe)`` runs sparse
    attention, which needs no training; ``apply_mhla(pipe, density=0.05)`` changes it. ``apply_mhla(pipe, blocks=(7, 3,
    5), layers="2/3")`` is the paper's MHLA, which has to be adapted; with ``causal`` it sees the past alone. Where a
    model's own attention is linear, MHLA is the default. If anything is refused, the model is unchanged.

    Args:
        model: a pipeline (all its supported transformers are patched), an object with ``transformer`` and
            ``scheduler``, or one transformer.
        patch: settings, a profile ("faithful", "balanced" or "fast"), a preset such as "wan2.1-t2v-1.3b", or the path
            of a patch YAML; None for the family's defaults.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        grid: the token grid of a model without a family, such as (21, 30, 52), or a function of the forward's
            arguments, by name; sparse attention then answers its calls of PyTorch's ``scaled_dot_product_attention``.
        extra: with ``grid``, tokens such as text before and after those of the grid, or such a function.
        **settings: fields of a :class:`PatchConfig` that replace those of ``patch``.

    Raises:
        ValueError: unsupported model, already patched, a patch for another family, or settings that do not fit.
    """
    check_choice("backend", backend, BACKENDS)
    if not isinstance(patch, PatchConfig | str | Path | None):
        raise ValueError(
            f"patch={patch!r} must be settings such as MHLAConfig(...), the name of a preset or the path of a patch "
            "YAML; single settings are keywords, for example blocks=(4, 4)."
        )
    chosen = _chosen_families(model, grid, extra)
    configs = [(one, family, _config_for(family, patch, settings)) for one, family in chosen]
    plans = [plan_patch(one, config, family, model, backend) for one, family, config in configs]
    try:
        for patched, layers in plans:
            patched.attach(layers)
    except BaseException:  # no memory, or interrupted
        for patched, _ in plans:
            detach(patched)
        raise
    for patched, _ in plans:
        _log_patch(patched, model)
    return model


def _chosen_families(model: Any, grid: Grid | None, extra: Extras) -> list[tuple[nn.Module, Family]]:
    if grid is None:
        check(extra == (0, 0), f"extra={extra!r} needs grid=…; a family reads both in every call, so leave it out.")
        return [(one, get_family(one)) for one in find_transformers(model).values()]
    components = components_of(model).items()
    modules = [one for name, one in components if name.startswith(("transformer", "unet"))]
    if not modules:
        raise ValueError(f"{type(model).__name__} is neither a model nor a pipeline with a transformer or a unet.")
    for module in modules:
        if find_family(module) is not None or why_refused(type(module)) is not None:
            family = get_family(module)  # raises why, if it cannot be patched
            raise ValueError(
                f"{type(module).__name__} belongs to the family {family.name!r}, which reads the token grid of every "
                "call; leave grid and extra out."
            )
    return [(one, Family.by_hand(type(one).__name__, grid, extra)) for one in modules]


def _config_for(family: Family, patch: PatchConfig | str | Path | None, settings: Mapping[str, Any]) -> PatchConfig:
    chosen: Any = load_patch(patch) if isinstance(patch, str | Path) else patch
    if isinstance(chosen, Patch):
        if chosen.family not in ("", family.name):
            own = f"belongs to {family.name!r}" if family.name else "has no family"
            raise ValueError(
                f"This patch is for the {chosen.family!r} family (made for {chosen.base_model}), but the model {own}."
            )
        chosen = chosen.patch
    if chosen is None and not family.knows_layers:
        words = "A model without a family runs sparse attention alone; for MHLA add it as a family (docs/models.md)."
        check(kind_of(settings) is SparseConfig, words)
    config: PatchConfig = family.complete(settings) if chosen is None else chosen.replace(**settings)
    return config


def _log_patch(patched: Patched, model: Any) -> None:
    """Log what a new patch runs; warn if it needs adapting."""
    if all(parameter.is_meta for parameter in patched.transformer.parameters()):
        return
    config, kind, family = patched.config, type(patched.transformer).__name__, patched.family
    if isinstance(config, SparseConfig):
        return logger.info("%s; quality not measured, see mhla tune", applied_in_words(patched, model))
    runs = f"{config.attention} in {len(patched.chosen)} of the {len(patched.attentions)} self-attentions of {kind}"
    if family.computes != "softmax":
        return logger.info("%s", runs)
    logger.warning(
        "%s is not adapted yet, so its outputs are unusable. Train it, load an adapted patch with load_mhla(), or "
        "use sparse attention, apply_mhla(model), which needs no training.",
        runs,
    )


def plan_patch(
    transformer: nn.Module, config: PatchConfig, family: Family, pipe: Any = None, backend: str = "auto"
) -> tuple[Patched, Layers]:
    """Check everything and change nothing: return the handle to attach, and the new layers of MHLA."""
    for part in transformer.modules() if not family.knows_layers else (transformer,):
        if is_patched(part):
            (running,) = find_patched(part).values()
            raise ValueError(
                f"This {type(part).__name__} is already patched with {running.config.attention}; change it "
                "with change_mhla(), or call remove_mhla() first."
            )
    patched = Patched(transformer, config, family, pipe, backend)
    chosen = _chosen_attentions(patched, config)
    patched.chosen = tuple(chosen)
    if not isinstance(config, LinearConfig):
        return patched, {}
    return patched, {name: make_layer(attn, config, family) for name, attn in chosen.items()}


def remove_mhla(model: Model) -> Model:
    """Undo :func:`apply_mhla` and :func:`load_mhla`: the model is as before, bit for bit. Return it.

    Attentions that were patched through diffusers' own ``set_attn_processor``, which keeps no record, get processors
    that diffusers gives a new model. A model that is not patched is logged.

    Raises:
        ValueError: replaced weights that cannot be brought back, such as offloaded ones. The model is unchanged then.
    """
    handles = find_patched(model).values()
    if not handles:
        logger.warning("%s is not patched; nothing was removed.", type(model).__name__)
    for patched in handles:
        lora = () if patched.lora is None else (patched.lora,)
        check_writable(patched.transformer, {*patched.replaced_weights, *lora}, "remove the patch")
    for patched in handles:
        detach(patched)
    return model


@torch.no_grad()
def detach(patched: Patched) -> None:
    """Remove everything that a patch added, and restore the weights that it replaced."""
    if patched.lora is not None and has_lora(patched.transformer, patched.lora):
        remove_lora(patched.transformer, patched.lora)
    elif patched.lora is not None:
        logger.warning(
            "The patch's LoRA %r was unloaded before the patch. If it was fused, its weights are still in the model; "
            "then load the model again with from_pretrained().",
            patched.lora,
        )
    if patched.replaced_weights:
        weights = base_weights(patched.transformer)
        for name, tensor in patched.replaced_weights.items():
            weights[name].copy_(tensor)
    patched.lora, patched.replaced_weights = None, {}
    for module in patched.transformer.modules():
        if hasattr(module, "set_processor"):  # also a cross-attention, in diffusers' own form
            _take_out(patched, module)
    patched.detach()


def _take_out(patched: Patched, attn: Any) -> None:
    """Restore an attention's processor from before MHLA, or make a fresh one if none was recorded."""
    processor = attn.processor
    if isinstance(processor, MHLAProcessor):
        original = getattr(getattr(attn, "mhla", None), "original_processor", None)
        if original is None:
            mhla: Any = patched.family.mhla
            is_self = any(attn is own for own in patched.attentions.values())
            original = mhla.own_processor(attn) if is_self else mhla.own_cross_processor(attn)
        attn.set_processor(processor.with_choices(original))
    if hasattr(attn, "mhla"):
        del attn.mhla


def change_mhla(model: Model, *, backend: str | None = None, **settings: Any) -> Model:
    """Change density, steps, layers or other settings of a patched model, without loading it again. Return it.

    Layers of MHLA that stay keep what they have learned; a layer that is patched now starts fresh. Where something else
    has set processors, the patch runs again. A pipeline becomes the one whose steps are counted. If anything is refused
    the model is unchanged.

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
        new.attach(layers)
    return model


def _plan_change(
    patched: Patched, model: Any, backend: str | None, settings: Mapping[str, Any]
) -> tuple[Patched, Layers]:
    if patched.is_off:
        raise ValueError("The patch is disabled; exit mhla_disabled() before change_mhla().")
    old = patched.config
    config = old.replace(**settings)
    pipe = patched.pipeline.owner() if isinstance(model, nn.Module) else model
    new = Patched(patched.transformer, config, patched.family, pipe, backend or patched.backend)
    chosen = _chosen_attentions(patched, config)
    new.chosen = tuple(chosen)
    if not isinstance(config, LinearConfig):
        return new, {}
    for name in SETTINGS_OF_PARAMETERS:
        check(
            getattr(old, name, None) == getattr(config, name, None),
            f"{name}={getattr(config, name, None)!r} changes the shapes of the layers' parameters. Save and load with "
            "load_mhla(..., blocks=...) to interpolate them, or start again with remove_mhla() and apply_mhla().",
        )
    kept = patched.layers
    return new, {name: kept.get(name) or make_layer(attn, config, patched.family) for name, attn in chosen.items()}


def register_mixing_clip(optimizer: torch.optim.Optimizer, model: Any) -> RemovableHandle:
    """Clip every mixing matrix into (0, 1) after each step of ``optimizer``, as the paper does (Sec. 4.2)."""
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
    family, kind = patched.family, type(patched.transformer).__name__
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
        causal, own = (config.causal, config.own) if isinstance(config, CausalConfig) else (None, None)
        check_denominator(config.feature_map, config.eps, config.normalize, own == "softmax", causal)
        if group_offloading(patched.transformer):
            raise ValueError(OFFLOADED)
        refuse_fused(patched.transformer, "run MHLA")
    elif family.computes != "softmax":
        raise ValueError(
            f"{config.attention.capitalize()} approximates softmax attention, but {kind}'s own attention is "
            f"{family.computes}; patch it with MHLA, blocks={family.mhla_blocks}."
        )
    if not family.knows_layers:
        check(config.layers == "all", f"layers={config.layers!r} needs a model with a family; leave it out.")
        return {}
    found = list(patched.attentions.items())
    indices = patched_layers(config, len(found))
    if not indices:
        dense = getattr(config, "dense_layers", 0)
        raise ValueError(
            f"layers={config.layers!r}, dense_layers={dense} leaves none of the {len(found)} layers to patch; choose "
            "other layers or fewer dense ones."
        )
    return dict(found[index] for index in indices)


def patched_layers(config: PatchConfig, count: int) -> list[int]:
    """Return the indices of the layers to replace, without the first ones that stay dense."""
    dense = config.dense_layers if isinstance(config, SparseConfig) else 0
    return [index for index in choose_layers(config.layers, count) if index >= dense]


def choose_layers(choice: LayerChoice, count: int) -> list[int]:
    """Return the indices of the layers to replace, ascending, of ``count`` self-attentions.

    A fraction keeps the remaining layers evenly spread, beginning with layer 0: "2/3" keeps layers 0, 3, 6, …, the
    hybrid of the paper's Sec. 5.3.
    """
    if not isinstance(choice, tuple):
        kept = 1 - Fraction(1 if choice == "all" else choice).limit_denominator(1000)
        return [i for i in range(count) if not kept or (i > 0 and int(i * kept) == int((i - 1) * kept))]
    for index in choice:
        check(-count <= index < count, f"layers={choice}: {index} must be from {-count} to {count - 1}.")
    return sorted({index % count for index in choice})
