"""Devices, processes and floating-point types by user-facing names."""

import os
from collections.abc import Sequence

import psutil
import torch

FLOAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by name."""
_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""Names of accelerate."""


def dtype_name(name: object, setting: str = "dtype", allowed: Sequence[str] = tuple(FLOAT_TYPES)) -> str:
    """Return the key of ``FLOAT_TYPES`` for a name such as bfloat16 or bf16; no is float32, which YAML reads as False.

    ``setting`` names it in the ValueError for any but the ``allowed`` keys.
    """
    for key in allowed:
        if name in (key, _PRECISIONS[key]) or (key == "float32" and (name is False or name == "fp32")):
            return key
    known = ", ".join(f"{key} (or {_PRECISIONS[key]})" for key in allowed)
    raise ValueError(f"{setting}={name!r} is unknown; allowed: {known}.")


def precision_name(name: object, allowed: Sequence[str] = tuple(FLOAT_TYPES)) -> str:
    """Return a type as accelerate names it: "no", "bf16" or "fp16"; ValueError as :func:`dtype_name`."""
    return _PRECISIONS[dtype_name(name, "precision", allowed)]


def choose_device(name: str) -> torch.device:
    """Return the device of a name, "auto" for a CUDA GPU if there is one; ValueError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    available = ["cpu", *(f"{accelerator.type}:{index}" for index in range(count) if accelerator)]
    if name not in available and not (accelerator and name == accelerator.type):
        raise ValueError(f"device={name!r} is not here; allowed: auto, {', '.join(available)}.")
    return torch.device(name)


def launched_processes() -> int:
    """Count the processes that a launcher started, including this one; 1 without a launcher."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def launched_on_cpus() -> bool:
    """Whether to tell accelerate that a launcher's processes run on CPUs; otherwise each would run by itself.

    True with ``ACCELERATE_USE_CPU``, and for processes of torchrun if there is no other device.
    """
    from accelerate.utils import parse_flag_from_env

    several = "LOCAL_RANK" in os.environ and launched_processes() > 1
    return parse_flag_from_env("ACCELERATE_USE_CPU") or (several and not torch.accelerator.is_available())


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that torch has held on a device, unless it is the CPU, and this process's resident ones."""
    resident = {"host_memory": psutil.Process().memory_info().rss}
    if device.type == "cpu":
        return resident
    return {"device_memory": torch.accelerator.max_memory_allocated(device), **resident}
