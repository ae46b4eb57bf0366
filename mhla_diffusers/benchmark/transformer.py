"""A whole model with random weights, a forward or a training step: softmax against linear attentions."""

from collections.abc import Sequence
from typing import Any

import torch

from .candidates import REST, Candidate
from .cases import Case, Counts
from .conditions import Rates
from .results import PART, Row
from .timing import Budget, Outcome, free_bytes, show_progress, time_interleaved

FORWARD = "forward"
TRAINING_STEP = "training step"
_RECOMPILE_LIMIT = 64
"""Every variant compiles the same code anew; beyond the limit torch would silently stop compiling."""
_TRAINING_COPIES = 4
"""Weights, gradients and both moments of AdamW."""
_TRAINING_PASSES = 3
"""A backward pass counts two forwards."""


def benchmark_transformer(case: Case, rates: Rates, budget: Budget, *, compile: bool) -> list[Row]:
    """Check the patched attention, then time a forward of all variants in turns, and then the parts of each.

    Args:
        case: what to measure.
        rates: of the device.
        budget: how often.
        compile: time every variant with its repeated blocks compiled as well.

    Returns:
        A row per variant, and one per variant and part.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    counts = case.count()
    if (refused := _refuse_for_memory(case, counts.weight_bytes, rates, FORWARD)) is not None:
        return [refused]
    candidates, inputs = _make_candidates(case, counts, compile=compile)
    for candidate in _runnable(candidates):
        candidate.run = candidate.forward(inputs)
    with torch._dynamo.config.patch(cache_size_limit=_RECOMPILE_LIMIT):
        rows = _measure(case, counts, candidates, rates, budget, FORWARD)
    for candidate in show_progress(candidates, "looking at parts"):
        rows += _part_rows(case, counts, candidate, rates)
    torch.compiler.reset()
    return rows


def benchmark_training(case: Case, rates: Rates, budget: Budget, *, checkpointing: bool) -> list[Row]:
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
    """
    counts = case.count()
    if (refused := _refuse_for_memory(case, _TRAINING_COPIES * counts.weight_bytes, rates, TRAINING_STEP)) is not None:
        return [refused]
    candidates, inputs = _make_candidates(case, counts, compile=False)
    weights = {id(weight): weight for one in _runnable(candidates) for weight in one.model.parameters()}
    # a learning rate of 0 moves the same bytes and leaves every repetition the same weights
    optimizer = torch.optim.AdamW(list(weights.values()), lr=0.0)
    for candidate in _runnable(candidates):
        model = candidate.model.train()
        if checkpointing:  # by the method that diffusers gives its models, or transformers
            (getattr(model, "enable_gradient_checkpointing", None) or model.activation_checkpointing_enable)()
        candidate.run = candidate.training_step(inputs, optimizer)
    return _measure(case, counts, candidates, rates, budget, TRAINING_STEP)


def _refuse_for_memory(case: Case, needed: int, rates: Rates, stage: str) -> Row | None:
    """A row that says so if not even the weights fit; asked beforehand, as Linux ends a process that tries."""
    free = free_bytes(case.device)
    if needed <= free:
        return None
    reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
    if case.can_be_cut:
        reason += ". --layers builds fewer"
    return case.row(Outcome("out of memory", reason=reason), rates, stage=stage, variant="all", baseline=False)


def _make_candidates(case: Case, counts: Counts, *, compile: bool) -> tuple[list[Candidate], dict[str, Any]]:
    """Of a model that was built and checked, with the inputs of its forward."""
    model = case.build()
    case.check(model)
    found = [
        case.candidate(model, choice, compiled=compiled)
        for choice in counts.choices
        for compiled in ((False, True) if compile else (False,))
    ]
    return [*found, case.candidate(model, REST)] if case.is_cut else found, case.inputs(model)


def _runnable(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.model is not None]


def _measure(
    case: Case, counts: Counts, candidates: Sequence[Candidate], rates: Rates, budget: Budget, stage: str
) -> list[Row]:
    """Time all in turns, give each its outcome, and make a row of each.

    Where layers are cut, with the time of all layers, extrapolated from the time of one and of ``REST``.
    """
    outcomes = time_interleaved({candidate.name: candidate.run for candidate in candidates}, case.device, budget)
    rest, rows = outcomes.get(REST.name), []
    for candidate in candidates:
        choice, flops = candidate.choice, counts.flops(candidate.choice.kind)
        candidate.outcome = outcomes[candidate.name]
        whole = None if choice == REST else _whole_seconds(case, candidate.outcome, rest)
        notes = [choice.note] if choice.note else []
        if case.is_cut and whole is not None:
            notes.append(f"{case.layers} of {case.all_layers} layers; all would take {1000 * whole:.3g} ms")
        rows.append(
            case.row(
                candidate.outcome,
                rates,
                stage=stage,
                variant=candidate.name,
                baseline=choice.baseline,
                blocks=choice.blocks,
                tokens=counts.tokens,
                flops=None if flops is None else flops * (_TRAINING_PASSES if stage == TRAINING_STEP else 1),
                whole_seconds=whole,
                note="; ".join(notes),
                **({"layers": 0} if choice == REST else {}),
            )
        )
    return rows


def _whole_seconds(case: Case, outcome: Outcome, rest: Outcome | None) -> float | None:
    """Median of a variant with all layers of the model."""
    if outcome.timing is None or not case.is_cut:
        return None if outcome.timing is None else outcome.timing.median
    if rest is None or rest.timing is None:
        return None
    of_layers = outcome.timing.median - rest.timing.median
    return rest.timing.median + of_layers * case.all_layers / case.layers_built


def _part_rows(case: Case, counts: Counts, candidate: Candidate, rates: Rates) -> list[Row]:
    """A row per part of a candidate that was measured; parts of what is compiled are not told apart."""
    if candidate.outcome.status != "measured" or candidate.compiled or candidate.choice == REST:
        return []
    costs = counts.costs[candidate.choice.kind]
    return [
        case.row(
            Outcome("measured", timing),
            rates,
            stage=PART + part,
            variant=candidate.name,
            baseline=False,
            tokens=counts.tokens,
            flops=costs[part].flops or None,  # none of a part that the model does not have
            bytes=costs[part].bytes or None,
        )
        for part, timing in case.time_parts(candidate).items()
    ]
