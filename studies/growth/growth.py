"""Time one self-attention of Wan2.1-1.3B over growing N on this machine, and find where the curves cross.

    python studies/growth/growth.py --output outputs/growth

A CPU computes 4 of its 12 heads: every head costs about the same, and the same seconds reach a larger N.
"""

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from mhla_diffusers.attention import initial_mixing, mhla_attention, sparse_attention
from mhla_diffusers.benchmark.cases import models
from mhla_diffusers.benchmark.measure import Row, Runs, gather_conditions, time_interleaved
from mhla_diffusers.devices import choose_device
from mhla_diffusers.files import write_json
from mhla_diffusers.reporting import require_matplotlib, text_table

SOFTMAX, SPARSE, MHLA = "softmax", "sparse attention", "MHLA"
_MARKS = {SOFTMAX: ("o", "#555555"), SPARSE: ("s", "#cc79a7"), MHLA: ("^", "#0072b2")}
GRIDS = (
    (8, 12, 10), (8, 12, 20), (16, 12, 20), (16, 24, 20), (16, 24, 40), (32, 24, 40), (32, 48, 40), (32, 48, 80)
)  # fmt: skip
"""Token grids (F, Hg, Wg), from 960 tokens to 122,880, each of twice as many as the one before."""


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

    def crossing(self, name: str) -> float | None:
        """Return N from which an attention takes less time than softmax, at every larger N that was measured.

        Between two N both times are taken to be straight lines in logarithms. The smallest N if it takes less at all
        of them, None if not even at the largest.
        """
        pairs = zip(self.curves[SOFTMAX], self.curves[name], strict=True)
        points = [(math.log(n), math.log(softmax / own)) for (n, softmax), (_, own) in pairs]
        if points[-1][1] <= 0:
            return None
        for (x0, y0), (x1, y1) in reversed(list(pairwise(points))):
            if y0 <= 0:
                return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        return float(self.curves[SOFTMAX][0][0])


def about(tokens: float) -> str:
    """Write N with two digits, such as ``"2,300"``."""
    return f"{int(float(f'{tokens:.2g}')):,}"


@torch.no_grad()
def measure_growth(device: torch.device, seconds: float) -> Growth:
    """Time the attentions at one N after the other, in turns at each, until the seconds are spent.

    On a CPU in float32, elsewhere in bfloat16; softmax by PyTorch's choice of backend; all without RoPE. Sparse
    attention sorts keys, chooses its lists and fits its weights at every call.
    """
    started, model, on_cpu = time.perf_counter(), models()["wan2.1-1.3b"], device.type == "cpu"
    heads, dtype = (4, torch.float32) if on_cpu else (model.heads, torch.bfloat16)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in _MARKS}
    spread, ended = 0.0, "no larger one is tried"
    for grid in GRIDS:
        tokens, blocks = math.prod(grid), tuple(map(min, model.blocks, grid))
        query, key, value = (torch.randn(1, tokens, heads, model.head_dim, device=device).to(dtype) for _ in range(3))
        mixing = initial_mixing(blocks).to(device).repeat(heads, 1, 1)
        softmax = torch.nn.functional.scaled_dot_product_attention
        runs: Runs = {
            Row(SOFTMAX): partial(softmax, *(x.transpose(1, 2) for x in (query, key, value))),
            Row(SPARSE): partial(sparse_attention, query, key, value, grid),
            Row(MHLA): partial(mhla_attention, query, key, value, mixing, grid, blocks),
        }
        rows = {row.variant: row for row in time_interleaved(runs, device, 0.3, most=20)}
        missing = [f"{name}: {row.reason}" for name, row in rows.items() if row.median is None]
        if missing:
            ended = f"at {tokens:,} tokens: {'; '.join(missing)}"
            break
        for name, row in rows.items():
            median, low, high = row.median or math.nan, row.p20 or math.nan, row.p80 or math.nan
            curves[name].append((tokens, median))
            spread = max(spread, (high - low) / median)
        if time.perf_counter() - started > seconds:
            ended = f"{seconds:g} s are spent"
            break
    conditions = gather_conditions(device)
    dtype_name = str(dtype).removeprefix("torch.")
    return Growth(conditions["device"], dtype_name, conditions["date"], heads, curves, spread, ended)


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
            place = at, 0.02 if name == MHLA else 0.08  # one above the other, since the curves may cross close together
            axis.annotate(about(at), place, xycoords=axis.get_xaxis_transform(), color=colour, fontweight="bold")
    axis.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="ms per attention")
    axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axis.minorticks_off()
    axis.set_title(f"{growth.device}, {growth.dtype}, {growth.heads} heads", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write ``growth.json`` and ``growth.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/growth"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=40.0, help="after which no larger N is tried")
    given = parser.parse_args(arguments)
    growth = measure_growth(choose_device(given.device), given.seconds)
    write_json(asdict(growth), given.output / "growth.json")
    rows = [[name, *(f"{1000 * x:,.0f}" for _, x in growth.curves[name])] for name in _MARKS]
    header = ["ms at N", *(f"{n:,}" for n, _ in growth.curves[SOFTMAX])]
    lines = [text_table(header, rows, right=True)]
    for name in (SPARSE, MHLA):
        at = growth.crossing(name)
        lines.append(f"{name} overtakes softmax at {'no N measured' if at is None else f'about {about(at)} tokens'}.")
    sys.stdout.write(
        "\n".join([*lines, f"Spread of times: {growth.spread:.0%}; it ended there: {growth.ended}."]) + "\n"
    )
    draw_growth(growth, given.output / "growth.png")


if __name__ == "__main__":
    main()
