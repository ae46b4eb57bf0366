"""What a real call launches: every kernel with its arguments, and its time alone."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..attention import mhla_attention
from ..attention.triton.launches import Launch, launched_by
from .problems import Problem
from .timing import Clock, summarise

_REPETITIONS = 20
_MEANS, _CALLS = 20, 50


@contextmanager
def recorded_launches() -> Iterator[dict[str, Launch]]:
    """Within the context every launch is kept, by its kernel's name in the tuning tables; the last one of each.

    A launch keeps its tensors, so it can be run again and again.
    """
    found: dict[str, Launch] = {}

    def keep(launch: Launch) -> None:
        found[launch.name] = launch
        launch.start()

    with launched_by(keep):
        yield found


def python_seconds(problem: Problem) -> float:
    """What Python takes for one forward call, with nothing launched: the least of many means."""
    given: dict[str, Any] = problem.tensors | problem.settings
    attend = partial(mhla_attention, backend="triton", **given)
    least = math.inf
    with torch.no_grad(), launched_by(lambda launch: None):
        for _ in range(_MEANS):
            start = time.perf_counter()
            for _ in range(_CALLS):
                attend()
            least = min(least, (time.perf_counter() - start) / _CALLS)
    return least


def seconds_of(launch: Launch, clock: Clock) -> float:
    """Median of replays of a CUDA graph that holds the launch alone, so that no time of Python is in it.

    Args:
        launch: compiled here if it was not before.
        clock: of a CUDA device; overwrites the cache before every replay.
    """
    launch.run()
    torch.cuda.synchronize(clock.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(clock.device), torch.cuda.graph(graph):
        launch.run()
    return summarise([clock.seconds(graph.replay) for _ in range(_REPETITIONS)]).median


def context_is_lost(error: Exception) -> bool:
    """Whether a process can do nothing more on its GPU after an error, by the words of PyTorch and of Triton."""
    return any(words in str(error) for words in ("CUDA error", "Triton Error [CUDA]"))
