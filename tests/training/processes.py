"""Trainings in processes of their own, forked from one that has imported everything, so that they start at once."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from accelerate import DistributedType, PartialState

from mhla_diffusers import apply_mhla
from mhla_diffusers.training import TrainingConfig, train

from ..processes import CONTEXT
from .models import tiny_wan, wan_data


def start_process(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Call a function in a process of its own."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def start_training(config: TrainingConfig, resume: str | None = None, **environment: str) -> BaseProcess:
    """Begin to train a tiny patched Wan; the process exits as the command does."""
    return start_process(train_as_launched, config.to_dict(), resume, environment)


def start_distributed_training(
    config: TrainingConfig, processes: int, resume: str | None = None, **environment: str
) -> list[BaseProcess]:
    """The same in several processes that talk through gloo, with what a launcher tells each of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    count = str(processes)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return [
        start_training(config, resume, **told, RANK=str(rank), LOCAL_RANK=str(rank), **environment)
        for rank in range(processes)
    ]


def finish(processes: Sequence[BaseProcess], timeout: float = 300) -> None:
    """Wait so many seconds for each of some processes, all of which must succeed."""
    for process in processes:
        process.join(timeout)
        assert process.exitcode == 0


def train_as_launched(settings: dict[str, object], resume: str | None, environment: dict[str, str]) -> None:
    """Train a tiny model in this process, which a launcher has given an environment; it exits then."""
    os.environ.update(environment)
    if "ACCELERATE_USE_FSDP" in environment:  # which accelerate ignores on CPUs, unless it takes them for GPUs
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    config = TrainingConfig.read(settings)
    assert not isinstance(config.patch, str | None)
    sys.exit(train(apply_mhla(tiny_wan(), config.patch), wan_data(), config, resume=resume).exit_code)
