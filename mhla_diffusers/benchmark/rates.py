"""What the device itself can do, measured in the same run: the yardstick of every other figure."""

from dataclasses import dataclass

import torch

from .timing import Clock, summarise

_REPETITIONS = 7


@dataclass(frozen=True)
class Rates:
    """Measured limits of a device."""

    matmul: float
    """FLOP/s of a large matrix product; a multiplication and an addition count two."""
    matmul_dtype: str
    copy: float
    """Bytes/s of a large copy; reading and writing both count."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a matrix product and a copy that are too large for any cache.

    Args:
        device: which device.
        dtype: of the matrices.
    """
    side, copied = (8192, 2**30) if device.type == "cuda" else (1024, 2**27)
    clock = Clock(device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def copy() -> None:
        target.copy_(source)

    medians = []
    for run in (multiply, copy):
        run()
        medians.append(summarise([clock.seconds(run) for _ in range(_REPETITIONS)]).median)
    return Rates(2 * side**3 / medians[0], str(dtype).removeprefix("torch."), 2 * copied / medians[1])
