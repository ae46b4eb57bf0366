"""A whole call of a pipeline and its parts: text encoding, denoising, VAE."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ..devices import FLOAT_TYPES, choose_device
from ..generation import PipelineChoice, family_of, generator_for
from ..patching import apply_mhla, find_transformers, remove_mhla
from ..tiny import tiny_pipeline
from .cases import CLASSIFIERS, LINEAR_KINDS, patch_settings
from .correctness import check_operation
from .models import models
from .operation import fastest_backend
from .results import CONTENT, PART, Recorder, Row
from .shapes import Shape
from .timing import Outcome, outcome_of, peak_bytes, summarise, synchronize

WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE", "rest")
UNPATCHED = "unpatched"
_TINY = "tiny-"


@dataclass(frozen=True)
class PipelineCase(PipelineChoice):
    """The pipeline, the arguments of its call, and the repetitions.

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
        self.of_family.default_config.replace(softmax_steps=self.softmax_steps)  # raises if not allowed

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

    @contextmanager
    def patched(self, pipe: Any, variant: str) -> Iterator[None]:
        """Within the context the pipeline has another attention; patching is not timed."""
        if variant != UNPATCHED:
            settings = patch_settings(variant, self.of_family.default_config.blocks)
            apply_mhla(pipe, softmax_steps=self.softmax_steps, **settings)
        try:
            yield
        finally:
            if variant != UNPATCHED:
                remove_mhla(pipe)

    def row(self, recorder: Recorder, outcome: Outcome, stage: str, variant: str) -> Row:
        """A row of this case."""
        settings = {**self.settings, **({"softmax_steps": self.softmax_steps} if self.softmax_steps else {})}
        described = ", ".join(f"{name}={value}" for name, value in settings.items())
        return recorder.row(
            outcome,
            case=f"{self.name}, {described}" if described else self.name,
            stage=stage,
            variant=variant,
            baseline=variant == UNPATCHED,
            model=self.name,
            frames=self.settings.get("num_frames"),
            height=self.settings.get("height"),
            width=self.settings.get("width"),
        )


def choose_pipeline(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    repetitions: int,
    settings: Mapping[str, Any],
    softmax_steps: int | float = 0,
) -> PipelineCase:
    """A pipeline by name, checked with its settings before anything is loaded.

    The name is tiny-dit, tiny-sana, tiny-wan, or the Hub id or folder of one; settings are arguments of the call.

    Raises:
        FileNotFoundError: no such pipeline.
        ValueError: it has no transformer that MHLA supports, or does not take a setting, or is no pipeline.
    """
    is_tiny = name.startswith(_TINY)
    if name in (CLASSIFIERS.keys() | models().keys()) and not is_tiny:
        raise ValueError(
            f"{name!r} is a configuration without weights and without a pipeline, which mhla bench transformer --model "
            f"{name} measures. Give the Hub id or folder of a pipeline, or {_TINY}dit, {_TINY}sana or {_TINY}wan."
        )
    case = PipelineCase(
        tiny_pipeline(name.removeprefix(_TINY)).family if is_tiny else family_of(name).name,
        repetitions,
        softmax_steps,
        model=None if is_tiny else name,
        device=str(device),
        dtype=next(known for known, one in FLOAT_TYPES.items() if one == dtype),
        settings=dict(settings),
    )
    case.check()
    return case


def benchmark_pipeline(case: PipelineCase, recorder: Recorder) -> list[Row]:
    """Check MHLA, then call the pipeline with every attention in turns.

    Returns:
        A row per variant for the whole call, and one per variant and part.

    Raises:
        IncorrectAttentionError: MHLA is wrong here; then nothing is timed.
        OSError: no such pipeline.
        ValueError: it is of another family, or the call is refused or fails with every attention.
    """
    pipe = case.load()
    _check(pipe, case)
    peaks: dict[str, int | None] = {}
    refused: dict[str, Outcome] = {}
    for variant in case.variants:
        try:
            with case.patched(pipe, variant):
                case.run(pipe)
                peaks[variant] = peak_bytes(lambda: case.run(pipe), case.place)
        except RuntimeError as error:
            refused[variant] = outcome_of(error)
    if not peaks:
        raise ValueError(f"{case.name} fails with every attention: {next(iter(refused.values())).reason}.")
    calls: dict[str, list[dict[str, float]]] = {variant: [] for variant in peaks}
    for _ in range(case.repetitions):
        for variant, seconds in calls.items():
            with case.patched(pipe, variant):
                seconds.append(_timed_call(pipe, case))
    rows = []
    for variant in case.variants:
        if variant in refused:
            rows.append(case.row(recorder, refused[variant], WHOLE, variant))
            continue
        for part in (WHOLE, *PARTS):
            stage, peak = (part, peaks[variant]) if part == WHOLE else (PART + part, None)
            timing = summarise([call[part] for call in calls[variant]])
            rows.append(case.row(recorder, Outcome("measured", timing, peak), stage, variant))
    return rows


def _timed_call(pipe: Any, case: PipelineCase) -> dict[str, float]:
    """Seconds of the whole call and of each part; methods are replaced on the instances and put back."""
    seconds = dict.fromkeys((WHOLE, *PARTS), 0.0)

    def watched(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(case.place)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(case.place)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    methods = [(pipe, "encode_prompt", "text encoding"), (pipe.vae, "decode", "VAE")]
    methods += [(transformer, "forward", "denoising") for transformer in find_transformers(pipe).values()]
    with ExitStack() as stack:
        for owner, name, part in methods:
            if hasattr(owner, name):
                # which puts back a forward that accelerate's offloading has put on an instance
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), part)))
        watched(case.run, WHOLE)(pipe)
    seconds["rest"] = seconds[WHOLE] - sum(seconds[part] for part in PARTS if part != "rest")
    return seconds


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
