"""A whole call of a pipeline and its parts: text encoding, denoising, VAE."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention.triton import why_not
from ..families import get_family
from ..patching import apply_mhla, find_transformers, remove_mhla
from ..tiny import call_settings, load_tiny
from .correctness import check_operation
from .rates import Rates
from .results import Row, make_row
from .shapes import Shape
from .table import PART
from .timing import Outcome, outcome_of, peak_bytes, summarise, synchronize
from .variants import HYBRID

WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE", "rest")
VARIANTS = ("unpatched", "plain linear", "MHLA", HYBRID)
_TINY = "tiny-"


@dataclass(frozen=True)
class PipelineCase:
    """Which pipeline is called how.

    Raises:
        ValueError: a value that is not allowed.
    """

    model: str
    """tiny-dit, tiny-sana, tiny-wan, or the Hub id or folder of a pipeline."""
    device: torch.device
    dtype: torch.dtype
    repetitions: int = 3
    prompt: str = "a seven"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call, such as num_inference_steps, guidance_scale, height, width, num_frames."""

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions={self.repetitions} must be positive.")

    def load(self) -> Any:
        """The pipeline on its device.

        Raises:
            OSError: no such pipeline.
            ValueError: it has no transformer that MHLA supports.
        """
        if self.model.startswith(_TINY):
            pipe = load_tiny(self.model.removeprefix(_TINY), str(self.device))
            return pipe if self.dtype == torch.float32 else pipe.to(self.dtype)
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(self.model, dtype=self.dtype).to(self.device)
        pipe.set_progress_bar_config(disable=True)
        find_transformers(pipe)
        return pipe

    def arguments(self, family: str) -> dict[str, Any]:
        """Of the call."""
        defaults = call_settings(family) if self.model.startswith(_TINY) else {}
        what: dict[str, Any] = {"class_labels": [3]} if family == "dit" else {"prompt": self.prompt}
        return {**defaults, **self.settings, **what, "generator": torch.Generator().manual_seed(0)}


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
        ValueError: it has no transformer that MHLA supports, or the call is refused.
    """
    pipe = case.load()
    _check_arguments(pipe, case)
    transformer = next(iter(find_transformers(pipe).values()))
    _check(transformer, case)
    family = get_family(transformer).name
    found: dict[str, list[dict[str, float]]] = {}
    peaks: dict[str, int | None] = {}
    refused: dict[str, Outcome] = {}
    for variant in VARIANTS:
        with _patched(pipe, variant):
            try:
                peaks[variant] = _warm_up(pipe, case, family)
                found[variant] = []
            except RuntimeError as error:
                refused[variant] = outcome_of(error)
    for _ in range(case.repetitions):
        for variant, calls in found.items():
            with _patched(pipe, variant):
                calls.append(_call(pipe, case, family))
    rows = []
    for variant in VARIANTS:
        if variant in refused:
            rows.append(_row(case, refused[variant], rates, WHOLE, variant))
            continue
        for part in (WHOLE, *PARTS):
            timing = summarise([call[part] for call in found[variant]])
            stage, peak = (WHOLE, peaks[variant]) if part == WHOLE else (PART + part, None)
            rows.append(_row(case, Outcome("measured", timing, peak), rates, stage, variant))
    return rows


def _row(case: PipelineCase, outcome: Outcome, rates: Rates, stage: str, variant: str) -> Row:
    described = ", ".join(f"{name}={value}" for name, value in case.settings.items())
    settings = case.settings
    return make_row(
        outcome,
        rates,
        case=f"{case.model}, {described}" if described else case.model,
        stage=stage,
        variant=variant,
        baseline=variant == "unpatched",
        dtype=str(case.dtype).removeprefix("torch."),
        model=case.model,
        frames=settings.get("num_frames"),
        height=settings.get("height"),
        width=settings.get("width"),
    )


@contextmanager
def _patched(pipe: Any, variant: str) -> Iterator[None]:
    """The pipeline with another attention; patching takes no part in the time."""
    if variant == "unpatched":
        yield
        return
    family = get_family(next(iter(find_transformers(pipe).values())))
    blocks = (1,) * family.axes if variant == "plain linear" else family.default_config.blocks
    apply_mhla(pipe, blocks=blocks, layers="2/3" if variant == HYBRID else "all")
    try:
        yield
    finally:
        remove_mhla(pipe)


def _warm_up(pipe: Any, case: PipelineCase, family: str) -> int | None:
    """Call once; the most bytes that the CUDA allocator held."""
    pipe(**case.arguments(family))
    return peak_bytes(lambda: pipe(**case.arguments(family)), case.device)


def _call(pipe: Any, case: PipelineCase, family: str) -> dict[str, float]:
    """Seconds of the whole call and of each part."""
    seconds = dict.fromkeys(PARTS, 0.0)
    with _watch(pipe, case.device, seconds):
        synchronize(case.device)
        start = time.perf_counter()
        pipe(**case.arguments(family))
        synchronize(case.device)
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
                own = owner.__dict__.get(name)
                setattr(owner, name, watched(getattr(owner, name), part))
                stack.callback(_put_back, owner, name, own)
        yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    """Undo ``setattr``: accelerate's offloading has put a forward of its own on some instances."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def _check_arguments(pipe: Any, case: PipelineCase) -> None:
    known = inspect.signature(pipe.__call__).parameters
    for name, value in case.settings.items():
        if name not in known:
            raise ValueError(f"{name}={value}: a {type(pipe).__name__} takes no such argument; leave it out.")


def _check(transformer: Any, case: PipelineCase) -> None:
    """MHLA with this transformer's heads against the reference."""
    family = get_family(transformer)
    attn = next(iter(family.self_attentions(transformer).values()))
    blocks = family.default_config.blocks
    shape = Shape(case.model, blocks, blocks, attn.heads, attn.inner_dim // attn.heads)
    query = torch.empty(1, 0, shape.heads, shape.head_dim, device=case.device, dtype=case.dtype)
    fused = case.device.type == "cuda" and why_not(query, "relu") is None
    check_operation(shape, case.device, case.dtype, "triton" if fused else "eager")
