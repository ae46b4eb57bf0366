"""How much each layer's replacement alone changes the output, and the choice of the layers that hurt least."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..config import MHLAConfig, automatic_count, is_automatic
from ..families import get_family
from ..processor import MHLAProcessor
from ..sensitivity import measure_sensitivity, record_calls
from .finding import find_transformers, is_patched, require_layers
from .plan import carry_out, make_plan
from .removal import mhla_disabled, original_processor, remove_mhla


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
        name: (attn, original_processor(attn, family, transformer))
        for name, attn in family.self_attentions(transformer).items()
        if isinstance(attn.processor, MHLAProcessor)
    }


def choose_automatically(
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
        name: make_plan(transformers[name], MHLAProcessor(config.replace(layers="all"), backend=backend))
        for name, config in configs.items()
    }
    calls = record_calls(transformers, calibration)
    chosen = {}
    for name, plan in plans.items():
        carry_out(plan)
        try:
            sensitivities = measure_sensitivity(plan.transformer, _patched_pairs(plan.transformer), calls[name])
        finally:
            remove_mhla(plan.transformer)
        values = list(sensitivities.values())
        least = sorted(range(len(values)), key=values.__getitem__)
        count = automatic_count(configs[name].layers, len(values))
        chosen[name] = configs[name].replace(layers=tuple(sorted(least[:count])))
    return chosen
