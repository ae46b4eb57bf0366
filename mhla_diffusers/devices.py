"""Devices, processes and floating-point types by user-facing names."""

import os

import torch

FLOAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by name."""


def choose_device(name: str) -> torch.device:
    """Return a device by name, "auto" for a GPU if there is one; ValueError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known, accelerator = ["auto", "cpu"], torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        kind, count = accelerator.type, torch.accelerator.device_count()
        known += [kind, *(f"{kind}:{index}" for index in range(count))]
    if name not in known:
        raise ValueError(f"device={name!r} is not available; allowed: {', '.join(known)}.")
    return torch.device(name)


def device_and_type(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Return device and type by their names, by default bfloat16 on a GPU and float32 on a CPU."""
    place = choose_device(device)
    dtype = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    if dtype not in FLOAT_TYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; allowed: {', '.join(FLOAT_TYPES)}.")
    return place, FLOAT_TYPES[dtype]


def launched_processes() -> int:
    """Count the processes that a launcher started, including this one; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def launched_on_cpus() -> bool:
    """Whether to tell accelerate that a launcher's processes run on CPUs; otherwise each would run by itself.

    True with ``ACCELERATE_USE_CPU``, and for processes of torchrun if there is no other device.
    """
    from accelerate.utils import parse_flag_from_env

    several = "LOCAL_RANK" in os.environ and launched_processes() > 1
    return parse_flag_from_env("ACCELERATE_USE_CPU") or (several and not torch.accelerator.is_available())
