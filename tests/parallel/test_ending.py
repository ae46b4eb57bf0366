"""A process that ends, or answers no more, ends the others with one message."""

import os
import time
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import mhla_attention

from .processes import Processes
from .test_operator import parallel

_TIMEOUT = 4.0
"""Seconds that processes wait for each other, few for a test."""


def _attend(degrees: tuple[int, int], what_happens: str) -> tuple[str, float]:
    """What the first process's second call says while the second ends or sleeps, and after how many seconds."""
    place = parallel(*degrees)
    query, key, value = torch.randn(3, 1, 4, 2, 8)
    arguments: dict[str, Any] = {"mixing": torch.ones(2, 2), "grid": (8,), "blocks": (2,), "parallel": place}
    mhla_attention(query, key, value, **arguments)
    if torch.distributed.get_rank() == 1:
        if what_happens == "ends":
            os._exit(3)
        time.sleep(3 * _TIMEOUT)
        return "", 0.0
    start = time.monotonic()
    try:
        mhla_attention(query, key, value, **arguments)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the call went through alone")


@pytest.mark.parametrize(("degrees", "what_happens"), [((2, 1), "ends"), ((1, 2), "sleeps")])
def test_others_end_with_one_message(degrees: tuple[int, int], what_happens: str) -> None:
    processes = Processes(2, timeout=_TIMEOUT)
    try:
        for pipe in processes.pipes:
            pipe.send((_attend, (degrees, what_happens), {}))
        worked, answer = processes.pipes[0].recv()
        assert worked, answer
        message, seconds = answer
        assert message.startswith("Another process of the context-parallel group has ended or does not answer")
        assert seconds < 2 * _TIMEOUT
    finally:
        for worker in processes.workers:
            worker.terminate()
        processes.close()
