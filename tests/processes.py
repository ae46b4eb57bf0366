"""Processes on gloo that stay, so that many tests can run something in all of them."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# forked from a process that has imported everything, so that they start at once
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Processes:
    """As many processes as are asked for, in one process group, which run what they are sent.

    Args:
        count: how many.
        timeout: seconds that they wait for each other.
    """

    def __init__(self, count: int, timeout: float = 120.0) -> None:
        self.meeting = tempfile.TemporaryDirectory()
        self.timeout = timeout
        self.pipes, self.workers = [], []
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            arguments = (rank, count, str(Path(self.meeting.name) / "store"), timeout, theirs)
            worker = CONTEXT.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            self.pipes.append(ours)
            self.workers.append(worker)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What ``function`` of a module returns in every process.

        Raises:
            AssertionError: it raises in one of them; with what every process that failed says.
        """
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = [pipe.recv() for pipe in self.pipes]
        failures = [f"process {rank}:\n{answer}" for rank, (worked, answer) in enumerate(answers) if not worked]
        if failures:
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(5)
            worker.terminate()
        self.meeting.cleanup()


def _work(rank: int, count: int, store: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args, **kwargs)))
        except Exception:  # noqa: BLE001 - whatever a test raises is told to it
            pipe.send((False, traceback.format_exc()))
