"""Patch, change, remove: ``apply_mhla`` and what goes with it."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..config import MHLAConfig, Patch, is_automatic, load_patch
from ..families import Family, get_family
from .calibrate import calibrate_mixing, calibrate_sparse
from .calls import check_run, measure_sensitivity, record_calls, repeat_calls
from .finding import (
    find_patched,
    find_transformers,
    is_patched,
    refuse_causal,
    refuse_language,
    refuse_wrapped,
    require_layers,
)
from .handle import Patched
from .layer import MHLALayer, attentions_of, share_parameters
from .processor import MHLAProcessor, make_layer
from .settings import automatic_count, chosen_attentions, refuse_order
from .weights import resized

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def apply_mhla(
    model: Model,
    patch: MHLAConfig | str | Path | None = None,
    *,
    backend: str = "auto",
    calibration: Callable[[], object] | None = None,
    **settings: Any,
) -> Model:
    """Replace the self-attention of a pipeline or transformer by MHLA, in place.

    ``apply_mhla(pipe)`` takes the family's defaults, ``apply_mhla(pipe, blocks=(7, 3, 5), layers="2/3")`` changes some
    of them, ``apply_mhla(pipe, "wan2.1-t2v-1.3b-hybrid")`` takes a preset. Cross-attention stays as it is. If
    anything is refused, the model is unchanged.

    Args:
        model: a pipeline (all its supported transformers are patched) or one transformer.
        patch: settings, the name of a preset, or the path of a patch YAML; None for the family's defaults.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        calibration: makes the patch as good as it is without training: runs the model on typical inputs, for example
            ``lambda: pipe("a cat", num_inference_steps=4)``. It fits how the linear branch weighs beside the sparse
            branch, see :func:`calibrate_sparse`; without a sparse branch it fits the mixing matrices, see
            :func:`calibrate_mixing`. With ``layers="auto:2/3"`` those layers are replaced whose replacement alone moves
            the output least, which costs one run of each call per layer; their list is recorded in the configuration,
            and mixing matrices are left as they are.
        **settings: fields of :class:`MHLAConfig` that replace those of ``patch``.

    Returns:
        ``model``.

    Raises:
        ValueError: unsupported model, already patched, a patch for another family, or settings that do not fit.
    """
    transformers = find_transformers(model)
    if not isinstance(patch, MHLAConfig | str | Path | None):
        raise ValueError(
            f"patch={patch!r} must be a MHLAConfig, the name of a preset or the path of a patch YAML; "
            "single settings are keywords, for example blocks=(4, 4)."
        )
    if calibration is not None:
        check_run(calibration, "calibration")
        refuse_language(model, "calibration")
    for transformer in transformers.values():  # before the settings, which would ask for more of such a patch
        refuse_order(transformer, settings.get("causal"))
    chosen = load_patch(patch) if isinstance(patch, str | Path) else patch
    configs = {}
    for name, transformer in transformers.items():
        family = get_family(transformer)
        if isinstance(chosen, Patch) and chosen.family != family.name:
            raise ValueError(
                f"This patch is for the {chosen.family!r} family (made for {chosen.base_model}), but the model belongs "
                f"to {family.name!r}."
            )
        config = chosen.config if isinstance(chosen, Patch) else chosen or family.default_config
        configs[name] = config.replace(**settings)
    if calibration is not None:
        refuse_causal(configs.values(), "calibration")
    automatic = any(is_automatic(config.layers) for config in configs.values())
    if calibration is not None and automatic:
        configs = _choose_automatically(transformers, configs, calibration, backend)
    plans = [plan_patch(transformers[name], MHLAProcessor(config, backend=backend)) for name, config in configs.items()]
    for patched, layers in plans:
        patched.install(layers, model)
    is_sparse = any(config.sparse != "none" for config in configs.values())
    if calibration is not None and (is_sparse or not automatic):
        try:
            (calibrate_sparse if is_sparse else calibrate_mixing)(model, calibration)
        except BaseException:
            remove_mhla(model)
            raise
    return model


def plan_patch(transformer: nn.Module, processor: MHLAProcessor) -> tuple[Patched, dict[str, MHLALayer]]:
    """Check everything and change nothing: the handle to install, and the new layer of every attention to patch.

    Raises:
        ValueError: unsupported or offloaded transformer, already patched, or settings that do not fit.
    """
    if is_patched(transformer):
        raise ValueError(
            f"This {type(transformer).__name__} is already patched with MHLA; change_mhla() changes its settings, "
            "or call remove_mhla() first."
        )
    patched, config = Patched(transformer, processor), processor.config
    chosen = chosen_attentions(patched, config)
    return patched, {name: make_layer(attn, config, patched.family) for name, attn in chosen.items()}


def _choose_automatically(
    transformers: Mapping[str, nn.Module],
    configs: Mapping[str, MHLAConfig],
    calibration: Callable[[], object],
    backend: str,
) -> dict[str, MHLAConfig]:
    """The configurations with the layers that hurt least in place of "auto:…". Leaves the transformers as they are."""
    for config in configs.values():
        if config.output_norm:
            raise ValueError(
                "layers='auto:…' cannot judge an output norm that is not fitted yet. Patch all layers, call "
                "calibrate_output_norm(), look at layer_sensitivity(), and patch anew with the list of layers."
            )
    plans = {
        name: plan_patch(transformers[name], MHLAProcessor(config.replace(layers="all"), backend=backend))
        for name, config in configs.items()
    }
    calls = record_calls(transformers, calibration)
    chosen = {}
    for name, (patched, layers) in plans.items():
        patched.install(layers, None)
        try:
            if patched.config.sparse != "none":
                calibrate_sparse(patched.transformer, partial(repeat_calls, patched.transformer, calls[name]))
            sensitivities = measure_sensitivity(patched, calls[name])
        finally:
            patched.remove()
        values = list(sensitivities.values())
        least = sorted(range(len(values)), key=values.__getitem__)
        count = automatic_count(configs[name].layers, len(values))
        chosen[name] = configs[name].replace(layers=tuple(sorted(least[:count])))
    return chosen


def set_attn_processor(transformer: Any, processor: Any) -> None:
    """Like diffusers' ``set_attn_processor``, for a transformer of any family, DiT included.

    A :class:`MHLAProcessor` goes to the self-attentions that its configuration chooses and makes their weights at once.
    Another processor goes to every attention, and a dict (name → processor, as :func:`attn_processors` returns) gives
    each its own; the dict is left as it is.

    Raises:
        ValueError: unsupported transformer, already patched, what is no processor, or a dict whose names are not those
            of the attentions.
    """
    if isinstance(processor, MHLAProcessor):
        patched, layers = plan_patch(transformer, processor)
        patched.install(layers, None)
        return
    get_family(transformer)
    attentions = attentions_of(transformer)
    names = {f"{name}.processor": module for name, module in attentions.items()}
    for one in processor.values() if isinstance(processor, Mapping) else [processor]:
        if isinstance(one, type) or not callable(one):
            raise ValueError(
                f"processor={one!r} is no attention processor; allowed: MHLAProcessor(...), a processor of diffusers "
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
    """Like diffusers' ``attn_processors``, for a transformer of any family, DiT included: name → processor.

    Raises:
        ValueError: a pipeline, or no model.
    """
    if not isinstance(transformer, nn.Module):
        get_family(transformer)
    return {f"{name}.processor": module.get_processor() for name, module in attentions_of(transformer).items()}


def remove_mhla(model: Model) -> Model:
    """Undo :func:`apply_mhla` and :func:`load_mhla`: restore processors, modules, hooks and methods.

    Weights of the model that an adapted patch replaced are restored bit for bit.

    Attentions that were patched through diffusers' own ``set_attn_processor``, which keeps no record, get the
    processors that diffusers gives a new model.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched, or weights that the patch replaced cannot be brought back. The model is
            unchanged then.
    """
    handles = find_patched(model).values()
    if not handles:
        refuse_wrapped(model)
        raise ValueError("The model is not patched with MHLA; there is nothing to remove.")
    for patched in handles:
        patched.check_removable()
    for patched in handles:
        patched.remove(model)
    return model


def change_mhla(model: Model, *, backend: str | None = None, **settings: Any) -> Model:
    """Change blocks, layers, density, backend or other settings of a patched model, without loading it again.

    What the layers that stay patched have learned is kept: mixing matrices are interpolated to other blocks, as
    :func:`load_mhla` does it. A layer that is patched now starts fresh, and one that is no longer patched gets its
    original processor. A warning names what was learned and is dropped, or was learned with other uniform blocks.
    Another backend, density, block size or number of ``softmax_steps`` keeps all parameters; with other settings layers
    have new ones, so make optimizers after it. Where something else has set processors, MHLA runs again. If anything is
    refused the model is unchanged.

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
    changes = [plan_change(patched, backend, settings) for patched in find_patched(model).values() if patched.layers]
    for change in changes:
        if change.loss is not None:
            warnings.warn(change.loss, stacklevel=2)
        change.carry_out(model)
    return model


@dataclass(frozen=True)
class Change:
    """Checked other settings of one patched transformer."""

    patched: Patched
    processor: MHLAProcessor
    layers: dict[str, MHLALayer]
    """Name of every attention that is to be patched, with its layer: a new one, or the one it has."""
    loss: str | None
    """Warning about learned weights that are dropped or were learned with other settings."""

    def carry_out(self, model: Any) -> None:
        """Change the transformer, which is ``model`` or a part of it."""
        patched, config = self.patched, self.processor.config
        for name, attn in patched.attentions.items():
            if name in self.layers:
                layer = self.layers[name]
                layer.config = config
                attn.mhla = layer
                attn.set_processor(self.processor)
            elif hasattr(attn, "mhla") or isinstance(attn.processor, MHLAProcessor):
                attn.set_processor(patched.original_processor(attn))
                if hasattr(attn, "mhla"):
                    del attn.mhla
        for attn in attentions_of(patched.transformer).values():
            if isinstance(attn.processor, MHLAProcessor):  # a cross-attention, in diffusers' own form
                attn.set_processor(self.processor)
        patched.processor = self.processor
        if patched.is_installed and not isinstance(model, nn.Module):
            patched.call_from(model)


def plan_change(patched: Patched, backend: str | None, settings: Mapping[str, Any]) -> Change:
    """Check other settings and change nothing.

    Args:
        patched: with layers.
        backend: None for the one it has.
        settings: fields of :class:`MHLAConfig` that change.

    Raises:
        ValueError: switched off, settings that do not fit, or weights that they do not fit.
    """
    if patched.paused:
        raise ValueError("The patch is switched off; leave mhla_disabled() before change_mhla().")
    attentions, family = patched.attentions, patched.family
    if any(not isinstance(getattr(attn, "mhla", None), MHLALayer | None) for attn in attentions.values()):
        raise ValueError("An adapter has copies of the MHLA layers (modules_to_save); merge or unload it first.")
    before, old_config, old_processor = patched.layers, patched.config, patched.running_processor()
    config = old_config.replace(**settings)
    chosen = chosen_attentions(patched, config)
    if config.softmax_steps and not patched.is_installed:
        raise ValueError(
            f"softmax_steps={config.softmax_steps!r} needs a patch of apply_mhla(), which keeps the processors of "
            "before; diffusers' own set_attn_processor drops them."
        )
    if config.mixing_init != old_config.mixing_init:
        raise ValueError(
            f"mixing_init={config.mixing_init!r} says how fresh mixing matrices begin, and these are kept; call "
            "remove_mhla() and apply_mhla() to begin anew."
        )
    keeps_parameters, layers = share_parameters(old_config, config), {}
    tensors = {f"{name}.mhla.{key}": x for name, layer in before.items() for key, x in layer.state_dict().items()}
    fitting = resized(tensors, old_config, config)
    for name, attn in chosen.items():
        if name in before and keeps_parameters:
            layers[name] = before[name]
            continue
        layers[name] = make_layer(attn, config, family)
        layers[name].original_processor = before[name].original_processor if name in before else attn.processor
        if name in before:
            prefix = f"{name}.mhla."
            own = {key.removeprefix(prefix): x for key, x in fitting.items() if key.startswith(prefix)}
            _carry_over(name, before[name], layers[name], own)
    processor = MHLAProcessor(config, grid=old_processor.grid, backend=backend or old_processor.backend)
    if "_attention_backend" in vars(old_processor):  # set since it was patched, and not the class's None
        processor._attention_backend = old_processor._attention_backend
    kept = {name: (attentions[name], before[name], layer) for name, layer in layers.items() if name in before}
    return Change(patched, processor, layers, _loss(kept, old_config, config, family))


def _loss(
    layers: Mapping[str, tuple[Any, MHLALayer, MHLALayer]], before: MHLAConfig, after: MHLAConfig, family: Family
) -> str | None:
    """Warning about what layers have learned, given each with its attention and the layer that follows it."""
    dropped, learned = set(), set()
    for attn, old, new in layers.values():
        fresh = make_layer(attn, before, family).state_dict()
        names = {key for key, x in old.state_dict().items() if not x.is_meta and not torch.equal(x, fresh[key])}
        dropped |= names - set(new.state_dict())
        learned |= names
    if not learned:
        return None
    parts = [f"What the patch has learned of {', '.join(sorted(dropped))} is dropped."] if dropped else []
    if (before.sparse, before.block_size) != (after.sparse, after.block_size):
        was, now = (
            f"blocks of {config.block_size} tokens" if config.sparse == "content" else f"sparse={config.sparse!r}"
            for config in (before, after)
        )
        parts.append(f"The patch has learned with {was}, and runs with {now} now; adapt it again.")
    return " ".join(parts) or None


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
