"""Devices and floating-point types by the names that users write."""

import torch

FLOAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by name."""


def available_devices() -> list[str]:
    """Names of the devices that torch sees here, "cpu" first, then for example "cuda:0"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))]


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is a CUDA GPU if there is one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown; torch sees here: {', '.join(available)}.") from error
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in available:
        raise ValueError(
            f"device={name!r} is not here; torch {torch.__version__} sees: {', '.join(available)}. "
            "Use one of these or auto."
        )
    return device
