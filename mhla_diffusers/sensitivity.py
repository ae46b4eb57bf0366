"""How much a model's output moves when one self-attention alone is replaced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class TransformerCall:
    """One forward of a transformer, to be run again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden_states(self) -> torch.Tensor:
        """The latents (B, C, ...), first argument of every supported transformer."""
        latents: torch.Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return latents

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Output of the transformer: (B, output channels, ...)."""
        prediction: torch.Tensor = transformer(*self.args, **{**self.kwargs, "return_dict": False})[0]
        return prediction


def record_calls(transformers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[TransformerCall]]:
    """Run something and keep the inputs of every forward of the transformers.

    Raises:
        ValueError: ``run`` did not reach a transformer.
    """
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
        raise ValueError(f"The calibration did not run {', '.join(missed)}; it must call the pipeline or transformer.")
    return calls


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def measure_sensitivity(
    transformer: nn.Module, attentions: Mapping[str, tuple[Any, Any]], calls: list[TransformerCall]
) -> dict[str, float]:
    """Replace one patched attention at a time and compare the transformer's output with that of none.

    Args:
        transformer: with all these attentions patched; it is left as it is.
        attentions: name → attention and its processor of before the patch.
        calls: inputs to compare on.

    Returns:
        Name → ‖output − output of none‖² / ‖output of none‖², averaged over the calls.
    """
    patched = {name: attn.processor for name, (attn, _) in attentions.items()}
    sensitivities = {}
    try:
        for attn, original in attentions.values():
            attn.set_processor(original)
        expected = [call.predict(transformer).float() for call in calls]
        for name, (attn, original) in attentions.items():
            attn.set_processor(patched[name])
            changes = [_change(call.predict(transformer).float(), e) for call, e in zip(calls, expected, strict=True)]
            sensitivities[name] = sum(changes) / len(changes)
            attn.set_processor(original)
    finally:
        for name, (attn, _) in attentions.items():
            attn.set_processor(patched[name])
    return sensitivities


def _change(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).square().sum() / expected.square().sum())
