"""One kernel with everything that it takes, and what kernels need to know of the card they run on."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

LOG2E = 1.4426950408889634
"""Kernels compute exponentials to the base 2: exp(x) = exp2(LOG2E x)."""

EMPTY = -1e30
"""Log-sum-exp of a query that attends to nothing: finite, so that differences of two of them are no NaN."""

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
"""Of the largest common card of an architecture: A100, A40, L40S, H100 and H200, B200, RTX 5090, MI300X."""
_OF_THE_INTERPRETER = 4


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that it takes."""

    kernel: Any
    grid: tuple[int, ...]
    """Programs along up to three axes."""
    arguments: dict[str, Any]
    """By the names of the kernel's parameters, compile-time constants too."""
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """What Triton compiles the kernel with besides its constants."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    @property
    def moved_bytes(self) -> int:
        """Of all tensors that the kernel reads or writes, each once: about the least that must move."""
        return sum(x.numel() * x.element_size() for x in self._tensors())

    def run(self) -> None:
        """Launch the kernel on the device of its tensors."""
        device = next(self._tensors()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (x for x in self.arguments.values() if isinstance(x, torch.Tensor))


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled contiguous tensor; the tests fill it with NaN, so that an element that no kernel wrote shows."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@cache
def architecture_of(device: torch.device) -> str:
    """Name of a device's architecture: "sm_90", "gfx942", and "interpreter" for a CPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def processors_of(device: torch.device, architecture: str) -> int:
    """Processors of a card; of one that is not there, those of the largest common card of its architecture."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return PROCESSORS.get(architecture, _OF_THE_INTERPRETER)


def power_of_two(size: int) -> int:
    """The next power of two, at least 16, the smallest side of a tile that the tensor cores multiply."""
    return max(16, 1 << (size - 1).bit_length())


def precision_of(dtype: torch.dtype, architecture: str) -> str:
    """``input_precision`` of a kernel's products.

    TF32 keeps 11 bits of a float32; three products of it keep 21. Cards without TF32 multiply float32 as it is. Half
    precision is multiplied as it is on all.
    """
    return "tf32x3" if dtype == torch.float32 and architecture.startswith("sm_") else "ieee"


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """The gradient of every backward operator: no kernel computes it."""
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )
