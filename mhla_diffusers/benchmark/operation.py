"""One attention by itself: MHLA and plain linear attention against softmax attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..attention import initial_mixing, mhla_attention
from ..attention.triton import why_not
from .candidates import PLAIN
from .conditions import Rates
from .correctness import check_agreement, check_operation, make_inputs
from .results import Row, make_row
from .shapes import (
    SOFTMAX_BACKENDS,
    Cost,
    Shape,
    linear_cost,
    near_field_cost,
    softmax_attention,
    softmax_cost,
    why_no_softmax,
)
from .timing import Absent, Budget, Outcome, Variant, time_interleaved

STAGES = ("forward", "forward+backward")
NEAR_FIELD = "MHLA, near field"
_BACKENDS = ("eager", "triton")

Attend = Callable[[], torch.Tensor]
CostOf = Callable[[Shape, int, bool], Cost]


def choose_stages(names: Sequence[str] | None) -> Sequence[str]:
    """Stages by name; None for all.

    Raises:
        ValueError: unknown name.
    """
    for name in names or ():
        if name not in STAGES:
            raise ValueError(f"Unknown stage {name!r}; allowed: {', '.join(STAGES)}.")
    return names or STAGES


def benchmark_operation(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    budget: Budget,
    stages: Sequence[str] = STAGES,
    *,
    compile: bool,
) -> list[Row]:
    """Check every MHLA backend against the reference, then time all variants in turns.

    Args:
        shape: which attention.
        device: where.
        dtype: of query, key and value.
        rates: of the device.
        budget: how often.
        stages: of ``STAGES``.
        compile: whether to time torch.compile of the eager backend too, which takes a minute to compile.

    Returns:
        A row per stage and variant.

    Raises:
        IncorrectAttentionError: a backend is wrong here; then nothing is timed.
    """
    absent = {} if (reason := why_no_triton(shape, device, dtype)) is None else {"triton": reason}
    for backend in _BACKENDS:
        if backend not in absent:
            for near_field in (False, True):
                check_operation(shape, device, dtype, backend, near_field=near_field)
    if not compile:
        absent["torch.compile"] = "not asked for; add --compile"
    rows = []
    for stage in stages:
        backward = stage == "forward+backward"
        torch.compiler.reset()
        attends = _attends(shape, device, dtype, absent, backward)
        if not backward:
            _check_at_full_size(attends, device)
        variants: dict[str, Variant] = {
            name: attend if isinstance(attend, Absent) else _stage(attend, inputs, backward)
            for name, (attend, inputs) in attends.items()
        }
        rows += [
            operation_row(_with_blocks(shape, name), name, stage, dtype, outcome, rates, _cost(name))
            for name, outcome in time_interleaved(variants, device, budget).items()
        ]
    return rows


def operation_row(
    shape: Shape, variant: str, stage: str, dtype: torch.dtype, outcome: Outcome, rates: Rates, count: CostOf
) -> Row:
    """The row of one attention, with FLOPs and bytes counted.

    Args:
        shape: the attention, with the blocks of this variant.
        variant: its name.
        stage: one of ``STAGES``.
        dtype: of query, key and value.
        outcome: what was measured.
        rates: of the device.
        count: its cost; what costs as much as softmax attention is what the others are compared with.
    """
    backward = stage == "forward+backward"
    cost, softmax = count(shape, dtype.itemsize, backward), count is softmax_cost
    return make_row(
        outcome,
        rates,
        flops=cost.flops,
        bytes=cost.bytes,
        case=shape.name,
        stage=stage,
        variant=variant,
        baseline=softmax,
        dtype=str(dtype).removeprefix("torch."),
        tokens=shape.tokens,
        blocks=None if softmax else math.prod(shape.blocks),
    )


def linear_attention(
    shape: Shape,
    inputs: Sequence[torch.Tensor],
    backend: str,
    mixing: torch.Tensor | None = None,
    far_field_weight: torch.Tensor | None = None,
) -> Attend:
    """MHLA, or plain linear attention where the shape has one block.

    Args:
        shape: grid and blocks.
        inputs: query, key and value.
        backend: of :func:`mhla_attention`, or "torch.compile" of the eager one.
        mixing: (M, M); the initial one if left out.
        far_field_weight: (H,), for softmax attention inside a block.
    """
    matrix = initial_mixing(shape.blocks).to(inputs[0].device) if mixing is None else mixing
    query, key, value = inputs
    function: Any = mhla_attention
    if backend == "torch.compile":
        function, backend = torch.compile(mhla_attention, dynamic=False), "eager"
    options = {"far_field_weight": far_field_weight, "backend": backend}
    return lambda: function(query, key, value, matrix, shape.grid, shape.blocks, **options)


def why_no_triton(shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot be timed; None if they can."""
    if device.type == "cpu":
        return "the fused kernels run on CUDA and ROCm devices"  # their interpreter is for tests and has no speed
    return why_not(torch.empty(1, 0, shape.heads, shape.head_dim, device=device, dtype=dtype), "relu")


def fastest_backend(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """The fused kernels where they can run, else eager."""
    return "triton" if why_no_triton(shape, device, dtype) is None else "eager"


def _attends(
    shape: Shape, device: torch.device, dtype: torch.dtype, absent: dict[str, str], backward: bool
) -> dict[str, tuple[Attend | Absent, tuple[torch.Tensor, ...]]]:
    """Name → attention, and the tensors that take gradients."""
    inputs = tuple(x.requires_grad_(backward) for x in make_inputs(shape, device, dtype))

    def linear(name: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        backend = name.split()[-1]
        if backend in absent:
            return Absent(absent[backend]), ()
        one = _with_blocks(shape, name)
        mixing = initial_mixing(one.blocks).to(device).requires_grad_(backward)
        if not name.startswith(NEAR_FIELD):
            return linear_attention(one, inputs, backend, mixing), (*inputs, mixing)
        far = torch.ones(shape.heads, device=device, requires_grad=backward)
        return linear_attention(one, inputs, backend, mixing, far), (*inputs, mixing, far)

    def softmax(backend: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        reason = why_no_softmax(backend, device, shape.tokens, shape.heads)
        if reason is not None:
            return Absent(reason), ()
        return lambda: softmax_attention(backend, *inputs), inputs

    kinds = {"MHLA": (*_BACKENDS, "torch.compile"), NEAR_FIELD: _BACKENDS, PLAIN: _BACKENDS}
    attends = {f"{kind} {backend}": linear(f"{kind} {backend}") for kind, names in kinds.items() for backend in names}
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


def _cost(variant: str) -> CostOf:
    if "softmax" in variant:
        return softmax_cost
    return near_field_cost if variant.startswith(NEAR_FIELD) else linear_cost


def _with_blocks(shape: Shape, variant: str) -> Shape:
    """The shape of a variant: plain linear attention has one block."""
    return replace(shape, blocks=(1,) * len(shape.blocks)) if variant.startswith(PLAIN) else shape
