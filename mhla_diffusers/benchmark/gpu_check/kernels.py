"""The step ``kernels``: the time of each kernel against the bytes that it moves, and a search for better tiles."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from ...attention.triton.launches import Launch
from ...attention.triton.tuning import AnyTiling, MixTiling, PairTiling, Tiling, tiles_of
from ..conditions import Rates, measure_rates
from ..correctness import errors_of, limits_of, too_large
from ..problems import OUTPUT, Problem, draw_problem
from ..shapes import shapes
from ..timing import Clock
from .correctness import SMALL
from .findings import Measured, Notebook, context_is_lost
from .launched import python_seconds, recorded_launches, seconds_of

_DTYPE = torch.bfloat16
_STAGES = (1, 2, 3)
_WARPS = (4, 8)
_LEAST_TOKENS, _MOST_TOKENS = 16, 128
_SECONDS = 18
"""Of the search for one kernel; compiling takes most of it."""
_COMPARED = (OUTPUT, "query", "key", "value", "mixing")
_REASON = 200
"""Characters kept of why a candidate does not run."""

_TOKENS = {Tiling: "tokens", PairTiling: "others", MixTiling: "columns"}
"""What to try other lengths of."""


def measure_kernels(notebook: Notebook, device: torch.device) -> None:
    """Every kernel of a call of Wan's shape: first all times, then the search, which takes long."""
    shape = SMALL if device.type == "cpu" else shapes()["wan2.1-1.3b-480p"]
    rates = measure_rates(device, _DTYPE) if device.type == "cuda" else None
    clock = Clock(device)
    problems: dict[str, Problem] = {}
    notebook.attempt("Python of a forward call", partial(_time_of_python, draw_problem(SMALL, device, _DTYPE, "plain")))
    for kind in ("plain", "exact tiles"):
        problem = draw_problem(shape, device, _DTYPE, kind)
        with recorded_launches() as launches:
            problem.attend("triton")
        for name, launch in launches.items():
            if name not in problems:
                problems[name] = problem
                notebook.attempt(f"time of {name}", partial(_time, launch, rates, clock))
    for name, problem in problems.items():
        notebook.attempt(f"tiles of {name}", partial(_search, name, problem, clock))


def _time_of_python(problem: Problem) -> Measured:
    """With nothing launched: on the CPU too it is what a GPU would wait for where kernels are short."""
    seconds = python_seconds(problem)
    return Measured({"seconds": seconds}, f"{1e6 * seconds:.0f} µs, nothing launched")


def _time(launch: Launch, rates: Rates | None, clock: Clock) -> Measured:
    """Seconds and bytes; on a CPU bytes alone, since the interpreter has no speed."""
    moved = launch.moved_bytes
    numbers: dict[str, Any] = {"programs": launch.programs, "bytes": moved, "tiles": launch.tiles._asdict()}
    if rates is None:
        return Measured(numbers, f"{moved} bytes, not timed on a CPU")
    seconds = seconds_of(launch, clock)
    share = moved / seconds / rates.copy
    numbers |= {"seconds": seconds, "copy_fraction": share}
    return Measured(numbers, f"{1e6 * seconds:.0f} µs, {share:.0%} of the copy rate")


def _search(name: str, problem: Problem, clock: Clock) -> Measured:
    """Time candidates for a kernel's tiles, and compare what the fastest computes with what the default does."""
    with recorded_launches() as launches:
        expected = problem.attend("triton")
    default = launches[name].tiles
    tried = [_try(name, default, problem, clock)]
    end, candidates = time.monotonic() + _SECONDS, list(_candidates(default))
    untried = candidates if clock.device.type == "cuda" else candidates[:1]
    while untried and time.monotonic() < end:
        tried.append(_try(name, untried.pop(0), problem, clock))
    ran = [one for one in tried if "reason" not in one]
    if not ran:
        raise RuntimeError(f"nothing ran: {tried[0]['reason']}")
    # without a clock the last one stands for the fastest, so that the comparison is made
    best = min(ran, key=lambda one: one["seconds"]) if "seconds" in ran[0] else ran[-1]
    with tiles_of(name, type(default)(**best["tiles"])):
        found = problem.attend("triton")
    errors = errors_of(found, {one: expected[one] for one in _COMPARED})
    wrong = too_large(errors, {one: 2 * limit for one, limit in limits_of(errors, _DTYPE).items()})
    numbers = {"tried": tried, "untried": len(untried), "fastest": best, "errors": errors}
    telling = "not timed on a CPU"
    if "seconds" in best and "seconds" in tried[0]:
        telling = f"{tried[0]['seconds'] / best['seconds']:.2f} times as fast with {best['tiles']}"
    return Measured(numbers, telling, f"the fastest tiles compute something else: {wrong}" if wrong else "")


def _try(name: str, tiles: AnyTiling, problem: Problem, clock: Clock) -> dict[str, Any]:
    """Tiles with the kernel's seconds, or with the reason why there are none."""
    try:
        with tiles_of(name, tiles), recorded_launches() as launches:
            problem.attend("triton")
        launch = launches[name]
        if launch.tiles != tiles:
            return {"tiles": tiles._asdict(), "reason": "the kernel is not cut by the tuning tables"}
        if clock.device.type != "cuda":
            return {"tiles": tiles._asdict()}
        return {"tiles": tiles._asdict(), "seconds": seconds_of(launch, clock)}
    except Exception as error:
        if context_is_lost(error):
            raise
        return {"tiles": tiles._asdict(), "reason": f"{type(error).__name__}: {error}"[:_REASON]}


def _candidates(default: AnyTiling) -> Iterator[AnyTiling]:
    """Other stages, warps and tokens; those that change least come first."""
    field = _TOKENS[type(default)]
    tokens = getattr(default, field)
    lengths = [x for x in (tokens, tokens // 2, tokens * 2) if _LEAST_TOKENS <= x <= _MOST_TOKENS]
    every = [
        default._replace(**{field: length}, stages=stages, warps=warps)
        for length, stages, warps in product(lengths, _STAGES, _WARPS)
    ]

    def changes(tiles: AnyTiling) -> int:
        return sum(one != other for one, other in zip(tiles, default, strict=True))

    yield from (tiles for tiles in sorted(every, key=changes) if tiles != default)
