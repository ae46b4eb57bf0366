"""Devices and floating-point types by user-facing names."""

import os
from collections.abc import Sequence

import psutil
import torch

FLOAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by name."""
_OTHER_SPELLINGS = {"float32": ("fp32", "no"), "bfloat16": ("bf16",), "float16": ("fp16",)}
_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def dtype_name(name: object, setting: str = "dtype", allowed: Sequence[str] = tuple(FLOAT_TYPES)) -> str:
    """Return the key of ``FLOAT_TYPES`` for a name such as ``bfloat16`` or ``bf16``, ``float32`` or ``no``.

    Args:
        name: given name; False, because YAML reads ``no`` as False.
        setting: name of the setting, such as "precision".
        allowed: keys of ``FLOAT_TYPES``.

    Raises:
        ValueError: any other name.
    """
    given = "no" if name is False else name
    for key in allowed:
        if given in (key, *_OTHER_SPELLINGS[key]):
            return key
    known = ", ".join(f"{key} (or {', '.join(_OTHER_SPELLINGS[key])})" for key in allowed)
    raise ValueError(f"{setting}={name!r} is unknown; allowed: {known}.")


def precision_name(name: object, allowed: Sequence[str] = tuple(FLOAT_TYPES)) -> str:
    """Return a type as accelerate names it: "no", "bf16" or "fp16".

    Raises:
        ValueError: as :func:`dtype_name`.
    """
    return _PRECISIONS[dtype_name(name, "precision", allowed)]


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is a CUDA GPU if there is one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    available = ["cpu"]
    if accelerator is not None:
        available += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown; torch sees here: {', '.join(available)}.") from error
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in available:
        raise ValueError(
            f"device={name!r} does not exist here; torch {torch.__version__} sees: {', '.join(available)}. "
            "Use one of these or auto."
        )
    return device


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
