"""Is it fast here? Attention timed over growing N on this machine, where the curves cross, and a picture of it.

The attention is that of Wan2.1-1.3B by itself, whose times on an H100 ship with this package. A CPU computes 4 of its
12 heads: every head costs about the same, and the same seconds reach a larger N.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..attention import initial_mixing
from ..benchmark.correctness import branch_weights, make_inputs, rule_of
from ..benchmark.models import models
from ..benchmark.operation import SOFTMAX, fastest_backend, linear_attention
from ..benchmark.report import COLOURS, logarithmic
from ..benchmark.results import CONTENT, EARLIER, gather_conditions
from ..benchmark.shapes import Shape, Work, cost_of, shape_of
from ..benchmark.speeds import find_card, read_card
from ..benchmark.timing import Budget, Variant, time_interleaved
from ..config import DEFAULT_DENSITY
from ..devices import FLOAT_TYPES
from ..files import written_aside
from ..reporting import html_table, require_matplotlib, times

MHLA, SPARSE = "MHLA", "MHLA, block-sparse"
"""As the demo's table names them."""
NAMES = (SOFTMAX, SPARSE, MHLA)
MODEL = "wan2.1-1.3b"
GRIDS = (
    (8, 12, 10),
    (8, 12, 20),
    (16, 12, 20),
    (16, 24, 20),
    (16, 24, 40),
    (32, 24, 40),
    (32, 48, 40),
    (32, 48, 80),
)
"""Token grids (F, Hg, Wg), from 960 tokens to 122,880, each of twice as many as the one before."""
_HEADS_ON_CPU = 4
_BUDGET = Budget(seconds=0.3, least=3, most=20)
"""Of each attention at each N."""
_WORK: dict[str, Work] = {SOFTMAX: "softmax", SPARSE: "sparse", MHLA: "linear"}
"""What each computes, by whose FLOPs the time of the next N is guessed."""
_STEADY = 0.25
"""Spread of repeated times, (80th − 20th percentile) / median, beyond which the machine was busy."""
_MARKS = {SOFTMAX: ("o", COLOURS[SOFTMAX]), SPARSE: ("s", COLOURS[CONTENT]), MHLA: ("^", COLOURS[MHLA])}

Curve = list[tuple[int, float]]
"""(N, seconds), by growing N."""


@dataclass(frozen=True)
class Growth:
    """Median times of one forward of each attention over N, on one device."""

    device: str
    dtype: str
    date: str
    heads: int
    curves: dict[str, Curve]
    """Attention, of ``NAMES`` → its times, all at the same N."""
    spread: float | None = None
    """The largest (80th − 20th percentile) / median; None where nobody noted it."""
    ended: str = ""
    """Why no larger N was measured."""


# ---- measure --------------------------------------------------------------------------------------------------------


def measure_growth(device: torch.device, seconds: float) -> Growth:
    """Time the attentions at one N after the other, at each in turns, until the next N would exceed the budget.

    The first N is measured whatever the budget. On a CPU in float32, elsewhere in bfloat16; softmax by PyTorch's
    choice of backend; all without RoPE. The sparse branch chooses its lists and fits β at every call.

    Args:
        device: where.
        seconds: that all of it may take.

    Raises:
        RuntimeError: an attention cannot run here, even at the smallest N.
    """
    started = time.perf_counter()
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    curves: dict[str, Curve] = {name: [] for name in NAMES}
    spread, ended = 0.0, "no larger one is tried"
    medians: dict[str, float] = {}
    heads = _HEADS_ON_CPU if device.type == "cpu" else models()[MODEL].heads
    model = replace(models()[MODEL], heads=heads)
    shapes = [shape_of(model, grid, f"{math.prod(grid):,} tokens") for grid in GRIDS]
    for before, shape in zip((None, *shapes), shapes, strict=False):
        if before and time.perf_counter() - started + _guess(medians, before, shape) > seconds:
            ended = f"the next would have exceeded the budget of {seconds:g} s"
            break
        variants: dict[str, Variant] = {**_attentions(shape, device, FLOAT_TYPES[dtype])}
        outcomes = time_interleaved(variants, device, _BUDGET)
        timings = {name: outcome.timing for name, outcome in outcomes.items() if outcome.timing is not None}
        if len(timings) < len(outcomes):
            missing = {name: one.reason or one.status for name, one in outcomes.items() if name not in timings}
            ended = f"at {shape.name}: {'; '.join(f'{name}: {why}' for name, why in missing.items())}"
            break
        for name, timing in timings.items():
            curves[name].append((shape.tokens, timing.median))
            spread = max(spread, (timing.p80 - timing.p20) / timing.median)
        medians = {name: timing.median for name, timing in timings.items()}
    if not medians:
        raise RuntimeError(f"Attention cannot be timed on {device} {ended}. Leave it out: --speed-seconds 0.")
    conditions = gather_conditions(device)
    return Growth(conditions.device, dtype, conditions.date, heads, curves, spread, ended)


def _guess(medians: Mapping[str, float], before: Shape, shape: Shape) -> float:
    """Seconds that a shape takes if time grows as FLOPs do; what is slow is warmed up once."""

    def growth(name: str) -> float:
        one, other = (cost_of(x, _WORK[name], itemsize=4, backward=False).flops for x in (before, shape))
        return other / one

    return (_BUDGET.least + 1) * sum(growth(name) * median for name, median in medians.items())


def _attentions(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Attention → its call, all of the same query, key and value."""
    inputs, backend = make_inputs(shape, device, dtype), fastest_backend(shape, device, dtype)
    mixing = initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1)
    linear_weight = branch_weights(shape.heads, device)["linear_weight"]
    rule = rule_of(shape, fit_pooled_bias=True)
    sparse = linear_attention(shape, inputs, backend, mixing, sparse=rule, linear_weight=linear_weight)
    query, key, value = (x.transpose(1, 2) for x in inputs)
    softmax = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value)
    linear = linear_attention(shape, inputs, backend, mixing)
    found: dict[str, Callable[[], torch.Tensor]] = {SOFTMAX: softmax, SPARSE: sparse, MHLA: linear}
    return {name: torch.no_grad()(found[name]) for name in NAMES}


def shipped_growth() -> Growth:
    """The same attentions on an H100, at Wan2.1-1.3B's own sizes, from the measurements that ship.

    Softmax by FlashAttention-3, the fastest there; the sparse branch is the version before this one, which alone was
    measured there.
    """
    kept = {SOFTMAX: f"{SOFTMAX} FlashAttention-3", SPARSE: f"{EARLIER[0]} triton", MHLA: f"{MHLA} triton"}
    alone = next(run for run in read_card(find_card("h100")) if run.command == "op")
    rows = [row for row in alone.rows if row.case.startswith(f"{MODEL}-") and row.stage == "forward"]
    curves: dict[str, Curve] = {
        name: sorted((row.tokens, row.median) for row in rows if row.variant == variant and row.tokens and row.median)
        for name, variant in kept.items()
    }
    return Growth(alone.conditions.device, rows[0].dtype, alone.conditions.date, models()[MODEL].heads, curves)


# ---- tell -----------------------------------------------------------------------------------------------------------


def crossing(growth: Growth, name: str) -> float | None:
    """N from which an attention takes less time than softmax, at every larger N that was measured.

    Between two N both times are taken to be straight lines in logarithms.

    Returns:
        N; the smallest that was measured if it takes less at all of them, None if not even at the largest.
    """
    ratios = [
        (math.log(n), math.log(own / softmax))
        for (n, softmax), (_, own) in zip(growth.curves[SOFTMAX], growth.curves[name], strict=True)
    ]
    if ratios[-1][1] >= 0:
        return None
    for (x0, y0), (x1, y1) in reversed(list(pairwise(ratios))):
        if y0 >= 0:
            return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
    return float(growth.curves[SOFTMAX][0][0])


def about(tokens: float) -> str:
    """N with two digits, such as ``"2,300"``."""
    return f"{int(float(f'{tokens:.2g}')):,}"


def tell_growth(growth: Growth) -> str:
    """Where each attention overtakes softmax and by how much, in sentences."""
    tokens = [n for n, _ in growth.curves[SOFTMAX]]
    clauses = []
    for name in (MHLA, SPARSE):
        at, factor = crossing(growth, name), growth.curves[SOFTMAX][-1][1] / growth.curves[name][-1][1]
        end = f"at {tokens[-1]:,} tokens"
        if at is None:
            clauses.append(
                f"{name} is not faster than softmax up to {tokens[-1]:,} tokens ({factor:.2g} times as fast)"
            )
        elif at == tokens[0]:
            first = growth.curves[SOFTMAX][0][1] / growth.curves[name][0][1]
            many = f", {first:.2g} times as fast at {tokens[0]:,} tokens" if len(tokens) > 1 else ""
            clauses.append(f"{name} is faster than softmax at every N measured{many} and {factor:.2g} times {end}")
        else:
            clauses.append(
                f"{name} overtakes softmax at about {about(at)} tokens and is {factor:.2g} times as fast {end}"
            )
    return f"{'; '.join(clauses)}."


def html_speed(here: Growth, shipped: Growth, picture: str) -> str:
    """The part of the page: sentences, the picture, which is HTML, and the times of this machine."""
    model = models()[MODEL]
    own = f"On this machine ({here.device}, {here.dtype}, {here.heads} heads), {tell_growth(here)}"
    if here.ended:
        own += f" N ends there: {here.ended}."
    if here.spread is not None and here.spread > _STEADY:
        own += f" The machine was busy: repeated times spread by up to {here.spread:.0%}, so the crossings are coarse."
    sizes = " and ".join(f"{n:,}" for n, _ in shipped.curves[SOFTMAX])
    card = (
        f"On one {shipped.device} ({shipped.dtype}, {shipped.heads} heads, {shipped.date}, measured at {sizes} tokens "
        f"only; softmax by FlashAttention-3, the sparse branch in the version before this one), {tell_growth(shipped)}"
    )
    remark = (
        f"One self-attention of {MODEL}, forward: as many of its heads of {model.head_dim} as are said, MHLA blocks "
        f"{times(model.blocks)}, density {DEFAULT_DENSITY:.0%}, blocks chosen at every call. At small N the "
        "states of all these blocks, made and mixed whatever N is, take most of MHLA's time. Crossings lie on straight "
        "lines between the N measured, in logarithms."
    )
    said = "".join(f"<p>{escape(text)}</p>" for text in (own, card, remark))
    header = ("tokens N", *(f"{name}, ms" for name in NAMES))
    rows = zip(*(here.curves[name] for name in NAMES), strict=True)
    table = html_table(
        header, ((f"{row[0][0]:,}", *(f"{_milliseconds(seconds)}" for _, seconds in row)) for row in rows)
    )
    return f"{said}{picture}{table}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def draw_growth(here: Growth, shipped: Growth, file: Path) -> None:
    """Milliseconds over N, this machine beside the card whose times ship; where a curve crosses softmax's is marked."""
    plt: Any = require_matplotlib()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), width_ratios=(3, 2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    remarks = "this machine", "block-sparse: version before"
    for axis, growth, remark in zip(axes, (here, shipped), remarks, strict=True):
        for name in NAMES:
            marker, colour = _MARKS[name]
            points = [(n, 1000 * seconds) for n, seconds in growth.curves[name]]
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name)
        logarithmic(axis)
        tokens = [n for n, _ in growth.curves[SOFTMAX]]
        axis.set_xscale("log")
        axis.set_xlim(tokens[0] / 1.3, tokens[-1] * 1.3)
        axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
        axis.minorticks_off()
        axis.set_xlabel("tokens N")
        axis.set_ylabel("ms per attention")
        axis.set_title(f"{growth.device}, {growth.dtype}\n{growth.heads} heads; {remark}", fontsize=10, loc="left")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        _mark_crossings(axis, growth)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=130)
    plt.close(figure)


def _mark_crossings(axis: Any, growth: Growth) -> None:
    """A ring around each crossing between two N, and a line down to its N."""
    softmax = growth.curves[SOFTMAX]
    for name in (SPARSE, MHLA):
        at = crossing(growth, name)
        if at is None or at == softmax[0][0]:
            continue
        (x0, y0), (x1, y1) = next((one, other) for one, other in pairwise(softmax) if one[0] <= at <= other[0])
        height = 1000 * y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
        colour = _MARKS[name][1]
        axis.plot(at, height, marker="o", markersize=13, fillstyle="none", color=colour)
        axis.axvline(at, linestyle=":", color=colour, linewidth=1)
        axis.annotate(
            about(at),
            (at, 0.02),
            xycoords=axis.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
        )
