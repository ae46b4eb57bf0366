"""One attention by itself: MHLA and plain linear attention against softmax attention."""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..attention import initial_mixing, mhla_attention, reference_attention
from .timing import Timing, time_interleaved


@dataclass(frozen=True)
class Shape:
    """An attention of a real model."""

    name: str
    grid: tuple[int, ...]
    blocks: tuple[int, ...]
    heads: int
    head_dim: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("wan2.1-1.3b-480p", (21, 30, 50), (7, 3, 5), 12, 128),
        Shape("sana-1.6b-1024px", (32, 32), (4, 4), 70, 32),
        Shape("dit-xl-2-512px", (32, 32), (4, 4), 16, 72),
    )
}
"""Wan: 81 frames of 480x800, the paper's setting (Sec. 5.3)."""

_LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class OperationResult:
    """What one run measured."""

    shape: Shape
    dtype: str
    device: str
    threads: int
    torch_version: str
    relative_error: float
    """Of MHLA against the float64 reference, on a smaller grid with the same blocks."""
    timings: dict[str, Timing]

    def ratio(self, slower: str, faster: str) -> float:
        """How many times faster one variant is than another."""
        return self.timings[slower].median / self.timings[faster].median


def benchmark_operation(
    shape: Shape, *, device: str = "cpu", dtype: torch.dtype = torch.float32, repetitions: int = 7, softmax: int = 2
) -> OperationResult:
    """Check MHLA against the reference, then time it, plain linear attention and softmax attention in turns.

    Args:
        shape: which attention.
        device: where.
        dtype: of query, key and value.
        repetitions: of the linear attentions.
        softmax: repetitions of softmax attention, which may take a minute on a CPU.

    Raises:
        ValueError: MHLA is not correct here; then nothing is timed.
    """
    place = torch.device(device)
    error = _relative_error(shape, place, dtype)
    if not error <= _LARGEST_ERROR[dtype]:
        raise ValueError(
            f"MHLA has a relative error of {error:.2e} against the reference on {device} in {dtype}; at most "
            f"{_LARGEST_ERROR[dtype]:.0e} is expected. Nothing was timed."
        )
    query, key, value = _inputs(shape.grid, shape, place, dtype)
    one = (1,) * len(shape.grid)

    def mhla(blocks: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        mixing = initial_mixing(blocks).to(place)
        return lambda: mhla_attention(query, key, value, mixing, shape.grid, blocks)

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "MHLA": mhla(shape.blocks),
        "plain linear": mhla(one),
        "softmax (SDPA)": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    counts = {"MHLA": repetitions, "plain linear": repetitions, "softmax (SDPA)": softmax}
    with torch.no_grad():
        timings = time_interleaved(variants, counts, place)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"{platform.machine()} CPU"
    return OperationResult(
        shape, str(dtype).removeprefix("torch."), name, torch.get_num_threads(), torch.__version__, error, timings
    )


def write_result(result: OperationResult, file: Path) -> None:
    """Write a result as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    aside.replace(file)


def _inputs(
    grid: tuple[int, ...], shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (1, torch.Size(grid).numel(), shape.heads, shape.head_dim)
    query, key, value = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(3))
    return query, key, value


@torch.no_grad()
def _relative_error(shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    grid = tuple(2 * count for count in shape.blocks)
    few = Shape(shape.name, grid, shape.blocks, 2, shape.head_dim)
    inputs = _inputs(grid, few, device, dtype)
    mixing = initial_mixing(shape.blocks).to(device)
    expected = reference_attention(*inputs, mixing, grid, shape.blocks)
    found = mhla_attention(*inputs, mixing, grid, shape.blocks)
    return float((found.double() - expected).norm() / expected.norm())
