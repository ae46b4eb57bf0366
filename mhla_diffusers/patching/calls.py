"""Recorded calls of a transformer, and how much each layer's replacement alone changes its output on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..families import get_family
from .finding import mhla_disabled, refuse_language, require_layers, require_patched
from .handle import Patched
from .hooks import refuse_step_cache
from .runtime import call_context


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
    refuse_language(model, "layer_sensitivity()")
    require_layers(model)
    handles = require_patched(model)
    calls = record_unpatched(model, handles, run)
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{layer}": value
        for component, patched in handles.items()
        for layer, value in measure_sensitivity(patched, calls[component]).items()
    }


@dataclass(frozen=True)
class TransformerCall:
    """One forward of a transformer, to be run again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def grid(self, transformer: nn.Module) -> tuple[int, ...]:
        """Token grid that the transformer makes of it."""
        family = get_family(transformer)
        arguments = family.named_arguments(self.args, self.kwargs)
        return tuple(int(size) for size in family.grid_of_arguments(transformer, arguments))

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Output of the transformer: (B, output channels, ...), as its family has it."""
        with call_context(in_every_step=True):  # outside of the loop that it was recorded in
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
            'lambda: pipe("a cat", num_inference_steps=4) for a pipeline, or lambda: model(pictures).'
        )


def record_calls(transformers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[TransformerCall]]:
    """Run something and keep the inputs of every forward of the transformers.

    Raises:
        ValueError: ``run`` is no function, or did not reach a transformer, or a step cache is enabled.
    """
    check_run(run)
    for transformer in transformers.values():
        refuse_step_cache(transformer, "recording its forwards to run them again")
    calls: dict[str, list[TransformerCall]] = {name: [] for name in transformers}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            copied = {key: _copy(value) for key, value in kwargs.items()}
            calls[name].append(TransformerCall(tuple(map(_copy, args)), copied))

        return note

    handles = [t.register_forward_pre_hook(watch(name), with_kwargs=True) for name, t in transformers.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in transformers if not calls[name]]
    if missed:
        raise ValueError(
            f"run() did not run {', '.join(missed)}; it must call the pipeline or the model that was given."
        )
    return calls


def record_unpatched(
    model: Any, handles: Mapping[str, Patched], run: Callable[[], object]
) -> dict[str, list[TransformerCall]]:
    """Like :func:`record_calls`, with the patch switched off: what the transformers get from an unpatched model."""
    with mhla_disabled(model):
        return record_calls({component: patched.transformer for component, patched in handles.items()}, run)


def repeat_calls(transformer: nn.Module, calls: Iterable[TransformerCall]) -> None:
    """Run a transformer on recorded calls again."""
    for call in calls:
        call.predict(transformer)


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def measure_sensitivity(patched: Patched, calls: Sequence[TransformerCall]) -> dict[str, float]:
    """Replace one patched attention at a time and compare the transformer's output with that of none.

    Args:
        patched: left as it is.
        calls: inputs to compare on.

    Returns:
        Name → ‖output − output of none‖² / ‖output of none‖², averaged over the calls.
    """
    pairs, sensitivities = patched.running_pairs(), {}
    processors = {name: attn.processor for name, (attn, _) in pairs.items()}
    with patched.pause():
        try:
            for attn, original in pairs.values():
                attn.set_processor(original)
            expected = [call.predict(patched.transformer).float() for call in calls]
            for name, (attn, original) in pairs.items():
                attn.set_processor(processors[name])
                sensitivities[name] = _mean_change(patched.transformer, calls, expected)
                attn.set_processor(original)
        finally:
            for name, (attn, _) in pairs.items():
                attn.set_processor(processors[name])
    return sensitivities


@torch.no_grad()
def measure_change(patched: Patched, calls: Sequence[TransformerCall]) -> float:
    """How much the whole patch moves the output, relative and squared as of one layer, averaged over calls."""
    with patched.disabled():
        expected = [call.predict(patched.transformer).float() for call in calls]
    return _mean_change(patched.transformer, calls, expected)


def _mean_change(transformer: nn.Module, calls: Sequence[TransformerCall], expected: Sequence[torch.Tensor]) -> float:
    changes = []
    for call, wanted in zip(calls, expected, strict=True):
        output = call.predict(transformer).float()
        changes.append(float((output - wanted).square().sum() / wanted.square().sum()))
    return sum(changes) / len(changes)
