"""Processes that are forked from one that has imported everything, so that they start at once, and groups of them."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


@contextmanager
def process_group(count: int) -> Iterator[Callable[..., list[Any]]]:
    """A group on gloo whose processes stay: gives what runs a function of a module in all of them."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        pools = [ProcessPoolExecutor(1, CONTEXT, _join, (rank, count, f"{folder}/store")) for rank in range(count)]
        for pool in pools:
            ends.enter_context(pool)

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            running = [pool.submit(function, *args) for pool in pools]
            return [one.result() for one in running]

        yield run


def _join(rank: int, count: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(minutes=2)
    )
