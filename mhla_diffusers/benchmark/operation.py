"""One attention by itself: MHLA and plain linear attention against softmax attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..attention import initial_mixing, mhla_attention
from ..attention.triton import why_not
from .candidates import CONTENT, PLAIN
from .conditions import Rates
from .correctness import check_agreement, check_operation
from .lists import draw_lists, flex_over_lists, why_no_flex
from .packages import CHUNKED, FLASH, FLASH3, PACKAGES, why_no_package
from .problems import branch_weights, make_inputs, random_rotary, rule_of
from .results import Row, make_row
from .shapes import SOFTMAX_BACKENDS, Shape, Work, cost_of, softmax_attention, why_no_softmax
from .timing import Absent, Budget, Outcome, Variant, time_interleaved

STAGES = ("forward", "forward+backward")
GIVEN = "MHLA, sparse, lists given"
"""What is left of ``CONTENT`` when nothing is chosen and no β fitted."""
LISTED = "listed blocks alone"
"""Without pooled keys and linear branch, which FlexAttention does not know."""
CAUSAL = "causal linear"
"""Without a normaliser: the nearest to plain linear attention that flash-linear-attention has."""
_BACKENDS = ("eager", "triton")
_COMPILED, _FLEX = "torch.compile", "FlexAttention"
_KINDS: dict[str, tuple[Work, tuple[str, ...]]] = {
    "MHLA": ("linear", (*_BACKENDS, _COMPILED)),
    CONTENT: ("sparse", _BACKENDS),
    GIVEN: ("sparse", _BACKENDS),
    PLAIN: ("linear", _BACKENDS),
    LISTED: ("lists", (_FLEX,)),
    CAUSAL: ("linear", (CHUNKED,)),
    "softmax": ("softmax", (*SOFTMAX_BACKENDS, FLASH, FLASH3)),
}
"""Kind of a variant → what it computes, and its backends; the name of a variant is its kind and its backend."""
_SPARSE = (CONTENT, GIVEN, LISTED)

Attend = Callable[[], torch.Tensor]


def choose_stages(names: Sequence[str] | None) -> Sequence[str]:
    """Stages by name; None for all.

    Raises:
        ValueError: unknown name.
    """
    for name in names or ():
        if name not in STAGES:
            raise ValueError(f"Unknown stage {name!r}; allowed: {', '.join(STAGES)}.")
    return names or STAGES


@dataclass(frozen=True)
class Attention:
    """One variant of an attention: what is timed, or why it cannot be."""

    kind: str
    shape: Shape
    """With the blocks of this variant."""
    attend: Attend | Absent
    inputs: tuple[torch.Tensor, ...] = ()
    """That take gradients."""

    def run(self, backward: bool) -> Variant:
        """The forward alone, or with the gradients of its inputs."""
        if isinstance(self.attend, Absent):
            return self.attend
        if not backward:
            return torch.no_grad()(self.attend)
        attend, upstream = self.attend, torch.ones_like(self.inputs[0])
        return lambda: torch.autograd.grad(attend(), self.inputs, upstream)


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

    MHLA is timed as a model calls it: with a mixing matrix per head, RoPE where the model has it, and choosing and
    fitting where lists are chosen by content. Softmax attention is timed without RoPE.

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
            for sparse in (False, True) if shape.block_size is not None else (False,):
                check_operation(shape, device, dtype, backend, sparse=sparse)
    if not compile:
        absent |= dict.fromkeys((_COMPILED, _FLEX), "not asked for; add --compile")
    rows = []
    for stage in stages:
        backward = stage == "forward+backward"
        torch.compiler.reset()
        attentions = _attentions(shape, device, dtype, absent, backward)
        if not backward and device.type == "cuda":
            _check_at_full_size(attentions)
        outcomes = time_interleaved({name: one.run(backward) for name, one in attentions.items()}, device, budget)
        for name, outcome in outcomes.items():
            one = attentions[name]
            rows.append(operation_row(one.shape, name, stage, dtype, outcome, rates, _KINDS[one.kind][0]))
    return rows


def operation_row(
    shape: Shape, variant: str, stage: str, dtype: torch.dtype, outcome: Outcome, rates: Rates, work: Work
) -> Row:
    """The row of one attention, with FLOPs and bytes counted.

    Args:
        shape: the attention, with the blocks of this variant.
        variant: its name.
        stage: one of ``STAGES``.
        dtype: of query, key and value.
        outcome: what was measured.
        rates: of the device.
        work: what it computes; softmax is what the others are compared with.
    """
    cost = cost_of(shape, work, dtype.itemsize, stage == "forward+backward")
    softmax = work == "softmax"
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
        blocks=None if work in ("softmax", "lists") else math.prod(shape.blocks),
        note="without RoPE" if softmax and shape.rotary_axes is not None else "",
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
        mixing: (M, M) or (H, M, M); the initial one if left out.
        **options: further arguments of :func:`mhla_attention`, such as those of the sparse branch.
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


def _attentions(
    shape: Shape, device: torch.device, dtype: torch.dtype, absent: dict[str, str], backward: bool
) -> dict[str, Attention]:
    """Name → attention."""
    inputs = tuple(x.requires_grad_(backward) for x in make_inputs(shape, device, dtype))
    lists = draw_lists(shape, device) if shape.block_size is not None else None
    rotary: dict[str, Any] = {}
    if shape.rotary_axes is not None:
        rotary = {"rotary": random_rotary(shape, device), "rotary_axes": shape.rotary_axes}

    def why_not_timed(kind: str, backend: str) -> str | None:
        if backend in PACKAGES:
            return why_no_package(backend, device)
        if kind == "softmax":
            return why_no_softmax(backend, device, shape.tokens, shape.heads)
        return absent.get(backend) or (why_no_flex(device, backward) if backend == _FLEX else None)

    def attention(kind: str, backend: str) -> Attention:
        one = replace(shape, blocks=(1,) * len(shape.blocks)) if kind in (PLAIN, CAUSAL) else shape
        if (reason := why_not_timed(kind, backend)) is not None:
            return Attention(kind, one, Absent(reason))
        if backend in PACKAGES:
            return Attention(kind, one, partial(PACKAGES[backend], *inputs), inputs)
        if kind == "softmax":
            return Attention(kind, one, partial(softmax_attention, backend, *inputs), inputs)
        if kind == LISTED and lists is not None:
            return Attention(kind, one, flex_over_lists(shape, inputs, lists), inputs)
        # learnable in both stages, as in a patched model: what takes gradients may be computed in another way
        mixing = initial_mixing(one.blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
        weights, options = {}, dict(rotary)
        if kind in _SPARSE:
            weights = {name: x.requires_grad_() for name, x in branch_weights(shape.heads, device).items()}
            options |= {"rope": "before", "sparse": lists}
        if kind == CONTENT:
            del weights["pooled_bias"]
            options["sparse"] = rule_of(shape, fit_pooled_bias=True)
        attend = linear_attention(one, inputs, backend, mixing, **options, **weights)
        return Attention(kind, one, attend, (*inputs, mixing, *weights.values()))

    kinds = [kind for kind in _KINDS if shape.block_size is not None or kind not in _SPARSE]
    return {f"{kind} {backend}": attention(kind, backend) for kind in kinds for backend in _KINDS[kind][1]}


@torch.no_grad()
def _check_at_full_size(attentions: dict[str, Attention]) -> None:
    """The small grid of the first check cannot show a fault that needs many tokens."""
    for kind in ("MHLA", GIVEN):
        found, expected = (attentions.get(f"{kind} {backend}") for backend in ("triton", "eager"))
        if found is None or expected is None or isinstance(found.attend, Absent) or isinstance(expected.attend, Absent):
            continue
        check_agreement(found.attend(), expected.attend(), f"{kind} triton")
