"""One attention by itself: MHLA and plain linear attention against softmax attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..attention import initial_mixing, mhla_attention
from ..attention.triton import why_not
from .candidates import EXACT, PLAIN
from .conditions import Rates
from .correctness import check_agreement, check_operation
from .lists import draw_tiles, flex_over_tiles, why_no_flex
from .packages import CHUNKED, FLASH, chunked_linear_attention, flash_attention, why_no_package
from .problems import beside_exact_tiles, make_inputs
from .results import Row, make_row
from .shapes import (
    SOFTMAX_BACKENDS,
    Cost,
    Shape,
    exact_cost,
    linear_cost,
    listed_cost,
    softmax_attention,
    softmax_cost,
    why_no_softmax,
)
from .timing import Absent, Budget, Outcome, Variant, time_interleaved

STAGES = ("forward", "forward+backward")
LISTED = "exact tiles alone"
"""Without means and far field, which FlexAttention does not know."""
CAUSAL = "causal linear"
"""Without a normaliser: the nearest to plain linear attention that flash-linear-attention has."""
_BACKENDS = ("eager", "triton")
_COMPILED, _FLEX = "torch.compile", "FlexAttention"
_PACKAGES = {FLASH: flash_attention, CHUNKED: chunked_linear_attention}

Attend = Callable[[], torch.Tensor]
CostOf = Callable[[Shape, int, bool], Cost]
_COSTS: dict[str, CostOf] = {
    "MHLA": linear_cost,
    EXACT: exact_cost,
    PLAIN: linear_cost,
    LISTED: listed_cost,
    CAUSAL: linear_cost,
    "softmax": softmax_cost,
}
"""Kind of a variant → what it costs; the name of a variant is its kind and its backend."""


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
            for exact in (False, True) if shape.tiles is not None else (False,):
                check_operation(shape, device, dtype, backend, sparse=exact)
    if not compile:
        absent |= dict.fromkeys((_COMPILED, _FLEX), "not asked for; add --compile")
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
            operation_row(_with_blocks(shape, name), name, stage, dtype, outcome, rates, _COSTS[_kind(name)])
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
        blocks=None if softmax or count is listed_cost else math.prod(shape.blocks),
    )


def linear_attention(
    shape: Shape,
    inputs: Sequence[torch.Tensor],
    backend: str,
    mixing: torch.Tensor | None = None,
    **options: Any,
) -> Attend:
    """MHLA, or plain linear attention where the shape has one block.

    Args:
        shape: grid and blocks.
        inputs: query, key and value.
        backend: of :func:`mhla_attention`, or "torch.compile" of the eager one.
        mixing: (M, M); the initial one if left out.
        **options: further arguments of :func:`mhla_attention`, such as those of exact tiles.
    """
    matrix = initial_mixing(shape.blocks).to(inputs[0].device) if mixing is None else mixing
    query, key, value = inputs
    function: Any = mhla_attention
    if backend == _COMPILED:
        function, backend = torch.compile(mhla_attention, dynamic=False), "eager"
    return lambda: function(query, key, value, matrix, shape.grid, shape.blocks, backend=backend, **options)


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

    lists = draw_tiles(shape, device) if shape.tiles is not None else None

    def linear(kind: str, backend: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        one = _with_blocks(shape, kind)
        # learnable in both stages, as in a patched model: what takes gradients may be computed in another way
        mixing = initial_mixing(one.blocks).to(device).requires_grad_()
        if kind != EXACT:
            return linear_attention(one, inputs, backend, mixing), (*inputs, mixing)
        weights = {name: x.requires_grad_() for name, x in beside_exact_tiles(shape.heads, device).items()}
        attend = linear_attention(one, inputs, backend, mixing, sparse=lists, **weights)
        return attend, (*inputs, mixing, *weights.values())

    def attend(kind: str, backend: str) -> tuple[Attend | Absent, tuple[torch.Tensor, ...]]:
        reason = absent.get(backend)
        if backend in _PACKAGES:
            reason = why_no_package(backend, device)
        elif kind == "softmax":
            reason = why_no_softmax(backend, device, shape.tokens, shape.heads)
        if kind == LISTED:
            reason = reason or why_no_flex(device, backward)
        if reason is not None:
            return Absent(reason), ()
        if backend in _PACKAGES:
            return partial(_PACKAGES[backend], *inputs), inputs
        if kind == "softmax":
            return lambda: softmax_attention(backend, *inputs), inputs
        if kind == LISTED and lists is not None:
            return flex_over_tiles(shape, inputs, lists), inputs
        return linear(kind, backend)

    kinds = {
        "MHLA": (*_BACKENDS, _COMPILED),
        PLAIN: _BACKENDS,
        "softmax": (*SOFTMAX_BACKENDS, FLASH),
        CAUSAL: (CHUNKED,),
    }
    if lists is not None:
        kinds |= {EXACT: _BACKENDS, LISTED: (_FLEX,)}
    return {f"{kind} {backend}": attend(kind, backend) for kind in _COSTS for backend in kinds.get(kind, ())}


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
    for kind in ("MHLA", EXACT):
        attend, eager = (attends.get(f"{kind} {backend}", (Absent(""), ()))[0] for backend in ("triton", "eager"))
        if device.type == "cuda" and not isinstance(attend, Absent) and not isinstance(eager, Absent):
            check_agreement(attend(), eager(), f"{kind} triton")


def _kind(variant: str) -> str:
    return variant.rpartition(" ")[0]


def _with_blocks(shape: Shape, variant: str) -> Shape:
    """The shape of a variant: plain linear attention has one block."""
    return replace(shape, blocks=(1,) * len(shape.blocks)) if variant.startswith((PLAIN, CAUSAL)) else shape
