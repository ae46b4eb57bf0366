"""Apply MHLA to a pipeline or a transformer, look at it, switch it off, remove it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .config import MHLAConfig, automatic_count, choose_layers, is_automatic
from .families import Family, find_family, get_family
from .layer import MHLALayer, TokenGrid
from .patches import Patch, load_patch
from .processor import MHLAProcessor, make_layer
from .sensitivity import measure_sensitivity, record_calls

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


class TokenGridHook:
    """Forward pre-hook of a patched transformer: notes the token grid of its input for all layers.

    Under gradient checkpointing a layer runs again during the backward pass and finds the grid of the latest forward;
    so run forward and backward of one resolution before the forward of another.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.token_grid = TokenGrid()
        self.handle: RemovableHandle | None = None

    def __call__(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the grid off ``hidden_states``, the first argument of every supported transformer."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        for axis in range(2, hidden_states.ndim):
            torch._dynamo.mark_static(hidden_states, axis)
        self.token_grid.shape = tuple(int(size) for size in self.family.token_grid(transformer, hidden_states))


@dataclass(frozen=True)
class _Plan:
    """A checked patch of one transformer."""

    transformer: nn.Module
    family: Family
    processor: MHLAProcessor
    layers: list[tuple[Any, MHLALayer]]
    """Attentions to patch, each with its new layer."""


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
    of them, ``apply_mhla(pipe, "wan2.1-t2v-1.3b-hybrid")`` takes a ready patch. Cross-attention stays as it is. If
    anything is refused, the model is unchanged.

    Args:
        model: a pipeline (all its supported transformers are patched) or one transformer.
        patch: settings, the name of a ready patch, or the path of a patch YAML; None for the family's defaults.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        calibration: for ``layers="auto:2/3"``: runs the model on typical inputs, for example
            ``lambda: pipe("a cat", num_inference_steps=4)``. The layers whose replacement alone moves the output least
            are replaced, and their list is recorded in the configuration. Costs one run of each call per layer.
        **settings: fields of :class:`MHLAConfig` that replace those of ``patch``.

    Returns:
        ``model``.

    Raises:
        ValueError: unsupported model, already patched, a patch for another family, or settings that do not fit.
    """
    transformers = find_transformers(model)
    if not isinstance(patch, MHLAConfig | str | Path | None):
        raise ValueError(
            f"patch={patch!r} must be a MHLAConfig, the name of a ready patch or the path of a patch YAML; "
            "single settings are keywords, for example blocks=(7, 3, 5)."
        )
    chosen = load_patch(patch) if isinstance(patch, str | Path) else patch
    configs = {
        name: _choose_config(get_family(transformer), chosen).replace(**settings)
        for name, transformer in transformers.items()
    }
    if calibration is not None:
        configs = _choose_automatically(transformers, configs, calibration, backend)
    plans = [_plan(transformers[name], MHLAProcessor(config, backend=backend)) for name, config in configs.items()]
    for plan in plans:
        _carry_out(plan)
    return model


def layer_sensitivity(model: Any, run: Callable[[], object]) -> dict[str, float]:
    """How much each patched layer alone moves the output, all others attending as before the patch.

    Args:
        model: a patched pipeline or transformer.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``. The inputs
            that the transformer gets with the patch switched off are those that are compared on.

    Returns:
        Name of the attention, for a pipeline with the component's name before it → relative squared change of the
        transformer's output.

    Raises:
        ValueError: the model is not patched, or ``run`` did not reach it.
    """
    require_layers(model)
    transformers = {name: part for name, part in find_transformers(model).items() if is_patched(part)}
    with mhla_disabled(model):
        calls = record_calls(transformers, run)
    prefixes = {name: "" if isinstance(model, nn.Module) else f"{name}." for name in transformers}
    return {
        f"{prefixes[name]}{layer}": value
        for name, transformer in transformers.items()
        for layer, value in measure_sensitivity(transformer, _patched_pairs(transformer), calls[name]).items()
    }


def _patched_pairs(transformer: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name of every patched self-attention → it and its processor of before."""
    family = get_family(transformer)
    return {
        name: (attn, _original_processor(attn, family, transformer))
        for name, attn in family.self_attentions(transformer).items()
        if isinstance(attn.processor, MHLAProcessor)
    }


def _choose_automatically(
    transformers: Mapping[str, nn.Module],
    configs: Mapping[str, MHLAConfig],
    calibration: Callable[[], object],
    backend: str,
) -> dict[str, MHLAConfig]:
    """The configurations with the layers that hurt least in place of "auto:…". Leaves the transformers as they are."""
    for config in configs.values():
        if not is_automatic(config.layers):
            raise ValueError(
                f"calibration chooses layers, but layers={config.layers!r} names them; write layers='auto:2/3'."
            )
        if config.output_norm:
            raise ValueError(
                "layers='auto:…' cannot judge an output norm that is not fitted yet. Patch all layers, call "
                "calibrate_output_norm(), look at layer_sensitivity(), and patch anew with the list of layers."
            )
    plans = {
        name: _plan(transformers[name], MHLAProcessor(config.replace(layers="all"), backend=backend))
        for name, config in configs.items()
    }
    calls = record_calls(transformers, calibration)
    chosen = {}
    for name, plan in plans.items():
        _carry_out(plan)
        try:
            sensitivities = measure_sensitivity(plan.transformer, _patched_pairs(plan.transformer), calls[name])
        finally:
            remove_mhla(plan.transformer)
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
        ValueError: unsupported transformer, already patched, or a dict whose names are not those of the attentions.
    """
    if isinstance(processor, MHLAProcessor):
        _carry_out(_plan(transformer, processor))
        return
    get_family(transformer)
    attentions = _attentions(transformer)
    names = {f"{name}.processor": module for name, module in attentions.items()}
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
    """Like diffusers' ``attn_processors``, for a transformer of any family, DiT included: name → processor."""
    return {f"{name}.processor": module.get_processor() for name, module in _attentions(transformer).items()}


def remove_mhla(model: Model) -> Model:
    """Undo :func:`apply_mhla`: processors, modules, hooks and methods are those of before.

    Attentions that were patched through diffusers' own ``set_attn_processor``, which keeps no record, get the
    processors that diffusers gives a new model.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched.
    """
    if not is_patched(model):
        raise ValueError("The model is not patched with MHLA; there is nothing to remove.")
    for transformer in find_transformers(model).values():
        family = get_family(transformer)
        for attn in _attentions(transformer).values():
            if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
                attn.set_processor(_original_processor(attn, family, transformer))
            if hasattr(attn, "mhla"):
                del attn.mhla
        hook = _grid_hook(transformer)
        if hook is not None and hook.handle is not None:
            hook.handle.remove()
        family.restore(transformer)
    return model


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Within the context the model attends as before the patch, with the same weights.

    Raises:
        ValueError: if the model is not patched.
    """
    if not is_patched(model):
        raise ValueError("The model is not patched with MHLA; there is nothing to switch off.")
    switched = []
    for transformer in find_transformers(model).values():
        family = get_family(transformer)
        for attn in _attentions(transformer).values():
            if isinstance(attn.processor, MHLAProcessor):
                switched.append((attn, attn.processor))
                attn.set_processor(_original_processor(attn, family, transformer))
    try:
        yield
    finally:
        for attn, processor in switched:
            if hasattr(attn, "mhla"):  # the patch may have been removed meanwhile
                attn.set_processor(processor)


def is_patched(model: Any) -> bool:
    """Whether any attention of a pipeline or transformer runs MHLA or holds its weights."""
    return any(
        hasattr(attn, "mhla") or isinstance(attn.processor, MHLAProcessor)
        for transformer in _supported(model).values()
        for attn in _attentions(transformer).values()
    )


def mhla_layers(model: Any) -> dict[str, MHLALayer]:
    """Name and module of every MHLA layer.

    Names are those of ``named_modules()``; for a pipeline the component's name stands before them.
    """
    prefixes = {name: f"{name}." if not isinstance(model, nn.Module) else "" for name in _supported(model)}
    return {
        f"{prefixes[name]}{path}": module
        for name, transformer in _supported(model).items()
        for path, module in transformer.named_modules()
        if isinstance(module, MHLALayer)
    }


def require_layers(model: Any) -> dict[str, MHLALayer]:
    """Like :func:`mhla_layers`.

    Raises:
        ValueError: if there are none, with the way to get them.
    """
    layers = mhla_layers(model)
    if not layers and is_patched(model):
        raise ValueError(
            "The model has no MHLA weights yet: diffusers' own set_attn_processor makes them at the first forward. "
            "Run one, or use mhla_diffusers.set_attn_processor(transformer, processor)."
        )
    if not layers:
        raise ValueError("The model is not patched with MHLA; call apply_mhla() first.")
    return layers


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


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """The supported transformers of a pipeline by component name, or the transformer itself as ``transformer``.

    Raises:
        ValueError: if there is none.
    """
    found = _supported(model)
    if not found:
        if isinstance(model, nn.Module):
            get_family(_unwrap(model))
        components = ", ".join(getattr(model, "components", {})) or "none"
        raise ValueError(
            f"{type(model).__name__} has no transformer that MHLA supports (components: {components}). "
            "Pass a DiT, SANA or Wan pipeline, or one of their transformers."
        )
    return found


def _supported(model: Any) -> dict[str, nn.Module]:
    components = {"transformer": model} if isinstance(model, nn.Module) else getattr(model, "components", {})
    modules = {name: _unwrap(part) for name, part in components.items() if isinstance(part, nn.Module)}
    return {name: module for name, module in modules.items() if find_family(module) is not None}


def _unwrap(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` or data parallelism."""
    from accelerate.utils import extract_model_from_parallel

    unwrapped: nn.Module = extract_model_from_parallel(module, keep_torch_compile=False)
    return unwrapped


def _choose_config(family: Family, chosen: MHLAConfig | Patch | None) -> MHLAConfig:
    if chosen is None:
        return family.default_config
    if isinstance(chosen, MHLAConfig):
        return chosen
    if chosen.family != family.name:
        raise ValueError(
            f"This patch is for the {chosen.family!r} family (made for {chosen.base_model}), "
            f"but the model belongs to {family.name!r}."
        )
    return chosen.config


def _plan(transformer: nn.Module, processor: MHLAProcessor) -> _Plan:
    """Check everything and change nothing."""
    family, config = get_family(transformer), processor.config
    if is_patched(transformer):
        raise ValueError(f"This {type(transformer).__name__} is already patched with MHLA; call remove_mhla() first.")
    if len(config.blocks) != family.axes:
        raise ValueError(
            f"blocks={config.blocks} has {len(config.blocks)} axes, but {type(transformer).__name__} has "
            f"{family.axes}; for example blocks={family.default_config.blocks}."
        )
    if any(_is_group_offloaded(module) for module in transformer.modules()):
        raise ValueError("The weights of this model are offloaded; patch it before you enable offloading.")
    attentions = list(family.self_attentions(transformer).values())
    indices = choose_layers(config.layers, len(attentions))
    if not indices:
        raise ValueError(f"layers={config.layers!r} chooses none of the {len(attentions)} layers.")
    layers = [(attentions[index], make_layer(attentions[index], config)) for index in indices]
    return _Plan(transformer, family, processor, layers)


def _is_group_offloaded(module: nn.Module) -> bool:
    hooks: Any = getattr(module, "_diffusers_hook", None)
    return hooks is not None and hooks.get_hook("group_offloading") is not None


def _carry_out(plan: _Plan) -> None:
    hook = TokenGridHook(plan.family)
    for attn, layer in plan.layers:
        layer.original_processor = attn.processor
        layer.token_grid = hook.token_grid
        attn.mhla = layer
        attn.set_processor(plan.processor)
    hook.handle = plan.transformer.register_forward_pre_hook(hook, with_kwargs=True)
    plan.family.prepare(plan.transformer)


def _attentions(transformer: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in transformer.named_modules() if hasattr(module, "set_processor")}


def _original_processor(attn: Any, family: Family, transformer: nn.Module) -> Any:
    """The processor that an attention had before the patch, or a fresh one where no record was kept."""
    layer = getattr(attn, "mhla", None)
    if layer is not None and layer.original_processor is not None:
        return layer.original_processor
    if any(attn is own for own in family.self_attentions(transformer).values()):
        return family.self_attention_processor()
    return family.cross_attention_processor()


def _grid_hook(transformer: nn.Module) -> TokenGridHook | None:
    hooks = transformer._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, TokenGridHook)), None)
