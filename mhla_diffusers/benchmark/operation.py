"""One attention by itself: MHLA and plain linear attention against softmax attention."""

from collections.abc import Callable
from typing import Any

import torch

from ..attention import initial_mixing, mhla_attention
from ..attention.triton import why_not
from .correctness import check_agreement, check_operation, make_inputs
from .costs import linear_cost, softmax_cost
from .rates import Rates
from .results import Row, make_row
from .shapes import Shape
from .softmax import SOFTMAX_BACKENDS, softmax_attention, why_no_softmax
from .timing import Absent, Budget, Variant, time_interleaved

STAGES = ("forward", "forward+backward")

Attend = Callable[[], torch.Tensor]


def benchmark_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, rates: Rates, budget: Budget, *, compile: bool
) -> list[Row]:
    """Check every MHLA backend against the reference, then time all variants in turns.

    Args:
        shape: which attention.
        device: where.
        dtype: of query, key and value.
        rates: of the device.
        budget: how often.
        compile: whether to time torch.compile of the eager backend too, which takes a minute to compile.

    Returns:
        A row per stage and variant.

    Raises:
        IncorrectAttentionError: a backend is wrong here; then nothing is timed.
    """
    absent = {} if (reason := _why_no_triton(shape, device, dtype)) is None else {"triton": reason}
    for backend in ("eager", "triton"):
        if backend not in absent:
            check_operation(shape, device, dtype, backend)
    if not compile:
        absent["torch.compile"] = "not asked for; add --compile"
    rows = []
    for stage in STAGES:
        backward = stage == "forward+backward"
        torch.compiler.reset()
        attends = _attends(shape, device, dtype, absent, backward)
        if not backward:
            _check_at_full_size(attends, device)
        variants: dict[str, Variant] = {
            name: attend if isinstance(attend, Absent) else _stage(attend, inputs, backward)
            for name, (attend, inputs) in attends.items()
        }
        for name, outcome in time_interleaved(variants, device, budget).items():
            softmax = name.startswith("softmax")
            blocks = None if softmax else 1 if name.startswith("plain") else torch.Size(shape.blocks).numel()
            if blocks is None:
                cost = softmax_cost(shape, dtype.itemsize, backward)
            else:
                cost = linear_cost(shape, blocks, dtype.itemsize, backward)
            rows.append(
                make_row(
                    outcome,
                    rates,
                    flops=cost.flops,
                    bytes=cost.bytes,
                    case=shape.name,
                    stage=stage,
                    variant=name,
                    baseline=softmax,
                    dtype=str(dtype).removeprefix("torch."),
                    tokens=shape.tokens,
                    blocks=blocks,
                )
            )
    return rows


def _attends(
    shape: Shape, device: torch.device, dtype: torch.dtype, absent: dict[str, str], backward: bool
) -> dict[str, tuple[Attend | Absent, tuple[torch.Tensor, ...]]]:
    """Name → attention, and the tensors that take gradients."""
    inputs = tuple(x.requires_grad_(backward) for x in make_inputs(shape, device, dtype))

    def linear(blocks: tuple[int, ...], backend: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        mixing = initial_mixing(blocks).to(device).requires_grad_(backward)
        if backend in absent:
            return Absent(absent[backend]), ()
        function: Any = mhla_attention
        if backend == "torch.compile":
            function, backend = torch.compile(mhla_attention, dynamic=False), "eager"
        return lambda: function(*inputs, mixing, shape.grid, blocks, backend=backend), (*inputs, mixing)

    def softmax(backend: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        reason = why_no_softmax(backend, device, shape.tokens, shape.heads)
        if reason is not None:
            return Absent(reason), ()
        return lambda: softmax_attention(backend, *inputs), inputs

    one = (1,) * len(shape.blocks)
    attends = {f"MHLA {backend}": linear(shape.blocks, backend) for backend in ("eager", "triton", "torch.compile")}
    attends |= {f"plain linear {backend}": linear(one, backend) for backend in ("eager", "triton")}
    for backend in SOFTMAX_BACKENDS:
        attends[f"softmax {backend}"] = softmax(backend)
    return attends


def _stage(attend: Attend, inputs: tuple[torch.Tensor, ...], backward: bool) -> Callable[[], object]:
    """The forward alone, or with the gradients of its inputs."""
    if not backward:
        return torch.no_grad()(attend)
    upstream = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(attend(), inputs, upstream)


@torch.no_grad()
def _check_at_full_size(
    attends: dict[str, tuple[Attend | Absent, tuple[torch.Tensor, ...]]], device: torch.device
) -> None:
    """The small grid of the first check cannot show a fault that needs many tokens."""
    attend = attends["MHLA triton"][0]
    eager = attends["MHLA eager"][0]
    if device.type == "cuda" and not isinstance(attend, Absent) and not isinstance(eager, Absent):
        check_agreement(attend(), eager(), "MHLA triton")


def _why_no_triton(shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        return "the fused kernels run on CUDA and ROCm devices"  # their interpreter is for tests and has no speed
    query = torch.empty(1, 0, shape.heads, shape.head_dim, device=device, dtype=dtype)
    return why_not(query, "relu", None)
