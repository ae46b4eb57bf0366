"""Is it fast here? Attention timed over growing N on this machine, where the curves cross, and a picture of it.

The attention is that of Wan2.1-1.3B by itself. A CPU computes 4 of its 12 heads: every head costs about the same, and
the same seconds reach a larger N.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..attention import initial_mixing, mhla_attention, sparse_attention
from ..benchmark.cases import models
from ..benchmark.measure import Row, Runs, gather_conditions, time_interleaved
from ..config import SparseConfig
from ..files import written_aside
from ..reporting import html_table, require_matplotlib, times

SOFTMAX, SPARSE, MHLA = "softmax", "sparse attention", "MHLA"
"""As the demo's table names them."""
_MARKS = {SOFTMAX: ("o", "#555555"), SPARSE: ("s", "#cc79a7"), MHLA: ("^", "#0072b2")}
MODEL = "wan2.1-1.3b"
GRIDS = (
    (8, 12, 10), (8, 12, 20), (16, 12, 20), (16, 24, 20), (16, 24, 40), (32, 24, 40), (32, 48, 40), (32, 48, 80)
)  # fmt: skip
"""Token grids (F, Hg, Wg), from 960 tokens to 122,880, each of twice as many as the one before."""
_HEADS_ON_CPU = 4
_BUDGET: dict[str, Any] = {"seconds": 0.3, "least": 3, "most": 20}
"""Seconds and repetitions of each attention at each N."""
STEADY = 0.25
"""Spread of repeated times, (80th − 20th percentile) / median, beyond which the machine was busy."""


@dataclass(frozen=True)
class Growth:
    """Median times of one forward of each attention over N, on one device."""

    device: str
    dtype: str
    date: str
    heads: int
    curves: dict[str, list[tuple[int, float]]]
    """Attention → (N, seconds) by growing N, the same N for all."""
    spread: float
    """The largest (80th − 20th percentile) / median."""
    ended: str
    """Why no larger N was measured."""

    def speedups(self, name: str) -> list[tuple[int, float]]:
        """Return (N, how many times as fast as softmax an attention is)."""
        pairs = zip(self.curves[SOFTMAX], self.curves[name], strict=True)
        return [(n, softmax / own) for (n, softmax), (_, own) in pairs]

    def crossing(self, name: str) -> float | None:
        """Return N from which an attention takes less time than softmax, at every larger N that was measured.

        Between two N both times are taken to be straight lines in logarithms. The smallest N if it takes less at all
        of them, None if not even at the largest.
        """
        points = [(math.log(n), math.log(factor)) for n, factor in self.speedups(name)]
        if points[-1][1] <= 0:
            return None
        for (x0, y0), (x1, y1) in reversed(list(pairwise(points))):
            if y0 <= 0:
                return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        return float(self.curves[SOFTMAX][0][0])

    def __str__(self) -> str:
        """Say where each attention overtakes softmax, and how fast it is at the smallest and the largest N."""
        clauses = []
        for name in (MHLA, SPARSE):
            at, speedups = self.crossing(name), self.speedups(name)
            where = "at no N measured" if at is None else f"from about {about(at)} tokens on"
            ends = dict.fromkeys((speedups[0], speedups[-1]))
            factors = ", ".join(f"{factor:.2g} times as fast at {n:,} tokens" for n, factor in ends)
            clauses.append(f"{name} is faster than softmax {where} ({factors})")
        return f"{'; '.join(clauses)}."


def about(tokens: float) -> str:
    """Write N with two digits, such as ``"2,300"``."""
    return f"{int(float(f'{tokens:.2g}')):,}"


@torch.no_grad()
def measure_growth(device: torch.device, seconds: float) -> Growth:
    """Time the attentions at one N after the other, at each in turns, until the next N would exceed the budget.

    The first N is measured regardless of the budget. On a CPU in float32, elsewhere in bfloat16; softmax by PyTorch's
    choice of backend; all without RoPE. Sparse attention sorts keys, chooses its lists and fits its weights at
    every call.

    Args:
        device: where.
        seconds: that all of it may take.

    Raises:
        RuntimeError: an attention cannot run here, even at the smallest N.
    """
    started, model, on_cpu = time.perf_counter(), models()[MODEL], device.type == "cpu"
    heads, dtype = (_HEADS_ON_CPU, torch.float32) if on_cpu else (model.heads, torch.bfloat16)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in _MARKS}
    spread, ended, expected = 0.0, "no larger one is tried", 0.0
    for grid in GRIDS:
        if time.perf_counter() - started + expected > seconds and expected:
            ended = f"the next would have exceeded the budget of {seconds:g} s"
            break
        tokens, blocks = math.prod(grid), tuple(map(min, model.blocks, grid))
        query, key, value = (torch.randn(1, tokens, heads, model.head_dim, device=device).to(dtype) for _ in range(3))
        mixing = initial_mixing(blocks).to(device).repeat(heads, 1, 1)
        linear = partial(mhla_attention, query, key, value, mixing, grid, blocks)
        softmax = torch.nn.functional.scaled_dot_product_attention
        runs: Runs = {
            Row(SOFTMAX): partial(softmax, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
            Row(SPARSE): partial(sparse_attention, query, key, value, grid),
            Row(MHLA): linear,
        }
        rows = {row.variant: row for row in time_interleaved(runs, device, **_BUDGET)}
        missing = [f"{name}: {row.reason or row.status}" for name, row in rows.items() if row.median is None]
        if missing:
            ended = f"at {tokens:,} tokens: {'; '.join(missing)}"
            break
        expected = 0.0
        for name, row in rows.items():
            median = row.median or 0.0
            curves[name].append((tokens, median))
            spread = max(spread, row.spread)
            # twice the tokens take four times as long where pairs of them are weighed; each run is warmed up once
            expected += (_BUDGET["least"] + 1) * median * (2 if name == MHLA else 4)
    if not curves[MHLA]:
        raise RuntimeError(f"Attention cannot be timed on {device} {ended}. Leave it out: --speed-seconds 0.")
    conditions = gather_conditions(device)
    name, date = conditions["device"], conditions["date"]
    return Growth(name, str(dtype).removeprefix("torch."), date, heads, curves, spread, ended)


def html_speed(here: Growth, picture: str) -> str:
    """Write the part of the page: sentences, the picture, which is HTML, and the times of this machine."""
    own = f"On this machine ({here.device}, {here.dtype}, {here.heads} heads), {here} N ends there: {here.ended}."
    if here.spread > STEADY:
        own += f" The machine was busy: repeated times spread by up to {here.spread:.0%}, so the crossings are coarse."
    remark = (
        f"One self-attention of {MODEL}, forward: as many of its heads of {models()[MODEL].head_dim} as are said, MHLA "
        f"blocks {times(models()[MODEL].blocks)}, density {SparseConfig.density:.1%}, blocks chosen at every call. At "
        "small N the states of all these blocks, made and mixed for any N, take most of MHLA's time. Crossings lie "
        "on straight lines between the N measured, in logarithms."
    )
    rows = [
        (f"{row[0][0]:,}", *(f"{1000 * one:.3g}" if one < 1 else f"{1000 * one:,.0f}" for _, one in row))
        for row in zip(*(here.curves[name] for name in _MARKS), strict=True)
    ]
    sentences = "".join(f"<p>{escape(text)}</p>" for text in (own, remark))
    return f"{sentences}{picture}{html_table(('tokens N', *(f'{name}, ms' for name in _MARKS)), rows)}"


def draw_growth(growth: Growth, file: Path) -> None:
    """Draw milliseconds over N; a line marks where a curve crosses that of softmax."""
    plt = require_matplotlib()
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    tokens = [n for n, _ in growth.curves[SOFTMAX]]
    for name, (marker, colour) in _MARKS.items():
        points = [(n, 1000 * seconds) for n, seconds in growth.curves[name]]
        axis.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name)
        at = None if name == SOFTMAX else growth.crossing(name)
        if at is not None and at > tokens[0]:
            axis.axvline(at, linestyle=":", color=colour, linewidth=1)
            place = {"xytext": (3, 3), "textcoords": "offset points", "xycoords": axis.get_xaxis_transform()}
            axis.annotate(about(at), (at, 0), color=colour, fontweight="bold", **place)
    axis.set(xscale="log", yscale="log", xlim=(tokens[0] / 1.3, tokens[-1] * 1.3), xlabel="tokens N")
    axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("ms per attention")
    axis.set_title(f"{growth.device}, {growth.dtype}, {growth.heads} heads", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=130)
    plt.close(figure)
