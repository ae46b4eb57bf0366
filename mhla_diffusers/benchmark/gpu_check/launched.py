"""What a real call launches: every kernel with its arguments, the bytes that it moves, and its time alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ...attention.triton.launches import Launch
from ..timing import Clock, summarise

_REPETITIONS = 20


@contextmanager
def recorded_launches() -> Iterator[dict[str, Launch]]:
    """Within the context every launch is kept, by its kernel's name in the tuning tables; the last one of each.

    A launch keeps its tensors, so it can be run again and again.
    """
    found: dict[str, Launch] = {}
    run = Launch.run

    def keep(launch: Launch) -> None:
        found[kernel_name(launch)] = launch
        run(launch)

    with patch.object(Launch, "run", keep):  # whatever a call launches, now or later, is there without a list of it
        yield found


def kernel_name(launch: Launch) -> str:
    """Name of a kernel in the tuning tables."""
    return str(launch.kernel.__name__).removesuffix("_kernel")


def moved_bytes(launch: Launch) -> int:
    """Bytes of all tensors that a launch reads or writes, each counted once, however often the kernel reads it."""
    tensors = {x.data_ptr(): x for x in _tensors(tuple(launch.arguments.values()))}
    return sum(x.numel() * x.itemsize for x in tensors.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for inner in value:
            yield from _tensors(inner)


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
