"""One training step of a transformer: forward, backward and the optimizer."""

from collections.abc import Callable
from typing import Any

import torch

from .rates import Rates
from .results import Row
from .timing import Absent, Budget, Variant, time_interleaved
from .transformer import REST, TransformerCase, case_rows, check_case, look_at_shapes, refuse_for_memory
from .variants import Choice, make_context, make_variant, without_layers

STAGE = "training step"
_COPIES = 4
"""Weights, gradients and both moments of AdamW."""
_PASSES = 3
"""A backward pass counts two forwards."""


def benchmark_training(case: TransformerCase, rates: Rates, budget: Budget, *, checkpointing: bool) -> list[Row]:
    """Check the patched attention, then time a step of every variant in turns; all weights train.

    Args:
        case: what to measure.
        rates: of the device.
        budget: how often.
        checkpointing: compute activations again in the backward pass instead of keeping them.

    Returns:
        A row per variant.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
        ValueError: more layers than the model has.
    """
    shapes = look_at_shapes(case)
    refused = refuse_for_memory(case, _COPIES * shapes.weight_bytes, rates, STAGE)
    if refused is not None:
        return [refused]
    transformer = case.build()
    check_case(case, transformer)
    choices = {choice.name: choice for choice in shapes.choices}
    models = {
        name: make_variant(transformer, case.model, choice) for name, choice in choices.items() if not choice.absent
    }
    if case.is_cut:
        choices[REST] = Choice(REST, REST, baseline=False)
        models[REST] = without_layers(transformer)
    weights = {id(weight): weight for model in models.values() for weight in model.parameters()}
    # a learning rate of 0 moves the same bytes and leaves every repetition the same weights
    optimizer = torch.optim.AdamW(list(weights.values()), lr=0.0)
    inputs = case.inputs(transformer)
    variants: dict[str, Variant] = {}
    for name, choice in choices.items():
        if choice.absent is not None:
            variants[name] = Absent(choice.absent)
            continue
        models[name].train()
        if checkpointing:
            models[name].enable_gradient_checkpointing()
        variants[name] = _step(models[name], choice, inputs, optimizer)
    outcomes = time_interleaved(variants, case.device, budget)
    return case_rows(case, shapes, choices, outcomes, rates, STAGE, _PASSES)


def _step(
    transformer: Any, choice: Choice, inputs: dict[str, Any], optimizer: torch.optim.Optimizer
) -> Callable[[], object]:
    context = make_context(transformer, choice)

    def run() -> None:
        try:
            with context():
                output = transformer(**inputs)[0]
                output.float().square().mean().backward()
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)  # also after running out of memory

    return run
