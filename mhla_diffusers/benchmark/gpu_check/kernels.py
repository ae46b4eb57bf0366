"""The step ``kernels``: the time of each kernel against the bytes that it moves, and a search for better tiles."""

from functools import partial
from typing import Any

import torch

from ...attention.triton.launches import Launch
from ..conditions import Rates, measure_rates
from ..launched import python_seconds, recorded_launches, seconds_of
from ..problems import Problem, draw_problem
from ..shapes import shapes
from ..timing import Clock
from ..tuning import search
from .correctness import SMALL
from .findings import Measured, Notebook

_DTYPE = torch.bfloat16
_SECONDS = 18
"""Of the search for one kernel; compiling takes most of it."""


def measure_kernels(notebook: Notebook, device: torch.device) -> None:
    """Every kernel of a call of Wan's shape: first all times, then the search, which takes long."""
    shape = SMALL if device.type == "cpu" else shapes()["wan2.1-1.3b-480p"]
    rates = measure_rates(device, _DTYPE) if device.type == "cuda" else None
    clock = Clock(device)
    problems: dict[str, Problem] = {}
    notebook.attempt("Python of a forward call", partial(_time_of_python, draw_problem(SMALL, device, _DTYPE, "plain")))
    for kind in ("plain", "exact tiles", "causal"):
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
    """The fastest tiles that were found, and whether they compute what the default ones do."""
    found = search(name, problem, clock, _SECONDS)
    numbers = {"tried": found.tried, "untried": found.untried, "fastest": found.fastest, "errors": found.errors}
    telling = (
        "not timed on a CPU" if found.speedup is None else f"{found.speedup:.2f} times as fast with {found.fastest}"
    )
    return Measured(numbers, telling, f"the fastest tiles compute something else: {found.wrong}" if found.wrong else "")
