"""What figures are drawn with: panels of bars and of lines, and which results share a colour."""

from collections.abc import Callable, Sequence
from typing import Any

from ..reporting import require_matplotlib
from .candidates import COMPILED, CONTENT, HYBRID, PLAIN
from .operation import GIVEN, LISTED
from .results import Row
from .scaling import SOFTMAX

Figure = Any
EARLIER = "MHLA, exact tiles"
"""In results of the sparse branch before this one."""
COLOURS = {
    SOFTMAX: "#555555",
    "own linear": "#009e73",
    "own gated linear": "#009e73",
    PLAIN: "#e69f00",
    HYBRID: "#56b4e9",
    "MHLA": "#0072b2",
    CONTENT: "#cc79a7",
    GIVEN: "#e5b8d0",
    EARLIER: "#999933",
    LISTED: "#d55e00",
    "unpatched": "#555555",
    "self-attention": "#0072b2",
    "projections": "#56b4e9",
    "cross-attention": "#e69f00",
    "feed-forward": "#009e73",
    "text encoding": "#e69f00",
    "denoising": "#0072b2",
    "VAE": "#009e73",
    "rest": "#cccccc",
}
"""Of variants and parts; told apart by colour-blind people too."""
_COLUMNS = 2


def group_of(variant: str) -> str:
    """What a variant is drawn as: all softmax backends are one."""
    name = variant.removesuffix(COMPILED)
    return next(
        (
            group
            for group in (SOFTMAX, HYBRID, CONTENT, GIVEN, EARLIER, "MHLA", LISTED, PLAIN)
            if name.startswith(group)
        ),
        name,
    )


def colour_of(variant: str) -> str:
    """Of a variant or part."""
    return COLOURS.get(group_of(variant), "#cccccc")


def fastest_by_group(rows: Sequence[Row]) -> dict[str, Row]:
    """Group → its fastest measured row, compiled variants apart: of the softmax backends the best is shown."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.median is None or row.layers == 0:
            continue
        compiled = COMPILED if row.variant.endswith(COMPILED) else ""
        name = group_of(row.variant) + compiled
        if name not in best or row.median < (best[name].median or 0):
            best[name] = row
    order = list(COLOURS)
    return dict(
        sorted(best.items(), key=lambda item: order.index(group_of(item[0])) if group_of(item[0]) in order else 0)
    )


def bar_panels(panels: list[tuple[str, list[Row]]], label: str, value: Callable[[Row], float]) -> Figure | None:
    """Horizontal bars with their values, on a logarithmic axis where they differ much."""
    if not panels:
        return None
    figure, axes = make_panels(len(panels), width=6.2, height=1.1 + 0.3 * max(len(rows) for _, rows in panels))
    for axis, (title, rows) in zip(axes, panels, strict=True):
        values = [value(row) for row in rows]
        bars = axis.barh([row.variant for row in rows], values, color=[colour_of(row.variant) for row in rows])
        if max(values) > 20 * min(values):
            axis.set_xscale("log")
            axis.set_xlim(min(values) / 2, max(values) * 4)
        else:
            axis.set_xlim(0, max(values) * 1.2)
        axis.bar_label(bars, [f"{x:.3g}" for x in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(label)
    return figure


def line_panels(
    panels: dict[str, list[Row]],
    key: Callable[[Row], int],
    label: Callable[[Row], str],
    value: Callable[[Row], float | None],
    xlabel: str,
    ylabel: str,
) -> Figure | None:
    """A line per attention over evenly spaced places, on a logarithmic axis."""
    if not panels:
        return None
    figure, axes = make_panels(len(panels), width=5.6, height=3.6)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        places = {number: place for place, number in enumerate(sorted({key(row) for row in rows}))}
        lines: dict[str, list[tuple[int, float]]] = {}
        for number, place in places.items():
            for name, row in fastest_by_group([row for row in rows if key(row) == number]).items():
                y = value(row)
                if y is not None:
                    lines.setdefault(name, []).append((place, y))
        for name, points in lines.items():
            style = ":" if name.endswith(COMPILED) else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colour_of(name), label=name)
        labels = {places[key(row)]: label(row) for row in rows}
        axis.set_xticks(list(labels), list(labels.values()))
        logarithmic(axis)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.25, which="both", axis="y")
        axis.legend(frameon=False, fontsize=8)
    return figure


def make_panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of panels, two in a row."""
    columns = min(count, _COLUMNS)
    lines = -(-count // columns)
    figure, axes = require_matplotlib().subplots(
        lines, columns, figsize=(width * columns, height * lines), layout="constrained", squeeze=False
    )
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def logarithmic(axis: Any) -> None:
    """A logarithmic y axis whose ticks are written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def thousands(number: int) -> str:
    """With a space between thousands."""
    return f"{number:,}".replace(",", " ")


def legend_below(figure: Figure, axis: Any) -> None:
    """One legend for all panels, of the labels of one of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
