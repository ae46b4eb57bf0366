"""``mhla bench parallel``, the timed part: processes that are really there, on a CPU, and talk through gloo.

Not the time of GPUs: processes share the cores and the memory of one machine, what they send goes through the
loopback device, and MHLA runs as plain PyTorch operations.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..candidates import CONTENT
from ..shapes import Shape
from .attentions import attend, make_share
from .counting import VARIANTS, Variant, is_looked_at, layout_of
from .world import make_world

_spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
TIMED: tuple[Variant, ...] = (*VARIANTS, (CONTENT, False))
_REPETITIONS = 3
_PATIENCE = timedelta(minutes=10)
"""That processes wait for each other."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one attention on so many processes, the slowest of them, after one run to warm up."""

    model: str
    processes: int
    shape: Shape
    seconds: dict[tuple[Variant, str], float]
    """Variant and pass → median of three; without variants whose heads the processes do not divide."""


def why_no_processes(count: int) -> str | None:
    """Why so many processes are not to be timed; None if they are."""
    cores = os.cpu_count() or 1
    return f"{count} processes would wait for each other on {cores} cores" if count > cores else None


def time_processes(model: str, shape: Shape, processes: int) -> Timed:
    """Start the processes, time every variant in them, and end them.

    Args:
        model: its name.
        shape: of the attention.
        processes: how many; they share the cores evenly.

    Raises:
        torch.multiprocessing.ProcessRaisedException: something fails in one of them; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        _spawn(_work, args=(shape, processes, folder), nprocs=processes)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return Timed(model, processes, shape, {((one[0], one[1]), one[2]): one[3] for one in found})


def _work(rank: int, shape: Shape, processes: int, folder: str) -> None:
    """One process from beginning to end."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    torch.manual_seed(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes, timeout=_PATIENCE)
    try:
        found = time_variants(shape, processes)
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def time_variants(shape: Shape, processes: int) -> list[tuple[str, bool, str, float]]:
    """In a process of the default group: attention, whether by heads, pass and seconds of every variant."""
    return [
        (*variant, name, seconds)
        for variant in TIMED
        if is_looked_at(variant, shape, processes) and (variant[0] != CONTENT or shape.block_size is not None)
        for name, seconds in _time(variant, shape, processes)
    ]


def _time(variant: Variant, shape: Shape, processes: int) -> Sequence[tuple[str, float]]:
    """Both passes of one variant."""
    world, attention = make_world(layout_of(variant, processes)), variant[0]
    share = make_share(shape, world, torch.device("cpu"), torch.bfloat16, backward=True)
    direction = torch.randn_like(share.tensors["query"])

    def forward() -> None:
        with torch.no_grad():
            attend(attention, share)

    def both() -> None:
        torch.autograd.grad(attend(attention, share), [share.tensors[n] for n in ("query", "key", "value")], direction)

    return [("forward", _seconds(forward)), ("forward+backward", _seconds(both))]


def _seconds(run: Callable[[], None]) -> float:
    """Median over repetitions of what the slowest process takes."""
    found = []
    for _ in range(1 + _REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        run()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return median(found[1:])
