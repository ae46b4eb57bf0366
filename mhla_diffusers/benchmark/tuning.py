"""A search for better tiles of a kernel, and ``mhla bench tune``, which writes what it finds into the shipped table."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..attention.triton.tilings import (
    AnyTiling,
    MixTiling,
    PairTiling,
    Tiling,
    read_table,
    tiles_of,
    write_table,
)
from .correctness import errors_of, limits_of, too_large
from .launched import context_is_lost, recorded_launches, seconds_of
from .problems import OUTPUT, Problem, draw_problem
from .recorder import console
from .shapes import Shape
from .timing import Clock

_STAGES = (1, 2, 3)
_WARPS = (4, 8)
_LEAST_TOKENS, _MOST_TOKENS = 16, 128
_COMPARED = (OUTPUT, "query", "key", "value", "mixing")
_REASON = 200
"""Characters kept of why a candidate does not run."""
_LENGTH = {Tiling: "tokens", PairTiling: "others", MixTiling: "columns"}
"""What to try other lengths of."""
_LEAST_GAIN = 1.03
"""Times as fast as the default: less is within what repeated timings differ by."""


@dataclass(frozen=True)
class Search:
    """What was tried for one kernel of one call."""

    tried: list[dict[str, Any]]
    """Tiles with the kernel's seconds, or with the reason why there are none; the default first."""
    untried: int
    fastest: dict[str, int]
    """Tiles."""
    speedup: float | None
    """Of the fastest against the default; None on a CPU, or if the default did not run."""
    errors: dict[str, float]
    """Of the call with the fastest against the call with the default."""
    wrong: str
    """Those that are too large, in words."""


def tune(shapes: Sequence[Shape], dtype: torch.dtype, seconds: float, device: torch.device, file: Path) -> None:
    """Search better tiles for every kernel of some shapes and write those that gain into a table.

    Args:
        shapes: of attentions, with tiles for the kernels of exact tiles too.
        dtype: of query, key and value.
        seconds: spent on each kernel; compiling takes most of it.
        device: a GPU.
        file: of the table, of which rows are added, or replaced by tiles that are faster than theirs.

    Raises:
        ValueError: the device is a CPU, whose interpreter has no speed.
    """
    if device.type == "cpu":
        raise ValueError("Tiles are tuned by timing kernels on a GPU; on a CPU there is nothing to time.")
    clock, table = Clock(device), read_table(file)
    for shape in shapes:
        searched: set[str] = set()
        for kind in ("plain", "exact tiles", "causal") if shape.tiles is not None else ("plain", "causal"):
            problem = draw_problem(shape, device, dtype, kind)
            with recorded_launches() as launches:
                problem.attend("triton")
            for name in launches.keys() - searched:
                searched.add(name)
                found = search(name, problem, clock, seconds)
                console().print(f"{shape.name} {name}: {_verdict(found)}", highlight=False)
                place = launches[name].place
                if found.speedup is not None and found.speedup >= _LEAST_GAIN and not found.wrong:
                    table[place] = type(launches[name].tiles)(**found.fastest)
                write_table(table, file)
    console().print(f"Wrote {file}", highlight=False)


def _verdict(found: Search) -> str:
    if found.wrong:
        return f"kept; the fastest tiles compute something else: {found.wrong}"
    if found.speedup is None:
        return f"no default to compare with: {found.tried[0]['reason']}"
    return f"{found.speedup:.2f} times as fast with {found.fastest}, {len(found.tried)} tried, {found.untried} not"


def search(name: str, problem: Problem, clock: Clock, seconds: float) -> Search:
    """Time candidates for a kernel's tiles, and compare what the fastest computes with what the default does.

    Args:
        name: of the kernel.
        problem: a call that launches it.
        clock: of the device; on a CPU one candidate is run and none is timed.
        seconds: after which no further candidate is begun.

    Raises:
        RuntimeError: not even the default runs.
    """
    with recorded_launches() as launches:
        expected = problem.attend("triton")
    default = launches[name].tiles
    tried = [_try(name, default, problem, clock)]
    end, candidates = time.monotonic() + seconds, list(_candidates(default))
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
    wrong = too_large(errors, {one: 2 * limit for one, limit in limits_of(errors, problem.upstream.dtype).items()})
    speedup = tried[0]["seconds"] / best["seconds"] if "seconds" in best and "seconds" in tried[0] else None
    return Search(tried, len(untried), best["tiles"], speedup, errors, wrong)


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
    field = _LENGTH[type(default)]
    tokens = getattr(default, field)
    lengths = [x for x in (tokens, tokens // 2, tokens * 2) if _LEAST_TOKENS <= x <= _MOST_TOKENS]
    every = [
        default._replace(**{field: length}, stages=stages, warps=warps)
        for length, stages, warps in product(lengths, _STAGES, _WARPS)
    ]

    def changes(tiles: AnyTiling) -> int:
        return sum(one != other for one, other in zip(tiles, default, strict=True))

    yield from (tiles for tiles in sorted(every, key=changes) if tiles != default)
