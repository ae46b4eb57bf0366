"""Replace the self-attention of a pipeline or transformer by MHLA, through ``apply_mhla`` or diffusers' own form."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..config import MHLAConfig, Patch, is_automatic, load_patch
from ..families import Family, get_family
from .finding import attentions_of, find_transformers, refuse_causal, refuse_language
from .mixing_calibration import calibrate_mixing
from .plan import automatic_count, carry_out, make_plan, refuse_order
from .processor import MHLAProcessor
from .removal import remove_mhla
from .sensitivity import check_run, measure_sensitivity, patched_pairs, record_calls, repeat_calls
from .sparse_calibration import calibrate_sparse

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
    of them, ``apply_mhla(pipe, "wan2.1-t2v-1.3b-hybrid")`` takes a ready patch. Cross-attention stays as it is. If
    anything is refused, the model is unchanged.

    Args:
        model: a pipeline (all its supported transformers are patched) or one transformer.
        patch: settings, the name of a ready patch, or the path of a patch YAML; None for the family's defaults.
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
            f"patch={patch!r} must be a MHLAConfig, the name of a ready patch or the path of a patch YAML; "
            "single settings are keywords, for example blocks=(4, 4)."
        )
    if calibration is not None:
        check_run(calibration, "calibration")
        refuse_language(model, "calibration")
    for transformer in transformers.values():  # before the settings, which would ask for more of such a patch
        refuse_order(transformer, settings.get("causal"))
    chosen = load_patch(patch) if isinstance(patch, str | Path) else patch
    configs = {
        name: _choose_config(get_family(transformer), chosen).replace(**settings)
        for name, transformer in transformers.items()
    }
    if calibration is not None:
        refuse_causal(configs.values(), "calibration")
    automatic = any(is_automatic(config.layers) for config in configs.values())
    is_sparse = any(config.sparse != "none" for config in configs.values())
    calibrate = calibrate_sparse if is_sparse else None if automatic else calibrate_mixing
    if calibration is not None and automatic:
        configs = _choose_automatically(transformers, configs, calibration, backend)
    plans = [make_plan(transformers[name], MHLAProcessor(config, backend=backend)) for name, config in configs.items()]
    for plan in plans:
        carry_out(plan, model)
    if calibration is not None and calibrate is not None:
        try:
            calibrate(model, calibration)
        except BaseException:
            remove_mhla(model)
            raise
    return model


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
        name: make_plan(transformers[name], MHLAProcessor(config.replace(layers="all"), backend=backend))
        for name, config in configs.items()
    }
    calls = record_calls(transformers, calibration)
    chosen = {}
    for name, plan in plans.items():
        carry_out(plan, plan.transformer)
        try:
            if plan.processor.config.sparse != "none":
                calibrate_sparse(plan.transformer, partial(repeat_calls, plan.transformer, calls[name]))
            sensitivities = measure_sensitivity(plan.transformer, patched_pairs(plan.transformer), calls[name])
        finally:
            remove_mhla(plan.transformer)
        values = list(sensitivities.values())
        least = sorted(range(len(values)), key=values.__getitem__)
        count = automatic_count(configs[name].layers, len(values))
        chosen[name] = configs[name].replace(layers=tuple(sorted(least[:count])))
    return chosen


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
        carry_out(make_plan(transformer, processor), transformer)
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
