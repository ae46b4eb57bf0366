"""A whole call of a pipeline and its parts: text encoding, denoising, VAE."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ..devices import FLOAT_TYPES, choose_device
from ..generation import PipelineChoice, family_of, generator_for
from ..patching import apply_mhla, find_transformers, remove_mhla
from ..tiny import tiny_pipeline
from .candidates import CONTENT, LINEAR_KINDS, patch_settings
from .classifiers import CLASSIFIERS
from .conditions import Rates
from .correctness import check_operation
from .models import models
from .operation import fastest_backend
from .results import PART, Row, make_row
from .shapes import Shape
from .timing import Outcome, Timing, outcome_of, peak_bytes, summarise, synchronize

WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE", "rest")
UNPATCHED = "unpatched"
_TINY = "tiny-"


@dataclass(frozen=True)
class PipelineCase(PipelineChoice):
    """Which pipeline is called how, and how often.

    Raises:
        ValueError: a value that is not allowed.
    """

    repetitions: int = 3
    """Calls of each variant, after one to warm up."""
    softmax_steps: int | float = 0
    """First denoising steps in which every patch is disabled, see :class:`MHLAConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions < 1:
            raise ValueError(f"repetitions={self.repetitions} must be positive.")
        self.of_family.default_config.replace(softmax_steps=self.softmax_steps)  # which refuses what cannot be

    @property
    def name(self) -> str:
        """The pipeline as it was asked for."""
        return self.model or f"{_TINY}{self.family}"

    @property
    def variants(self) -> tuple[str, ...]:
        """Attentions that the pipeline is called with."""
        sparse = (CONTENT,) if self.of_family.own_attention == "softmax" else ()
        return (UNPATCHED, *LINEAR_KINDS, *sparse)

    @property
    def place(self) -> torch.device:
        """Where it runs."""
        return choose_device(self.device)

    def run(self, pipe: Any) -> None:
        """Generate one sample, always the same."""
        prompt = "3" if self.of_family.prompts_are_classes else "a seven"
        self.call(pipe, [prompt], [generator_for(0)])

    def row(self, outcome: Outcome, rates: Rates, stage: str, variant: str) -> Row:
        """A row of this case."""
        settings = {**self.settings, **({"softmax_steps": self.softmax_steps} if self.softmax_steps else {})}
        described = ", ".join(f"{name}={value}" for name, value in settings.items())
        return make_row(
            outcome,
            rates,
            case=f"{self.name}, {described}" if described else self.name,
            stage=stage,
            variant=variant,
            baseline=variant == UNPATCHED,
            dtype=self.dtype,
            model=self.name,
            **{name: self.settings.get(key) for name, key in _SIZES.items()},
        )


_SIZES = {"frames": "num_frames", "height": "height", "width": "width"}
"""Column of the results → setting of the call."""


def choose_pipeline(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    repetitions: int,
    settings: Mapping[str, Any],
    softmax_steps: int | float = 0,
) -> PipelineCase:
    """A pipeline by name, checked with its settings before anything is loaded.

    Args:
        name: tiny-dit, tiny-sana, tiny-wan, or the Hub id or folder of a pipeline.
        device: where.
        dtype: of its weights.
        repetitions: calls of each variant.
        settings: arguments of the call, such as num_inference_steps, guidance_scale, height, width, num_frames.
        softmax_steps: first denoising steps in which patches are disabled.

    Raises:
        FileNotFoundError: no such pipeline.
        ValueError: it has no transformer that MHLA supports, or does not take a setting, or is no pipeline.
    """
    if name in (CLASSIFIERS.keys() | models().keys()) and not name.startswith(_TINY):
        raise ValueError(
            f"{name!r} is a configuration without weights and without a pipeline, which mhla bench transformer --model "
            f"{name} measures. Give the Hub id or folder of a pipeline, or {_TINY}dit, {_TINY}sana or {_TINY}wan."
        )
    if name.startswith(_TINY):
        model, family = None, tiny_pipeline(name.removeprefix(_TINY)).family
    else:
        model, family = name, family_of(name).name
    types = {dtype: name for name, dtype in FLOAT_TYPES.items()}
    case = PipelineCase(
        family,
        repetitions,
        softmax_steps,
        model=model,
        device=str(device),
        dtype=types[dtype],
        settings=dict(settings),
    )
    case.check()
    return case


@dataclass
class Calls:
    """What became of the calls with one attention."""

    variant: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of :func:`apply_mhla`."""
    seconds: list[dict[str, float]] = field(default_factory=list)
    """Of every call: the whole and its parts."""
    peak_bytes: int | None = None
    refused: Outcome | None = None
    """Why there are none."""

    def timing(self, part: str) -> Timing:
        """Of ``WHOLE`` or a part."""
        return summarise([call[part] for call in self.seconds])


def benchmark_pipeline(case: PipelineCase, rates: Rates) -> list[Row]:
    """Check MHLA, then call the pipeline with every attention in turns.

    Args:
        case: what to call.
        rates: of the device.

    Returns:
        A row per variant for the whole call, and one per variant and part.

    Raises:
        IncorrectAttentionError: MHLA is wrong here; then nothing is timed.
        OSError: no such pipeline.
        ValueError: it is of another family, or the call is refused or fails with every attention.
    """
    pipe = case.load()
    _check(pipe, case)
    blocks = case.of_family.default_config.blocks
    found = [Calls(name, {} if name == UNPATCHED else patch_settings(name, blocks)) for name in case.variants]
    for calls in found:
        try:
            with _patched(pipe, case, calls):
                case.run(pipe)
                calls.peak_bytes = peak_bytes(lambda: case.run(pipe), case.place)
        except RuntimeError as error:
            calls.refused = outcome_of(error)
    reasons = [calls.refused.reason for calls in found if calls.refused is not None]
    if len(reasons) == len(found):
        raise ValueError(f"{case.name} fails with every attention: {reasons[0]}.")
    for _ in range(case.repetitions):
        for calls in found:
            if calls.refused is None:
                with _patched(pipe, case, calls):
                    calls.seconds.append(_timed_call(pipe, case))
    return [row for calls in found for row in _rows(case, calls, rates)]


def _rows(case: PipelineCase, calls: Calls, rates: Rates) -> list[Row]:
    if calls.refused is not None:
        return [case.row(calls.refused, rates, WHOLE, calls.variant)]
    whole = Outcome("measured", calls.timing(WHOLE), calls.peak_bytes)
    parts = [(PART + part, Outcome("measured", calls.timing(part))) for part in PARTS]
    return [case.row(outcome, rates, stage, calls.variant) for stage, outcome in ((WHOLE, whole), *parts)]


@contextmanager
def _patched(pipe: Any, case: PipelineCase, calls: Calls) -> Iterator[None]:
    """The pipeline with another attention; patching takes no part in the time."""
    if calls.variant == UNPATCHED:
        yield
        return
    apply_mhla(pipe, softmax_steps=case.softmax_steps, **calls.settings)
    try:
        yield
    finally:
        remove_mhla(pipe)


def _timed_call(pipe: Any, case: PipelineCase) -> dict[str, float]:
    """Seconds of the whole call and of each part."""
    seconds = dict.fromkeys(PARTS, 0.0)
    with _watch(pipe, case.place, seconds):
        synchronize(case.place)
        start = time.perf_counter()
        case.run(pipe)
        synchronize(case.place)
        whole = time.perf_counter() - start
    seconds["rest"] = whole - sum(seconds[part] for part in PARTS if part != "rest")
    return {WHOLE: whole, **seconds}


@contextmanager
def _watch(pipe: Any, device: torch.device, seconds: dict[str, float]) -> Iterator[None]:
    """Add the seconds that each part takes; methods are replaced on the instances and put back."""

    def watched(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(device)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    watched_methods = [(pipe, "encode_prompt", "text encoding"), (pipe.vae, "decode", "VAE")]
    watched_methods += [(transformer, "forward", "denoising") for transformer in find_transformers(pipe).values()]
    with ExitStack() as stack:
        for owner, name, part in watched_methods:
            if hasattr(owner, name):
                # which puts back a forward that accelerate's offloading has put on an instance
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), part)))
        yield


def _check(pipe: Any, case: PipelineCase) -> None:
    """MHLA, and the sparse branch with lists given, with the heads of the pipeline's transformer."""
    transformer = next(iter(find_transformers(pipe).values()))
    attn = next(iter(case.of_family.self_attentions(transformer).values()))
    heads, head_dim = case.of_family.adapter_of(attn).heads(attn)
    config, dtype = case.of_family.default_config, FLOAT_TYPES[case.dtype]
    shape = Shape(case.name, config.blocks, config.blocks, heads, head_dim, config.block_size)
    backend = fastest_backend(shape, case.place, dtype)
    for sparse in (False, CONTENT in case.variants):
        check_operation(shape, case.place, dtype, backend, sparse=sparse)
