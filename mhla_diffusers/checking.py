"""``mhla check``: are results right on this machine, how fast are they, does a patch pay for a model at a size."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from .attention import sparse_attention
from .benchmark.cases import Case, Shape, choose_cases
from .benchmark.commands import place_of
from .benchmark.correctness import limit_of, operator_errors
from .benchmark.counts import ATTENTION, count_forward
from .benchmark.info import report
from .benchmark.measure import Row, Runs, gather_conditions, time_interleaved
from .benchmark.operator import softmax_runs
from .config import PROFILES, USUAL_STEPS, SparseConfig
from .patching.describe import dense_in_words
from .reporting import markdown_table, scaled

_WORTHWHILE = 1.1
"""Least speedup of a forward for which a patch pays."""
_CPU_TOKENS = 4096
"""Most tokens of an attention that a CPU times."""


@dataclass(frozen=True)
class Check:
    """What ``mhla check`` found; as text it is ``check.md``."""

    case: str
    tokens: int
    """Tokens of the model's attention at that size."""
    timed_tokens: int
    """Tokens of the attention that was timed, fewer on a CPU."""
    device: str
    dtype: str
    about: str
    """Versions and devices."""
    errors: dict[str, float]
    """Attention, backend and tensor → relative error on sampled rows against float64."""
    limits: dict[str, float]
    rows: list[Row]
    """Times of one attention: softmax by every backend, and the profiles."""
    bounds: dict[str, tuple[float, float]]
    """Profile → the most that it brings to one forward and to a call of 50 steps, by FLOPs."""
    share: float
    """Self-attention's share of the FLOPs of an unpatched forward."""

    @property
    def is_correct(self) -> bool:
        """Whether all errors are within their limits."""
        return all(error <= self.limits[name] for name, error in self.errors.items())

    @property
    def verdict(self) -> str:
        """Say whether sparse attention pays at this size."""
        if not self.is_correct:
            return "wrong here: do not use it on this machine, and please report check.md"
        default = next(iter(PROFILES))
        seconds = {row.variant: row.median for row in self.rows if row.median is not None}
        softmax = min((value for name, value in seconds.items() if name not in PROFILES), default=math.nan)
        factor = softmax / seconds.get(default, math.nan)
        if self.timed_tokens < self.tokens:
            return (
                f"not decided on a CPU: over {self.timed_tokens:,} of {self.tokens:,} tokens, {default} is "
                f"{factor:.1f}x as fast as the fastest softmax; counted, a forward is at most "
                f"{self.bounds[default][0]:.2f}x as fast"
            )
        gained = 1 / (1 - self.share + self.share / factor)  # Amdahl's law
        if gained < _WORTHWHILE:
            return (
                f"leave it off at this size: with {default}, a forward of {self.case} is at most {gained:.2f}x as fast"
            )
        return (
            f"pays: {default} is {factor:.1f}x as fast as the fastest softmax, so a forward of {self.case} is at most "
            f"{gained:.2f}x as fast"
        )

    def __str__(self) -> str:
        worst = max(self.errors, key=self.errors.__getitem__)
        word = "correct" if self.is_correct else "WRONG"
        times = [
            (
                row.variant,
                row.reason if row.median is None else f"{1000 * row.median:.2f} ms",
                "" if row.peak_bytes is None else scaled(row.peak_bytes, 1024, "B"),
            )
            for row in self.rows
        ]
        bounds = [
            (name, f"{one:.2f}", f"{call:.2f}", dense_in_words(SparseConfig(**PROFILES[name]), USUAL_STEPS))
            for name, (one, call) in self.bounds.items()
        ]
        parts = [
            f"# mhla check: {self.case}, {self.tokens:,} tokens, on {self.device} in {self.dtype}",
            f"**{self.verdict}**",
            f"{word}: largest error {self.errors[worst]:.0e} ({worst}) on sampled rows against float64",
            markdown_table((f"one attention, {self.timed_tokens:,} tokens", "time", "peak memory"), times),
            markdown_table(
                ("profile", "forward, at most", f"call of {USUAL_STEPS} steps, at most", "which steps"), bounds
            ),
            f"Self-attention is {self.share:.0%} of a forward's FLOPs; bounds are counted from FLOPs.",
            self.about,
        ]
        return "\n\n".join(parts) + "\n"


def check(
    model: str, size: str | None = None, frames: int | None = None, device: str = "auto", dtype: str | None = None
) -> Check:
    """Check correctness and speed of sparse attention and MHLA on a device, for a model at a size.

    ``model`` is a name of `mhla info`, ``size`` such as "480x832", by default the model's first. A CPU times a part of
    its tokens. ValueError for a size that the model does not take, or a model whose attention is not softmax.
    """
    place, kind, on_cpu = place_of(device, dtype)
    case = choose_cases([model], size and [size], None if frames is None else [frames], smallest=True)[0]
    if case.family.computes != "softmax":
        raise ValueError(
            f"{model}'s own attention is {case.family.computes}; mhla check compares with softmax. Give wan2.1-1.3b, "
            "flux-dev or another model of softmax attention."
        )
    shape = _smaller(case.shape) if on_cpu else case.shape
    errors = operator_errors(shape, place, kind)
    limits = {name: limit_of(name, kind) for name in errors}
    rows = time_interleaved(_runs(shape, place, kind), place, 0.5 if on_cpu else 1.0, least=3, most=15)
    bounds, share = _bounds(case)
    conditions = gather_conditions(place)
    about = "\n".join([*(f"{name}: {conditions[name]}" for name in ("device", "date", "command")), report()])
    tokens, timed, word = math.prod(case.shape.grid), math.prod(shape.grid), str(kind).removeprefix("torch.")
    return Check(case.name, tokens, timed, str(place), word, about, errors, limits, rows, bounds, share)


def _smaller(shape: Shape) -> Shape:
    """Shrink a shape for timing on a CPU: three heads, and axes halved until the grid has few enough tokens."""
    grid = tuple(shape.grid)
    while math.prod(grid) > _CPU_TOKENS:
        grid = tuple(max(1, size // 2) for size in grid)
    blocks = tuple(min(pair) for pair in zip(shape.blocks, grid, strict=True))
    return replace(shape, grid=grid, blocks=blocks, heads=min(3, shape.heads))


def _runs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    """Return softmax by every backend that may run here, and the sparse attention of each profile."""
    inputs = query, key, value = shape.draw_inputs(device, dtype)
    runs: Runs = {Row(name, baseline=True): run for name, run in softmax_runs(inputs).items()}
    for name, settings in PROFILES.items():
        density = SparseConfig(**settings).density
        runs[Row(name)] = partial(sparse_attention, query, key, value, shape.grid, density=density)
    return {row: run if isinstance(run, str) else torch.no_grad()(run) for row, run in runs.items()}


def _bounds(case: Case) -> tuple[dict[str, tuple[float, float]], float]:
    """Return, by FLOPs, each profile's largest speedup of a forward and of a call, and self-attention's share."""
    plain, bounds = count_forward(case), {}
    whole = sum(plain.values())
    for name, settings in PROFILES.items():
        config = SparseConfig(**settings)
        left = sum(count_forward(case, config).values())
        bounds[name] = whole / left, config.call_speedup(whole, left, USUAL_STEPS)
    return bounds, plain[ATTENTION] / whole
