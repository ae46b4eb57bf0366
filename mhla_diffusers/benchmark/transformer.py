"""A whole transformer with random weights, a forward or a training step: softmax against linear attentions."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..families import Model, get_family
from .candidates import REST, Candidate, Choice, attention_choices, exact_choice, make_candidate, make_variant
from .conditions import Rates
from .correctness import check_patched
from .models import Size, build_transformer, make_forward_inputs, small_size
from .parts import count_parts, time_parts
from .results import PART, Row, make_row
from .shapes import Cost
from .timing import Absent, Budget, Outcome, free_bytes, show_progress, time_interleaved

FORWARD = "forward"
TRAINING_STEP = "training step"
_RECOMPILE_LIMIT = 64
"""Every variant compiles the same code anew; beyond the limit torch would silently stop compiling."""
_TRAINING_COPIES = 4
"""Weights, gradients and both moments of AdamW."""
_TRAINING_PASSES = 3
"""A backward pass counts two forwards."""


@dataclass(frozen=True)
class TransformerCase:
    """A model at one size.

    Raises:
        ValueError: no layers, or more than the model has.
    """

    model: Model
    size: Size
    layers: int | None
    """Build only so many; None for all."""
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.layers is not None and not 1 <= self.layers <= self.model.layers:
            raise ValueError(
                f"layers={self.layers} must be from 1 to {self.model.layers}, the layers of {self.model.name}."
            )

    @property
    def is_cut(self) -> bool:
        """Whether times must be extrapolated to the whole model."""
        return self.layers is not None and self.layers < self.model.layers

    @property
    def layers_built(self) -> int:
        """How many layers are timed."""
        return self.layers or self.model.layers

    def build(self, device: torch.device | None = None) -> Any:
        """The transformer, on the device of the case or on another."""
        return build_transformer(self.model, self.size, self.layers, device or self.device, self.dtype)

    def inputs(self, transformer: Any, size: Size | None = None) -> dict[str, Any]:
        """Of the forward, on the transformer's device."""
        return make_forward_inputs(self.model, transformer, size or self.size, transformer.device, self.dtype)

    def row(self, outcome: Outcome, rates: Rates, **what: Any) -> Row:
        """A row of this case."""
        layers = {"layers": self.layers_built, "all_layers": self.model.layers} | what
        return make_row(
            outcome,
            rates,
            case=f"{self.model.name} {self.size}",
            model=self.model.name,
            frames=self.size.frames,
            height=self.size.height,
            width=self.size.width,
            batch=self.size.batch,
            dtype=str(self.dtype).removeprefix("torch."),
            **layers,
        )


@dataclass(frozen=True)
class Counts:
    """What is told by the shapes of a case alone."""

    tokens: int
    weight_bytes: int
    choices: list[Choice]
    costs: dict[str, dict[str, Cost]]
    """Kind of attention → cost of every part of a forward."""

    def flops(self, kind: str) -> int | None:
        """Of a forward with a kind of attention; None where it cannot run."""
        return sum(cost.flops for cost in self.costs[kind].values()) if kind in self.costs else None


def benchmark_transformer(
    case: TransformerCase, rates: Rates, budget: Budget, *, compile: bool, only: Collection[str] | None = None
) -> list[Row]:
    """Check the patched attention, then time a forward of all variants in turns, and then the parts of each.

    Args:
        case: what to measure.
        rates: of the device.
        budget: how often.
        compile: time every variant with its repeated blocks compiled as well.
        only: names of self-attentions; all for None.

    Returns:
        A row per variant, and one per variant and part.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    counts = count(case, only)
    if (refused := _refuse_for_memory(case, counts.weight_bytes, rates, FORWARD)) is not None:
        return [refused]
    transformer = case.build()
    check_case(case, transformer)
    inputs = case.inputs(transformer)
    candidates = _make_candidates(case, transformer, counts.choices, compile=compile)
    for candidate in _runnable(candidates):
        candidate.run = candidate.forward(inputs)
    with torch._dynamo.config.patch(cache_size_limit=_RECOMPILE_LIMIT):
        _measure(candidates, case.device, budget)
    rows = _rows(case, counts, candidates, rates, FORWARD, passes=1)
    for candidate in show_progress(candidates, "looking at parts"):
        rows += _part_rows(case, counts, candidate, rates)
    torch.compiler.reset()
    return rows


def benchmark_training(
    case: TransformerCase, rates: Rates, budget: Budget, *, checkpointing: bool, only: Collection[str] | None = None
) -> list[Row]:
    """Check the patched attention, then time a step of every variant in turns; all weights train.

    Args:
        case: what to measure.
        rates: of the device.
        budget: how often.
        checkpointing: compute activations again in the backward pass instead of keeping them.
        only: names of self-attentions; all for None.

    Returns:
        A row per variant.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    counts = count(case, only)
    if (refused := _refuse_for_memory(case, _TRAINING_COPIES * counts.weight_bytes, rates, TRAINING_STEP)) is not None:
        return [refused]
    transformer = case.build()
    check_case(case, transformer)
    inputs = case.inputs(transformer)
    candidates = _make_candidates(case, transformer, counts.choices, compile=False)
    weights = {id(weight): weight for one in _runnable(candidates) for weight in one.model.parameters()}
    # a learning rate of 0 moves the same bytes and leaves every repetition the same weights
    optimizer = torch.optim.AdamW(list(weights.values()), lr=0.0)
    for candidate in _runnable(candidates):
        candidate.model.train()
        if checkpointing:
            candidate.model.enable_gradient_checkpointing()
        candidate.run = candidate.training_step(inputs, optimizer)
    _measure(candidates, case.device, budget)
    return _rows(case, counts, candidates, rates, TRAINING_STEP, _TRAINING_PASSES)


def count(case: TransformerCase, only: Collection[str] | None = None) -> Counts:
    """Build the transformer on the meta device, where it costs nothing, and count.

    Args:
        case: what is measured.
        only: names of self-attentions; all for None.
    """
    transformer = case.build(torch.device("meta"))
    inputs, family = case.inputs(transformer), get_family(transformer)
    grid = family.grid_of_arguments(transformer, inputs)
    choices = attention_choices(family, case.model, case.layers_built, grid, case.size.batch, case.device)
    choices = [choice for choice in choices if only is None or choice.name in only]
    costs: dict[str, dict[str, Cost]] = {}
    for choice in choices:
        if choice.absent is None and choice.kind not in costs:
            costs[choice.kind] = count_parts(make_variant(transformer, case.model, choice), inputs)
    weights = sum(parameter.numel() * parameter.itemsize for parameter in transformer.parameters())
    return Counts(math.prod(grid), weights, choices, costs)


def _refuse_for_memory(case: TransformerCase, needed: int, rates: Rates, stage: str) -> Row | None:
    """A row that says so if not even the weights fit; asked beforehand, as Linux ends a process that tries."""
    free = free_bytes(case.device)
    if needed <= free:
        return None
    reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free. --layers builds fewer"
    return case.row(Outcome("out of memory", reason=reason), rates, stage=stage, variant="all", baseline=False)


def check_case(case: TransformerCase, transformer: Any) -> None:
    """Compare the patched self-attention, without and with exact tiles, with the reference on a small input.

    Raises:
        IncorrectAttentionError: it is wrong here.
    """
    inputs = case.inputs(transformer, small_size(case.model))
    grid = get_family(transformer).grid_of_arguments(transformer, inputs)
    for choice in (Choice("MHLA", "MHLA", baseline=False), exact_choice(case.model, grid)):
        if choice is not None:
            check_patched(make_variant(transformer, case.model, choice), inputs)


def _make_candidates(
    case: TransformerCase, transformer: Any, choices: Sequence[Choice], *, compile: bool
) -> list[Candidate]:
    found = [
        make_candidate(transformer, case.model, choice, compiled=compiled)
        for choice in choices
        for compiled in ((False, True) if compile else (False,))
    ]
    return [*found, make_candidate(transformer, case.model, REST)] if case.is_cut else found


def _runnable(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.model is not None]


def _measure(candidates: Sequence[Candidate], device: torch.device, budget: Budget) -> None:
    """Time all in turns and give each its outcome."""
    outcomes = time_interleaved({candidate.name: candidate.run for candidate in candidates}, device, budget)
    for candidate in candidates:
        candidate.outcome = outcomes[candidate.name]


def _rows(
    case: TransformerCase, counts: Counts, candidates: Sequence[Candidate], rates: Rates, stage: str, passes: int
) -> list[Row]:
    """A row per candidate; where layers are cut, with the time of all layers, extrapolated from the time of one.

    Args:
        case: what was measured.
        counts: of the case.
        candidates: with their outcomes; ``REST`` among them where layers are cut.
        rates: of the device.
        stage: of the rows.
        passes: how many times the arithmetic of a forward it is.
    """
    rest = next((one.outcome for one in candidates if one.choice == REST), None)
    rows = []
    for candidate in candidates:
        choice, flops = candidate.choice, counts.flops(candidate.choice.kind)
        whole = None if choice == REST else _whole_seconds(case, candidate.outcome, rest)
        notes = [choice.note] if choice.note else []
        if case.is_cut and whole is not None:
            notes.append(f"{case.layers} of {case.model.layers} layers; all would take {1000 * whole:.3g} ms")
        rows.append(
            case.row(
                candidate.outcome,
                rates,
                stage=stage,
                variant=candidate.name,
                baseline=choice.baseline,
                blocks=choice.blocks,
                tokens=counts.tokens,
                flops=None if flops is None else passes * flops,
                whole_seconds=whole,
                note="; ".join(notes),
                **({"layers": 0} if choice == REST else {}),
            )
        )
    return rows


def _whole_seconds(case: TransformerCase, outcome: Outcome, rest: Outcome | None) -> float | None:
    """Median of a variant with all layers of the model."""
    if outcome.timing is None or not case.is_cut:
        return None if outcome.timing is None else outcome.timing.median
    if rest is None or rest.timing is None:
        return None
    of_layers = outcome.timing.median - rest.timing.median
    return rest.timing.median + of_layers * case.model.layers / case.layers_built


def _part_rows(case: TransformerCase, counts: Counts, candidate: Candidate, rates: Rates) -> list[Row]:
    """A row per part of a candidate that was measured; parts of what is compiled are not told apart."""
    run = candidate.run
    measured = candidate.outcome.status == "measured"
    if not measured or isinstance(run, Absent) or candidate.compiled or candidate.choice == REST:
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
        for part, timing in time_parts(candidate.model, run, case.device).items()
    ]
