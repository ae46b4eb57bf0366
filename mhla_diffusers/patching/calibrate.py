"""What a transformer is called with, recorded and run again: measure how much each layer's replacement changes the
output, and fit output norms to the attention that is replaced.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import CausalConfig, PatchConfig
from ..families import get_family
from .call import Seen, in_every_step
from .finding import mhla_disabled, require_patched
from .layer import MHLALayer
from .patched import Patched

Item = TypeVar("Item")

_CALLS = 4
"""Out of those that ``run`` makes, that are measured."""


# Calls


@dataclass(frozen=True)
class TransformerCall:
    """One forward of a transformer, to be run again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def grid(self, transformer: nn.Module) -> tuple[int, ...]:
        """Return the token grid that the transformer makes of it."""
        family = get_family(transformer)
        return tuple(map(int, family.grid(transformer, family.named_arguments(transformer, self.args, self.kwargs))))

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Run it; return the output (B, output channels, ...), as the transformer's family has it."""
        with in_every_step():  # outside of the loop that it was recorded in
            prediction = transformer(*self.args, **{**self.kwargs, "return_dict": False})[0]
        return prediction if isinstance(prediction, torch.Tensor) else torch.stack(list(prediction))


def check_run(run: Any, name: str = "run") -> None:
    """Raise unless ``run`` is a function, which is to run a model.

    Raises:
        ValueError: calling the argument ``name``.
    """
    if not callable(run):
        raise ValueError(
            f"{name}={run!r} must be a function without arguments that runs the model on typical inputs, such as "
            'lambda: pipe("a cat", num_inference_steps=4) for a pipeline.'
        )


def record_calls(transformers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[TransformerCall]]:
    """Run something and keep the inputs of every forward of the transformers.

    Raises:
        ValueError: ``run`` is not a function, or did not reach a transformer, or a step cache is enabled.
    """
    check_run(run)
    for transformer in transformers.values():
        refuse_step_cache(transformer, "recording its forwards to run them again")
    calls: dict[str, list[TransformerCall]] = {name: [] for name in transformers}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(one) for one in value]
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = {key: copied(value) for key, value in kwargs.items()}
            calls[name].append(TransformerCall(tuple(map(copied, args)), named))

        return note

    with ExitStack() as hooks, torch.no_grad():
        for name, transformer in transformers.items():
            hooks.enter_context(transformer.register_forward_pre_hook(watch(name), with_kwargs=True))
        run()
    check_reached(transformers, [name for name in transformers if calls[name]])
    return calls


def spread_calls(calls: list[Item]) -> list[Item]:
    """Choose some calls, evenly spread over all."""
    count = min(len(calls), _CALLS)
    return [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]


def check_reached(parts: Collection[str], reached: Collection[str]) -> None:
    """Raise unless a run has reached all layers or transformers.

    Raises:
        ValueError: naming one that it has not.
    """
    missed = [name for name in parts if name not in reached]
    if missed:
        raise ValueError(
            f"run() did not reach {missed[0]}, and {len(missed)} of {len(parts)} in all; it must call the pipeline or "
            "the model that was given."
        )


def refuse_step_cache(transformer: nn.Module, what: str) -> None:
    """Raise if a step cache is enabled, under which some forwards do not run every attention.

    Args:
        transformer: the model.
        what: that needs every attention of every forward, for the error.

    Raises:
        ValueError: naming how to take it away.
    """
    if getattr(transformer, "is_cache_enabled", False) or getattr(transformer, "_is_cached", False):
        raise ValueError(
            f"A step cache is enabled on this {type(transformer).__name__} and skips attentions in some steps, and "
            f"{what} needs all of them. Call transformer.disable_cache() before (cache_dit.disable_cache(pipe) of "
            "cache-dit), and enable it again afterwards."
        )


def not_finite(layer: str) -> str:
    """Return the message for NaN or infinity in what a layer is compared with."""
    return (
        f"{layer} gets or returns NaN or infinity in this run, so nothing can be fitted or compared there. Run typical "
        "inputs in a precision that the model can take, such as bfloat16 in place of float16."
    )


def refuse_causal(configs: Iterable[PatchConfig], what: str) -> None:
    """Raise if a patch is causal, where only attention that sees everything can stand in its place.

    Raises:
        ValueError: naming the order that the patch has.
    """
    for config in configs:
        if isinstance(config, CausalConfig):
            raise ValueError(
                f"{what} goes by attention that sees all tokens, and a patch with causal={config.causal!r} must not "
                "see later ones: its mixing matrices and λ are trained."
            )


# How much a layer's replacement changes the output


def layer_sensitivity(model: Any, run: Callable[[], object]) -> dict[str, float]:
    """Measure how much each patched layer alone moves the output, all others attending as before the patch.

    Args:
        model: a patched pipeline or transformer.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``. The inputs
            that the transformer gets with the patch switched off are those that are compared on.

    Returns:
        Name of the attention, for a pipeline with the component's name before it → relative squared change of the
        transformer's output.

    Raises:
        ValueError: the model is not patched, ``run`` did not reach it, or it returns NaN or infinity there.
    """
    handles = require_patched(model)
    with mhla_disabled(model):
        calls = record_calls({component: patched.transformer for component, patched in handles.items()}, run)
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{layer}": value
        for component, patched in handles.items()
        for layer, value in measure_sensitivity(patched, calls[component]).items()
    }


@torch.no_grad()
def measure_sensitivity(patched: Patched, calls: Sequence[TransformerCall]) -> dict[str, float]:
    """Replace one patched attention at a time and compare the transformer's output with that of none.

    Args:
        patched: left as it is.
        calls: inputs to compare on.

    Returns:
        Name → ‖output − output of none‖² / ‖output of none‖², averaged over the calls.

    Raises:
        ValueError: that is NaN or infinite.
    """
    sensitivities = {}
    with patched.running_only(()):
        expected = [call.predict(patched.transformer).float() for call in calls]
    for name in patched.chosen:
        with patched.running_only((name,)):
            sensitivities[name] = _mean_change(patched.transformer, calls, expected)
        if not math.isfinite(sensitivities[name]):
            raise ValueError(not_finite(name))
    return sensitivities


@torch.no_grad()
def measure_change(patched: Patched, calls: Sequence[TransformerCall]) -> float:
    """Measure how much the whole patch moves the output, relative and squared as of one layer, averaged over calls."""
    with patched.running_only(()):
        expected = [call.predict(patched.transformer).float() for call in calls]
    return _mean_change(patched.transformer, calls, expected)


def _mean_change(transformer: nn.Module, calls: Sequence[TransformerCall], expected: Sequence[torch.Tensor]) -> float:
    changes = []
    for call, wanted in zip(calls, expected, strict=True):
        output = call.predict(transformer).float()
        changes.append(float((output - wanted).square().sum() / wanted.square().sum()))
    return sum(changes) / len(changes)


# The output norm


@torch.no_grad()
def calibrate_output_norm(model: Any, run: Callable[[], object]) -> None:
    """Set every output norm so that MHLA's output has the scale of the replaced attention's.

    ``run`` is called once; the root mean square of every head channel of the original attention, over all tokens and
    heads, becomes the weight of the output RMSNorm.

    Args:
        model: a patched pipeline or transformer whose configuration has ``output_norm=True``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched or has no output norm, ``run`` did not reach every layer, or one returns
            NaN or infinity there.
    """
    check_run(run)
    handles = require_patched(model)
    layers: dict[tuple[str, str], MHLALayer] = {
        (component, name): layer
        for component, patched in handles.items()
        for name, layer in patched.layers.items()
        if layer.output_norm is not None
    }
    if not layers:
        raise ValueError("The model has no output norm to calibrate; patch it with output_norm=True.")
    squares: dict[tuple[str, str], torch.Tensor] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)

    def note(component: str) -> Callable[[Seen], torch.Tensor]:
        def seen(one: Seen) -> torch.Tensor:
            """Sum up the squares of the original attention's output, and go on with it."""
            key, exact = (component, one.layer), one.exact()
            heads = exact.detach().float().flatten(0, -2)
            squares[key] = squares.get(key, torch.zeros_like(heads[0])) + heads.square().sum(dim=0)
            counts[key] += len(heads)
            return exact

        return seen

    with ExitStack() as stack:
        for component, patched in handles.items():
            refuse_step_cache(patched.transformer, "calibrate_output_norm()")
            stack.enter_context(patched.watched(note(component)))
        run()
    check_reached([".".join(key) for key in layers], [".".join(key) for key in counts])
    for key, total in squares.items():
        if not bool(total.isfinite().all()):
            raise ValueError(not_finite(key[1]))
    for key, layer in layers.items():
        assert layer.output_norm is not None
        layer.output_norm.copy_((squares[key] / counts[key]).sqrt())
