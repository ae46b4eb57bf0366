"""A whole transformer with random weights: softmax through every backend against linear attentions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..families import get_family
from .correctness import check_patched
from .memory import free_bytes
from .models import Model, Size, build_transformer, make_forward_inputs, small_size
from .parts import time_parts
from .rates import Rates
from .results import Row, make_row
from .timing import Absent, Budget, Outcome, Variant, show_progress, time_interleaved
from .variants import (
    COMPILED,
    Choice,
    attention_choices,
    can_compile,
    compile_layers,
    make_context,
    make_variant,
    without_layers,
)

REST = "without layers"
_RECOMPILE_LIMIT = 64
"""Every variant compiles the same code anew; beyond the limit torch would silently stop compiling."""


@dataclass(frozen=True)
class TransformerCase:
    """A model at one size.

    Raises:
        ValueError: more layers than the model has, when something is built.
    """

    model: Model
    size: Size
    layers: int | None
    """Build only so many; None for all."""
    device: torch.device
    dtype: torch.dtype

    @property
    def is_cut(self) -> bool:
        """Whether times must be extrapolated to the whole model."""
        return self.layers is not None and self.layers < self.model.layers

    def build(self) -> Any:
        """The transformer."""
        return build_transformer(self.model, self.size, self.layers, self.device, self.dtype)

    def inputs(self, transformer: Any, size: Size | None = None) -> dict[str, Any]:
        """Of the forward."""
        return make_forward_inputs(self.model, transformer, size or self.size, self.device, self.dtype)

    def row(self, outcome: Outcome, rates: Rates, **what: Any) -> Row:
        """A row of this case."""
        layers = {"layers": self.layers or self.model.layers, "all_layers": self.model.layers} | what
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
class Shapes:
    """What is told by the shapes of a case alone."""

    tokens: int
    weight_bytes: int
    choices: list[Choice]
    flops: dict[str, int]
    """Kind of attention → FLOPs of a forward."""


def benchmark_transformer(case: TransformerCase, rates: Rates, budget: Budget, *, compile: bool) -> list[Row]:
    """Check the patched attention, then time all variants in turns, and then the parts of each.

    Args:
        case: what to measure.
        rates: of the device.
        budget: how often.
        compile: time every variant with its repeated blocks compiled as well.

    Returns:
        A row per variant, and one per variant and part.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
        ValueError: more layers than the model has.
    """
    shapes = look_at_shapes(case)
    refused = refuse_for_memory(case, shapes.weight_bytes, rates, "forward")
    if refused is not None:
        return [refused]
    transformer = case.build()
    check_case(case, transformer)
    inputs = case.inputs(transformer)
    models: dict[str, Any] = {}
    variants: dict[str, Variant] = {}
    choices: dict[str, Choice] = {}
    for choice in shapes.choices:
        for suffix in ("", COMPILED) if compile else ("",):
            name = choice.name + suffix
            choices[name] = choice
            absent = can_compile(choice) if suffix else Absent(choice.absent) if choice.absent else None
            if absent is None:
                models[name] = make_variant(transformer, case.model, choice)
                if suffix:
                    compile_layers(models[name])
            variants[name] = absent or _forward(models[name], choice, inputs)
    if case.is_cut:
        models[REST] = without_layers(transformer)
        choices[REST] = Choice(REST, REST, baseline=False)
        variants[REST] = _forward(models[REST], choices[REST], inputs)
    with torch._dynamo.config.patch(cache_size_limit=_RECOMPILE_LIMIT):
        outcomes = time_interleaved(variants, case.device, budget)
    rows = case_rows(case, shapes, choices, outcomes, rates, "forward", passes=1)
    for name, choice in show_progress(choices.items(), "looking at parts"):
        run = variants[name]
        if outcomes[name].status == "measured" and not isinstance(run, Absent) and choice.name == name != REST:
            for part, timing in time_parts(models[name], run, case.device).items():
                outcome = Outcome("measured", timing)
                rows.append(case.row(outcome, rates, stage=f"part: {part}", variant=name, baseline=False))
    torch.compiler.reset()
    return rows


def look_at_shapes(case: TransformerCase) -> Shapes:
    """Build the transformer on the meta device, where it costs nothing, and count."""
    meta = torch.device("meta")
    transformer = build_transformer(case.model, case.size, case.layers, meta, case.dtype)
    inputs = make_forward_inputs(case.model, transformer, case.size, meta, case.dtype)
    tokens = torch.Size(get_family(transformer).token_grid(transformer, inputs["hidden_states"])).numel()
    choices = attention_choices(case.model, transformer, tokens * case.size.batch, case.device)
    flops = {}
    for kind in dict.fromkeys(choice.kind for choice in choices if choice.absent is None):
        variant = make_variant(transformer, case.model, Choice(kind, kind, baseline=False))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            variant(**inputs)
        flops[kind] = counter.get_total_flops()
    weights = sum(parameter.numel() * parameter.itemsize for parameter in transformer.parameters())
    return Shapes(tokens, weights, choices, flops)


def refuse_for_memory(case: TransformerCase, needed: int, rates: Rates, stage: str) -> Row | None:
    """A row that says so if not even the weights fit; asked beforehand, as Linux ends a process that tries."""
    free = free_bytes(case.device)
    if needed <= free:
        return None
    reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free. --layers builds fewer"
    return case.row(Outcome("out of memory", reason=reason), rates, stage=stage, variant="all", baseline=False)


def check_case(case: TransformerCase, transformer: Any) -> None:
    """Compare the patched self-attention with the reference on a small input.

    Raises:
        IncorrectAttentionError: it is wrong here.
    """
    patched = make_variant(transformer, case.model, Choice("MHLA", "MHLA", baseline=False))
    check_patched(patched, case.inputs(patched, small_size(case.model, case.size)))


def _forward(transformer: Any, choice: Choice, inputs: dict[str, Any]) -> Callable[[], object]:
    context = make_context(transformer, choice)

    @torch.no_grad()
    def run() -> object:
        with context():
            return transformer(**inputs)

    return run


def case_rows(
    case: TransformerCase,
    shapes: Shapes,
    choices: Mapping[str, Choice],
    outcomes: Mapping[str, Outcome],
    rates: Rates,
    stage: str,
    passes: int,
) -> list[Row]:
    """A row per variant; where layers are cut, with the time of all layers, extrapolated from the time of one.

    Args:
        case: what was measured.
        shapes: of the case.
        choices: variant → its self-attention.
        outcomes: variant → what was measured; ``REST`` among them where layers are cut.
        rates: of the device.
        stage: of the rows.
        passes: how many times the arithmetic of a forward it is.
    """
    rows = []
    for name, outcome in outcomes.items():
        choice, flops = choices[name], shapes.flops.get(choices[name].kind)
        whole = _whole_seconds(case, outcomes, name)
        note = ""
        if case.is_cut and whole is not None:
            note = f"{case.layers} of {case.model.layers} layers; all would take {1000 * whole:.3g} ms"
        rows.append(
            case.row(
                outcome,
                rates,
                stage=stage,
                variant=name,
                baseline=choice.baseline,
                blocks=choice.blocks,
                tokens=shapes.tokens,
                flops=None if flops is None else passes * flops,
                whole_seconds=whole,
                note=note,
                **({"layers": 0} if name == REST else {}),
            )
        )
    return rows


def _whole_seconds(case: TransformerCase, outcomes: Mapping[str, Outcome], name: str) -> float | None:
    """Median of a variant with all layers of the model."""
    timing = outcomes[name].timing
    if timing is None or name == REST:
        return None
    if not case.is_cut or case.layers is None:
        return timing.median
    rest = outcomes[REST].timing
    return None if rest is None else rest.median + (timing.median - rest.median) * case.model.layers / case.layers
