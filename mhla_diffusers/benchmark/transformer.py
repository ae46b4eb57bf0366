"""A whole model with random weights, a forward or a training step: softmax against linear attentions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .cases import REST, Candidate, Case, Counts
from .parts import time_parts
from .results import PART, Recorder, Row
from .timing import Absent, Outcome, Variant, free_bytes, show_progress

FORWARD, TRAINING_STEP = "forward", "training step"


def benchmark_transformer(case: Case, recorder: Recorder, *, compile: bool) -> list[Row]:
    """Check the patched attention, then time a forward of all variants in turns, and then the parts of each.

    With ``compile`` every variant is timed with its repeated blocks compiled as well.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    counts = case.count()
    if (refused := _refuse_for_memory(case, counts.weight_bytes, recorder, FORWARD)) is not None:
        return [refused]
    candidates, inputs = _make_candidates(case, counts, compile=compile)
    runs = {candidate.name: candidate.run(inputs) for candidate in candidates}
    # every variant compiles the same code anew; beyond the limit torch would silently stop compiling
    with torch._dynamo.config.patch(cache_size_limit=64):
        rows = _measure(case, counts, candidates, runs, recorder, FORWARD)
    measured = {row.variant for row in rows if row.median is not None}
    for candidate in show_progress(candidates, "looking at parts"):
        run = runs[candidate.name]
        told_apart = case.is_uniform and not candidate.compiled and candidate.choice != REST
        if told_apart and candidate.name in measured and not isinstance(run, Absent):
            costs = counts.costs[candidate.choice.kind]
            rows += [
                case.row(
                    recorder,
                    Outcome("measured", timing),
                    stage=PART + part,
                    variant=candidate.name,
                    baseline=False,
                    tokens=counts.tokens,
                    flops=costs[part].flops or None,  # none of a part that the model does not have
                    bytes=costs[part].bytes or None,
                )
                for part, timing in time_parts(candidate.model, run, case.device).items()
            ]
    torch.compiler.reset()
    return rows


def benchmark_training(case: Case, recorder: Recorder, *, checkpointing: bool) -> list[Row]:
    """Check the patched attention, then time a step of every variant in turns; all weights train.

    With ``checkpointing`` activations are computed again in the backward pass instead of kept.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    counts = case.count()
    copies = 4  # weights, gradients and both moments of AdamW
    if (refused := _refuse_for_memory(case, copies * counts.weight_bytes, recorder, TRAINING_STEP)) is not None:
        return [refused]
    candidates, inputs = _make_candidates(case, counts, compile=False)
    models = [candidate.model for candidate in candidates if candidate.model is not None]
    weights = {id(weight): weight for model in models for weight in model.parameters()}
    # a learning rate of 0 moves the same bytes and leaves every repetition the same weights
    optimizer = torch.optim.AdamW(list(weights.values()), lr=0.0)
    for model in models:
        model.train()
        if checkpointing:  # by the method that diffusers gives its models, or transformers
            (getattr(model, "enable_gradient_checkpointing", None) or model.activation_checkpointing_enable)()
    runs = {candidate.name: candidate.run(inputs, optimizer) for candidate in candidates}
    return _measure(case, counts, candidates, runs, recorder, TRAINING_STEP)


def _refuse_for_memory(case: Case, needed: int, recorder: Recorder, stage: str) -> Row | None:
    """A row that says so if not even the weights fit; asked beforehand, as Linux ends a process that tries."""
    free = free_bytes(case.device)
    if needed <= free:
        return None
    reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
    reason += ". --layers builds fewer" if case.is_uniform else ""
    return case.row(recorder, Outcome("out of memory", reason=reason), stage=stage, variant="all", baseline=False)


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


def _measure(
    case: Case,
    counts: Counts,
    candidates: Sequence[Candidate],
    runs: Mapping[str, Variant],
    recorder: Recorder,
    stage: str,
) -> list[Row]:
    """Time all in turns, and make a row of each.

    Where layers are cut, with the time of all layers, extrapolated from the time of those and of ``REST``.
    """
    outcomes, rows = recorder.measure(runs), []
    rest = outcomes.get(REST.name)
    for candidate in candidates:
        choice, outcome = candidate.choice, outcomes[candidate.name]
        flops, notes = counts.flops(choice.kind), [choice.note] if choice.note else []
        whole = None if outcome.timing is None or choice == REST else outcome.timing.median
        if case.is_cut and whole is not None:
            without = None if rest is None or rest.timing is None else rest.timing.median
            if without is None:
                whole = None
            else:
                whole = without + (whole - without) * case.all_layers / int(case.layers or 1)
                notes.append(f"{case.layers} of {case.all_layers} layers; all would take {1000 * whole:.3g} ms")
        rows.append(
            case.row(
                recorder,
                outcome,
                stage=stage,
                variant=candidate.name,
                baseline=choice.baseline,
                blocks=choice.blocks,
                tokens=counts.tokens,
                # a backward pass counts two forwards
                flops=None if flops is None else flops * (3 if stage == TRAINING_STEP else 1),
                whole_seconds=whole,
                note="; ".join(notes),
                **({"layers": 0} if choice == REST else {}),
            )
        )
    return rows
