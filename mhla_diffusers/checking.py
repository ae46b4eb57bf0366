"""``mhla check``: correctness, speed, and whether a patch pays off for a model at a size."""

import math
from dataclasses import replace
from functools import partial

import torch

from .attention import sparse_attention
from .benchmark.cases import Shape, choose_cases
from .benchmark.correctness import operator_errors, too_large
from .benchmark.measure import Row, Runs, gather_conditions, page_of, time_interleaved
from .benchmark.operator import softmax_runs
from .config import PROFILES, USUAL_STEPS
from .devices import device_and_type
from .patching.describe import dense_in_words
from .reporting import markdown_table

_DEFAULT = next(iter(PROFILES))
_WORTHWHILE = 1.1
"""Least speedup of a forward for which a patch pays."""
_CPU_TOKENS = 4096
"""Most tokens of an attention that a CPU times."""


def check(
    model: str, size: str | None = None, frames: int | None = None, device: str = "auto", dtype: str | None = None
) -> tuple[str, bool]:
    """Check correctness and speed of sparse attention and MHLA on a device, for a model at a size.

    Returns the text of ``check.md``, and whether all errors are within their limits. ``model`` is a name of `mhla
    info`, ``size`` such as "480x832", by default the model's first. A CPU times a part of its tokens. ValueError for a
    size that the model does not take, or a model whose attention is not softmax.
    """
    place, kind = device_and_type(device, dtype)
    on_cpu = place.type == "cpu"
    case = choose_cases(model, size, frames)[0]
    if case.family.computes != "softmax":
        raise ValueError(
            f"{model}'s own attention is {case.family.computes}; mhla check compares with softmax. Give wan2.1-1.3b, "
            "flux-dev or another model of softmax attention."
        )
    shape = _smaller(case.shape) if on_cpu else case.shape
    errors = operator_errors(shape, place, kind)
    wrong, worst = too_large(errors, kind), max(errors, key=errors.__getitem__)
    rows = time_interleaved(_runs(shape, place, kind), place, 0.5 if on_cpu else 1.0, most=15)
    plain = case.flops()
    whole, share = sum(plain.values()), plain["self-attention"] / sum(plain.values())
    bounds = {}
    for name, config in PROFILES.items():
        left = sum(case.flops(config).values())
        call, steps = config.call_speedup(whole, left, USUAL_STEPS), dense_in_words(config, USUAL_STEPS)
        bounds[name] = f"{whole / left:.2f}", f"{call:.2f}", steps
    if wrong:
        verdict = "wrong here: do not use it on this machine, and please report check.md"
    elif shape.tokens < case.shape.tokens:
        verdict = (
            f"not decided on a CPU: over {shape.tokens:,} of {case.shape.tokens:,} tokens, {_DEFAULT} is "
            f"{_factor(rows):.1f}x as fast as the fastest softmax; counted, a forward is at most "
            f"{bounds[_DEFAULT][0]}x as fast"
        )
    else:
        gained = 1 / (1 - share + share / _factor(rows))  # Amdahl's law
        at_most = f"a forward of {case.name} is at most {gained:.2f}x as fast"
        verdict = f"pays: {_DEFAULT} is {_factor(rows):.1f}x as fast as the fastest softmax, so {at_most}"
        if not gained >= _WORTHWHILE:
            verdict = f"leave it off at this size: with {_DEFAULT}, {at_most}"
    header = "profile", "forward, at most", f"call of {USUAL_STEPS} steps, at most", "which steps"
    word, in_type = "WRONG" if wrong else "correct", str(kind).removeprefix("torch.")
    parts = [
        f"# mhla check: {case.name}, {case.shape.tokens:,} tokens, on {place} in {in_type}",
        f"**{verdict}**",
        f"{word}: largest error {errors[worst]:.0e} ({worst}) on sampled rows against float64",
        markdown_table(header, [(name, *cells) for name, cells in bounds.items()]),
        f"Self-attention is {share:.0%} of a forward's FLOPs; bounds are counted from FLOPs.",
        page_of(rows, gather_conditions(place)),
    ]
    return "\n\n".join(parts), not wrong


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
    about = f"one attention, {shape.tokens:,} tokens"
    runs: Runs = {Row(name, about, baseline=True): run for name, run in softmax_runs(inputs).items()}
    for name, config in PROFILES.items():
        runs[Row(name, about)] = partial(sparse_attention, query, key, value, shape.grid, density=config.density)
    return {row: run if isinstance(run, str) else torch.no_grad()(run) for row, run in runs.items()}


def _factor(rows: list[Row]) -> float:
    """Return how many times faster the default profile is than the fastest softmax; NaN if either could not run."""
    seconds = {row.variant: row.median for row in rows if row.median is not None}
    softmax = min((row.median for row in rows if row.baseline and row.median is not None), default=math.nan)
    return softmax / seconds.get(_DEFAULT, math.nan)
