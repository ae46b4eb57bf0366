"""One attention by itself: MHLA and plain linear attention against softmax, and over tokens and blocks."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from ..attention import initial_mixing, mhla_attention
from ..attention.triton.backend import why_not
from .correctness import branch_weights, check_agreement, check_operation, make_inputs, random_rotary, rule_of
from .results import CONTENT, PLAIN, Recorder, Row, Run, console
from .shapes import (
    CHUNKED,
    FLASH,
    FLASH3,
    PACKAGES,
    SOFTMAX_BACKENDS,
    Shape,
    Work,
    cost_of,
    draw_lists,
    flex_over_lists,
    softmax_attention,
    why_no_flex,
    why_no_package,
    why_no_softmax,
)
from .timing import Absent, Outcome, Variant

STAGES = ("forward", "forward+backward")
SOFTMAX = "softmax"
GIVEN = "MHLA, sparse, lists given"
"""``CONTENT`` without choosing lists and fitting β."""
LISTED = "listed blocks alone"
"""Without pooled keys and linear branch, which FlexAttention lacks."""
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
    SOFTMAX: ("softmax", (*SOFTMAX_BACKENDS, FLASH, FLASH3)),
}
"""Kind of a variant → what it computes, and its backends; the name of a variant is its kind and its backend."""

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
    """One variant of an attention: the call to time, or why it cannot be timed."""

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


def benchmark_operation(shape: Shape, recorder: Recorder, stages: Sequence[str], *, compile: bool) -> list[Row]:
    """Check every MHLA backend against the reference, then time all variants in turns: a row per stage and variant.

    MHLA is timed as a model calls it: with a mixing matrix per head, RoPE where the model has it, and choosing and
    fitting where lists are chosen by content. Softmax attention is timed without RoPE. With ``compile`` torch.compile
    of the eager backend is timed too, which takes a minute to compile.

    Raises:
        IncorrectAttentionError: a backend is wrong here; then nothing is timed.
    """
    device, dtype = recorder.device, recorder.dtype
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
        outcomes = recorder.measure({name: one.run(backward) for name, one in attentions.items()})
        for name, outcome in outcomes.items():
            one = attentions[name]
            rows.append(_row(recorder, outcome, one.shape, name, stage, _KINDS[one.kind][0]))
    return rows


def _row(recorder: Recorder, outcome: Outcome, shape: Shape, variant: str, stage: str, work: Work) -> Row:
    """Of one attention, with the blocks of this variant; what it computes tells FLOPs and bytes."""
    cost = cost_of(shape, work, recorder.dtype.itemsize, stage == "forward+backward")
    softmax = work == "softmax"
    return recorder.row(
        outcome,
        flops=cost.flops,
        bytes=cost.bytes,
        case=shape.name,
        stage=stage,
        variant=variant,
        baseline=softmax,
        tokens=shape.tokens,
        blocks=None if work in ("softmax", "lists") else math.prod(shape.blocks),
        note="without RoPE" if softmax and shape.rope else "",
    )


def linear_attention(
    shape: Shape, inputs: Sequence[torch.Tensor], backend: str, mixing: torch.Tensor | None = None, **options: Any
) -> Attend:
    """MHLA, or plain linear attention where the shape has one block, with the initial mixing matrix if none is given.

    The backend is one of :func:`mhla_attention`, or "torch.compile" of the eager one; options are further arguments.
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
    if shape.rope:
        rotary = {"rotary": random_rotary(shape, device)}

    def why_not_timed(kind: str, backend: str) -> str | None:
        if backend in PACKAGES:
            return why_no_package(backend, device)
        if kind == SOFTMAX:
            return why_no_softmax(backend, device, shape.tokens, shape.heads)
        return absent.get(backend) or (why_no_flex(device, backward) if backend == _FLEX else None)

    def attention(kind: str, backend: str) -> Attention:
        one = replace(shape, blocks=(1,) * len(shape.blocks)) if kind in (PLAIN, CAUSAL) else shape
        if (reason := why_not_timed(kind, backend)) is not None:
            return Attention(kind, one, Absent(reason))
        if backend in PACKAGES:
            return Attention(kind, one, partial(PACKAGES[backend], *inputs), inputs)
        if kind == SOFTMAX:
            return Attention(kind, one, partial(softmax_attention, backend, *inputs), inputs)
        if kind == LISTED and lists is not None:
            return Attention(kind, one, flex_over_lists(shape, inputs, lists), inputs)
        # learnable in both stages, as in a patched model: what takes gradients may be computed in another way
        mixing = initial_mixing(one.blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
        weights, options = {}, dict(rotary)
        if kind in (CONTENT, GIVEN):
            weights = {name: x.requires_grad_() for name, x in branch_weights(shape.heads, device).items()}
            options |= {"rope": "before", "sparse": lists}
        if kind == CONTENT:
            del weights["pooled_bias"]
            options["sparse"] = rule_of(shape, fit_pooled_bias=True)
        attend = linear_attention(one, inputs, backend, mixing, **options, **weights)
        return Attention(kind, one, attend, (*inputs, mixing, *weights.values()))

    kinds = [kind for kind in _KINDS if shape.block_size is not None or kind not in (CONTENT, GIVEN, LISTED)]
    return {f"{kind} {backend}": attention(kind, backend) for kind in kinds for backend in _KINDS[kind][1]}


@torch.no_grad()
def _check_at_full_size(attentions: dict[str, Attention]) -> None:
    """The small grid of the first check cannot show a fault that needs many tokens."""
    for kind in ("MHLA", GIVEN):
        found, expected = (attentions.get(f"{kind} {backend}") for backend in ("triton", "eager"))
        if found is None or expected is None or isinstance(found.attend, Absent) or isinstance(expected.attend, Absent):
            continue
        check_agreement(found.attend(), expected.attend(), f"{kind} triton")


# ---- over tokens N and token blocks M (paper, Tab. 14) --------------------------------------------------------------

FIT_FROM_TOKENS = 8192
"""Below this, launches and caches decide, and time does not grow with N."""


@dataclass(frozen=True)
class Scaling:
    """What to vary.

    Raises:
        ValueError: a value that is not allowed.
    """

    tokens: tuple[int, ...]
    """N, squares of the sides of the grids."""
    blocks: tuple[int, ...]
    """M, squares too."""
    heads: int = 6
    head_dim: int = 64
    """DiT-S/2's, as in the paper."""
    softmax_tokens: int = 2**20
    """Softmax attention is measured up to here."""

    def __post_init__(self) -> None:
        for name in ("tokens", "blocks"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one number.")
            for number in getattr(self, name):
                if number < 1 or math.isqrt(number) ** 2 != number:
                    near = (math.isqrt(max(number, 1))) ** 2
                    raise ValueError(
                        f"{name}={number} is no square number, as a square grid needs; for example {near}."
                    )
        if self.heads < 1 or self.head_dim < 1:
            raise ValueError(f"heads={self.heads} and head_dim={self.head_dim} must be positive.")

    def shape(self, tokens: int, blocks: int) -> Shape:
        """With one N and one M."""
        side = math.isqrt(tokens)
        return Shape(f"N={tokens}", (side, side), (math.isqrt(blocks),) * 2, self.heads, self.head_dim)


def default_scaling(device_type: str) -> Scaling:
    """Up to a million tokens on a GPU and 36 864 on a CPU."""
    if device_type == "cpu":
        return Scaling(tuple(s**2 for s in (32, 64, 96, 128, 192)), (4, 16, 64, 256), softmax_tokens=4096)
    return Scaling(tuple(4**power for power in range(5, 11)), (4, 16, 64, 256, 1024))


def check_scaling(config: Scaling, device: torch.device, dtype: torch.dtype) -> None:
    """Check MHLA with every M; raises IncorrectAttentionError where it is wrong."""
    for count in config.blocks:
        shape = config.shape(min(config.tokens), count)
        check_operation(shape, device, dtype, fastest_backend(shape, device, dtype))


def benchmark_scaling(config: Scaling, tokens: int, recorder: Recorder) -> list[Row]:
    """Time softmax, plain linear attention and MHLA with every M at one N, in turns, after :func:`check_scaling`."""
    whole, place = config.shape(tokens, 1), (recorder.device, recorder.dtype)
    backend, inputs = fastest_backend(whole, *place), make_inputs(whole, *place)
    shapes = {SOFTMAX: whole, PLAIN: whole}
    shapes |= {f"MHLA M={count}": config.shape(tokens, count) for count in sorted(config.blocks) if count <= tokens}
    variants: dict[str, Variant] = {
        name: torch.no_grad()(linear_attention(shape, inputs, backend)) for name, shape in shapes.items()
    }
    if tokens > config.softmax_tokens:
        reason = f"softmax attention is measured up to {config.softmax_tokens} tokens; see --softmax-tokens"
        variants[SOFTMAX] = Absent(reason)
    else:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        variants[SOFTMAX] = torch.no_grad()(partial(torch.nn.functional.scaled_dot_product_attention, q, k, v))
    return [
        _row(recorder, outcome, shapes[name], name, "forward", "softmax" if name == SOFTMAX else "linear")
        for name, outcome in recorder.measure(variants).items()
    ]


def fitted_exponent(rows: Sequence[Row], variant: str) -> float | None:
    """Exponent e of time ~ N^e by least squares on logarithms, from 8192 tokens up; None with fewer than two N."""
    points = [
        (math.log(row.tokens), math.log(row.median))
        for row in rows
        if row.variant == variant and row.median and (row.tokens or 0) >= FIT_FROM_TOKENS and row.tokens
    ]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def mixing_overhead(run: Run, row: Row) -> float | None:
    """Time of an MHLA row beyond plain linear attention with the same N, as a fraction of the latter's."""
    plain = next((other.median for other in run.rows if other.case == row.case and other.variant == PLAIN), None)
    if plain is None or row.median is None or row.blocks is None or row.blocks == 1:
        return None
    return row.median / plain - 1


def print_scaling(run: Run) -> None:
    """The fitted exponents, and the overhead of mixing over N and M with M² ≤ N marked."""
    exponents = Table("variant", f"exponent of time in N, from {FIT_FROM_TOKENS} tokens", title="Growth")
    for variant in dict.fromkeys(row.variant for row in run.rows):
        exponent = fitted_exponent(run.rows, variant)
        exponents.add_row(variant, "too few N" if exponent is None else f"{exponent:.2f}")
    console().print(exponents)
    tokens = sorted({row.tokens for row in run.rows if row.tokens})
    table = Table("M \\ N", *map(str, tokens))
    overheads = {(row.blocks, row.tokens): mixing_overhead(run, row) for row in run.rows}
    for m in sorted({row.blocks for row in run.rows if row.blocks and row.blocks > 1}):
        cells = [(overheads.get((m, n)), "*" if m**2 <= n else "") for n in tokens]
        table.add_row(str(m), *("" if value is None else f"{value:+.0%}{mark}" for value, mark in cells))
    console().print("Time beyond plain linear attention (* where M² ≤ N)", highlight=False)
    console().print(table)
