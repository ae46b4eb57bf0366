"""Figures of one run: functions from a run to a matplotlib figure, or None where there is nothing to draw."""

from collections.abc import Callable, Sequence
from typing import Any

from ..reporting import require_matplotlib
from .candidates import COMPILED
from .panels import (
    COLOURS,
    Figure,
    bar_panels,
    colour_of,
    fastest_by_group,
    legend_below,
    line_panels,
    logarithmic,
    make_panels,
    thousands,
)
from .results import Row, Run
from .scaling import SOFTMAX, fitted_exponent, mixing_overhead


def draw_operations(run: Run) -> Figure | None:
    """Milliseconds of every variant, a panel per shape and stage."""
    panels = [
        (f"{case}, {stage}", rows)
        for case in _cases(run)
        for stage in ("forward", "forward+backward")
        if (rows := [row for row in _measured(run) if (row.case, row.stage) == (case, stage)])
    ]
    return bar_panels(panels, "milliseconds", lambda row: 1000 * (row.median or 0))


def draw_growth(run: Run) -> Figure | None:
    """Milliseconds and, where they were measured, GiB over N."""
    rows = _measured(run)
    if not rows:
        return None
    panels: list[tuple[str, Callable[[Row], float | None]]] = [("milliseconds", lambda row: 1000 * (row.median or 0))]
    if any(row.peak_bytes for row in rows):
        panels.append(("peak memory, GiB", lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**30))
    figure, axes = make_panels(len(panels), width=6.2, height=4.2)
    counts = sorted({row.blocks for row in rows if row.blocks and row.blocks > 1})
    for axis, (label, value) in zip(axes, panels, strict=True):
        for variant in dict.fromkeys(row.variant for row in rows):
            mine = [row for row in rows if row.variant == variant]
            points = [(row.tokens, y) for row in mine if (y := value(row)) is not None]
            if points:
                exponent = fitted_exponent(rows, variant) if label == "milliseconds" else None
                name = variant if exponent is None else f"{variant}, ~N^{exponent:.2f}"
                axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **_line(mine[0], counts))
        axis.set_xscale("log", base=2)
        tokens = sorted({row.tokens for row in rows if row.tokens})
        axis.set_xticks(tokens, [thousands(n) for n in tokens], fontsize=8)
        axis.minorticks_off()
        logarithmic(axis)
        axis.set_xlabel("tokens N")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _line(row: Row, counts: Sequence[int]) -> dict[str, Any]:
    """Colour of a line; more blocks are a darker blue."""
    if row.variant == SOFTMAX or row.blocks == 1:
        return {"color": colour_of(row.variant), "linestyle": "--"}
    shade = 0.35 + 0.6 * (counts.index(row.blocks or 0) + 1) / len(counts)
    return {"color": require_matplotlib().get_cmap("Blues")(shade)}


def draw_overhead(run: Run) -> Figure | None:
    """What mixing adds to plain linear attention, over N and M; cells with M² > N are hatched."""
    found = {(row.blocks, row.tokens): mixing_overhead(run, row) for row in run.rows}
    cells = {(m, n): value for (m, n), value in found.items() if m and n and value is not None}
    if not cells:
        return None
    plt = require_matplotlib()
    counts, tokens = (sorted({key[place] for key in cells}) for place in (0, 1))
    figure, axis = plt.subplots(figsize=(1.6 + 1.05 * len(tokens), 1.6 + 0.6 * len(counts)), layout="constrained")
    grid = [[100 * cells.get((m, n), float("nan")) for n in tokens] for m in counts]
    highest = max(100.0, *(value for line in grid for value in line if value == value))
    image = axis.imshow(grid, cmap="Blues", vmin=0, vmax=min(highest, 300), aspect="auto")
    for y, m in enumerate(counts):
        for x, n in enumerate(tokens):
            if (m, n) in cells:
                value = grid[y][x]
                axis.text(x, y, f"{value:+.0f} %", ha="center", va="center", color="white" if value > 150 else "black")
            if m**2 > n:
                axis.add_patch(
                    plt.Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor="#00000030", lw=0)
                )
    axis.set_xticks(range(len(tokens)), [thousands(n) for n in tokens])
    axis.set_yticks(range(len(counts)), [str(m) for m in counts])
    axis.set_xlabel("tokens N")
    axis.set_ylabel("token blocks M")
    figure.colorbar(image, ax=axis, label="% beyond plain linear")
    return figure


def draw_throughput(run: Run) -> Figure | None:
    """Forwards per second against resolution, a panel per model."""
    longest = {model: max((row.frames or 0 for row in rows), default=0) for model, rows in _by_model(run).items()}
    panels = {
        model: [row for row in rows if (row.frames or 0) == longest[model]] for model, rows in _by_model(run).items()
    }
    panels = {model: rows for model, rows in panels.items() if len({_pixels(row) for row in rows}) > 1}
    return line_panels(
        panels,
        key=_pixels,
        label=lambda row: f"{row.height}" if row.height == row.width else f"{row.height}x{row.width}",
        value=lambda row: row.samples_per_second,
        xlabel="pixels",
        ylabel="samples per second",
    )


def draw_frames(run: Run) -> Figure | None:
    """Seconds of a forward against frames, a panel per model and size."""
    panels: dict[str, list[Row]] = {}
    for model, rows in _by_model(run).items():
        for row in rows:
            if row.frames is not None:
                panels.setdefault(f"{model} {row.height}x{row.width}", []).append(row)
    panels = {name: rows for name, rows in panels.items() if len({row.frames for row in rows}) > 1}
    return line_panels(
        panels,
        key=lambda row: row.frames or 0,
        label=lambda row: str(row.frames),
        value=lambda row: row.whole_seconds,
        xlabel="frames",
        ylabel="seconds per forward",
    )


def draw_parts(run: Run) -> Figure | None:
    """Milliseconds of each part, a panel per case, one bar per attention."""
    rows = [row for row in _measured(run) if row.part is not None]
    cases = list(dict.fromkeys(row.case for row in rows))
    if not cases:
        return None
    parts = list(dict.fromkeys(row.part for row in rows if row.part is not None))
    chosen = {case: _shown_variants(run, case) for case in cases}
    figure, axes = make_panels(len(cases), width=6.2, height=1.4 + 0.36 * max(len(shown) for shown in chosen.values()))
    for axis, case in zip(axes, cases, strict=True):
        medians = {(row.variant, row.part): 1000 * (row.median or 0) for row in rows if row.case == case}
        shown = [variant for variant in chosen[case] if (variant, parts[0]) in medians]
        left = [0.0] * len(shown)
        for part in parts:
            widths = [max(0.0, medians.get((variant, part), 0.0)) for variant in shown]
            axis.barh(shown, widths, left=left, label=part, color=COLOURS[part], edgecolor="white", linewidth=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_title(case, fontsize=10, loc="left")
        axis.set_xlabel("milliseconds")
    legend_below(figure, axes[0])
    return figure


def draw_steps(run: Run) -> Figure | None:
    """Milliseconds of a training step, a panel per case."""
    panels = [
        (case, list(fastest_by_group([row for row in run.rows if row.case == case]).values())) for case in _cases(run)
    ]
    return bar_panels([panel for panel in panels if panel[1]], "milliseconds", lambda row: 1000 * (row.median or 0))


def _shown_variants(run: Run, case: str) -> list[str]:
    """The fastest softmax, and everything else that is not compiled."""
    rows = [row for row in run.rows if row.case == case and row.part is None]
    return [row.variant for name, row in fastest_by_group(rows).items() if not name.endswith(COMPILED)]


def _measured(run: Run) -> list[Row]:
    return [row for row in run.rows if row.median is not None]


def _cases(run: Run) -> list[str]:
    return list(dict.fromkeys(row.case for row in run.rows))


def _by_model(run: Run) -> dict[str, list[Row]]:
    """Model → its rows of whole forwards."""
    found: dict[str, list[Row]] = {}
    for row in _measured(run):
        if row.model is not None and row.stage == "forward":
            found.setdefault(row.model, []).append(row)
    return found


def _pixels(row: Row) -> int:
    return (row.height or 0) * (row.width or 0)


FIGURES: dict[str, dict[str, tuple[str, Callable[[Run], Figure | None]]]] = {
    "op": {"op": ("Time of one attention", draw_operations)},
    "scaling": {
        "scaling": ("Growth with the number of tokens", draw_growth),
        "mixing": ("What mixing adds to plain linear attention; hatched where M² > N", draw_overhead),
    },
    "transformer": {
        "throughput": ("Throughput against resolution", draw_throughput),
        "frames": ("Time against frames", draw_frames),
        "parts": ("Where the time of a forward goes", draw_parts),
    },
    "train": {"train": ("Time of a training step", draw_steps)},
    "pipeline": {"pipeline": ("Where the time of a call goes", draw_parts)},
}
"""Command → file name → (heading, what draws it)."""
