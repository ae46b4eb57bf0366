"""Plots of several runs, and one HTML page that holds everything."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_text
from ..reporting import html_media, html_page, html_table, html_table_of, require_matplotlib
from .operation import GIVEN, LISTED, SOFTMAX, fitted_exponent, mixing_overhead
from .results import COMPILED, CONTENT, EARLIER, HYBRID, PLAIN, WORDS, Row, Run, read_runs

Figure = Any
COLOURS = {
    SOFTMAX: "#555555",
    "own linear": "#009e73",
    "own gated linear": "#009e73",
    PLAIN: "#e69f00",
    HYBRID: "#56b4e9",
    "MHLA": "#0072b2",
    CONTENT: "#cc79a7",
    GIVEN: "#e5b8d0",
    EARLIER[1]: "#999933",
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
_GROUPS = (SOFTMAX, HYBRID, CONTENT, GIVEN, EARLIER[1], "MHLA", LISTED, PLAIN)


# ---- the page -------------------------------------------------------------------------------------------------------


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Draw everything in some folders of results: plots in ``output/{device}/plots``, and ``output/report.html``.

    Args:
        folders: of ``mhla bench``; each with results, or with folders that have them.
        output: where to.

    Returns:
        The page.

    Raises:
        OSError: no results there, or ``output`` cannot be written.
        ValueError: a file is no result.
        ImportError: matplotlib is missing.
    """
    for folder in folders:
        if not read_runs([folder]):
            raise OSError(f"{folder} holds no results; write some with mhla bench all --output {folder}.")
    runs = read_runs(folders)
    require_matplotlib()
    devices = list(dict.fromkeys(run.conditions.device for run in runs))
    body = (
        "<p>Variants of a case were timed in turns; times are medians. Ratios are to the fastest baseline of the same "
        "case in the same run: exact softmax attention, or the model's own where that is linear. Fractions are of the "
        "rates that were measured on the device in the same run.</p>"
    )
    if len(devices) > 1:
        heading = "The fastest MHLA variant against the fastest baseline"
        body += f"<h2>All devices</h2>{_shown(draw_together(runs), output / 'devices.svg', heading)}"
    for device in devices:
        mine = [run for run in runs if run.conditions.device == device]
        body += f"<h2>{escape(device)}</h2>" + "".join(_section(run, output) for run in mine)
    page = output / "report.html"
    write_text(html_page("MHLA against softmax attention", body), page)
    return page


def _shown(figure: Figure | None, file: Path, heading: str) -> str:
    """A figure as HTML, also written as SVG and PNG; empty if there is nothing to draw."""
    if figure is None:
        return ""
    file.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".svg", ".png"):
        figure.savefig(file.with_suffix(suffix), dpi=130)
    require_matplotlib().close(figure)
    return f"<h4>{escape(heading)}</h4>{html_media(file, heading)}"


def _section(run: Run, output: Path) -> str:
    plots = output / run.conditions.folder_name / "plots"
    figures = FIGURES[run.command].items()
    images = "".join(_shown(draw(run), plots / f"{name}.svg", heading) for name, (heading, draw) in figures)
    tables, rows = "", [row for row in run.rows if row.part is None]
    for case in dict.fromkeys(row.case for row in rows):
        header, texts = run.table([row for row in rows if row.case == case])
        lines = [
            [
                f'<div style="text-align: left">{escape(text)}</div>' if column in WORDS else escape(text)
                for column, text in zip(header, line, strict=True)
            ]
            for line in texts
        ]
        tables += f"<h4>{escape(case)}</h4>{html_table_of(header, lines)}"
    conditions, rates = run.conditions, run.rates
    facts = {
        "device": conditions.device,
        "driver": conditions.driver,
        "CUDA or ROCm": conditions.toolkit,
        "Python": conditions.python,
        "versions": ", ".join(f"{name} {version}" for name, version in conditions.versions.items()),
        "commit": conditions.commit,
        "CPU threads": None if conditions.threads is None else str(conditions.threads),
        "date (UTC)": conditions.date,
        "command": conditions.command,
        "matrix products": f"{rates.matmul / 1e12:.3g} TFLOP/s in {rates.matmul_dtype}, measured",
        "copying": f"{rates.copy / 1e9:.3g} GB/s read and written, measured",
    }
    told = html_table(("condition", "value"), [(name, text) for name, text in facts.items() if text])
    return (
        f"<h3>{escape(run.command)}</h3>{images}"
        f'<details><summary>Tables</summary><div style="overflow-x: auto">{tables}</div></details>'
        f"<details><summary>Conditions</summary>{told}</details>"
    )


def draw_together(runs: Sequence[Run]) -> Figure | None:
    """How many times faster MHLA is than the fastest baseline, for every case that several devices have."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        for row in run.rows:
            ratio = run.times_baseline(row)
            if ratio is not None and row.variant.startswith("MHLA") and row.part is None:
                best = found.setdefault(f"{row.case}, {row.stage}", {})
                best[run.conditions.device] = max(ratio, best.get(run.conditions.device, 0.0))
    shared = {case: ratios for case, ratios in found.items() if len(ratios) > 1}
    if not shared:
        return None
    devices = list(dict.fromkeys(run.conditions.device for run in runs))
    thickness = 0.8 / len(devices)
    size = (9, 1.4 + 0.3 * len(shared) * len(devices))
    figure, axis = require_matplotlib().subplots(figsize=size, layout="constrained")
    colours = list(dict.fromkeys(COLOURS.values()))
    for index, device in enumerate(devices):
        places = [place + index * thickness for place in range(len(shared))]
        values = [ratios.get(device, 0.0) for ratios in shared.values()]
        bars = axis.barh(places, values, thickness, label=device, color=colours[index % len(colours)])
        axis.bar_label(bars, [f"{x:.2g}" if x else "" for x in values], padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks([place + 0.4 - thickness / 2 for place in range(len(shared))], list(shared))
    axis.set_ylim(len(shared) - 0.2, -0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("times the speed of the fastest baseline on the same device")
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    return figure


# ---- figures of one run: from a run to a matplotlib figure, or None where there is nothing to draw ------------------


def group_of(variant: str) -> str:
    """Display group of a variant, without what is added to its attention: all softmax backends are one group."""
    name = variant.partition(" + ")[0]
    return next((group for group in _GROUPS if name.startswith(group)), name)


def colour_of(variant: str) -> str:
    """Of a variant or part."""
    return COLOURS.get(group_of(variant), "#cccccc")


def fastest_by_group(rows: Sequence[Row]) -> dict[str, Row]:
    """Group → its fastest measured row: of the softmax backends the best is shown.

    Variants with an addition, such as compiled ones, are groups apart.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if row.median is None or row.layers == 0:
            continue
        _, plus, added = row.variant.partition(" + ")
        name = group_of(row.variant) + plus + added
        if name not in best or row.median < (best[name].median or 0):
            best[name] = row
    order = {name: place for place, name in enumerate(COLOURS)}
    return dict(sorted(best.items(), key=lambda item: order.get(group_of(item[0]), 0)))


def _make_panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of panels, two in a row."""
    columns = min(count, 2)
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


def _thousands(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _milliseconds(row: Row) -> float:
    return 1000 * (row.median or 0)


def _measured(run: Run) -> list[Row]:
    return [row for row in run.rows if row.median is not None]


def _bars(panels: list[tuple[str, list[Row]]]) -> Figure | None:
    """Horizontal bars of milliseconds with their values, on a logarithmic axis where they differ much."""
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    figure, axes = _make_panels(len(panels), width=6.2, height=1.1 + 0.3 * max(len(rows) for _, rows in panels))
    for axis, (title, rows) in zip(axes, panels, strict=True):
        values = [_milliseconds(row) for row in rows]
        bars = axis.barh([row.variant for row in rows], values, color=[colour_of(row.variant) for row in rows])
        if max(values) > 20 * min(values):
            axis.set_xscale("log")
            axis.set_xlim(min(values) / 2, max(values) * 4)
        else:
            axis.set_xlim(0, max(values) * 1.2)
        axis.bar_label(bars, [f"{x:.3g}" for x in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("milliseconds")
    return figure


def draw_operations(run: Run) -> Figure | None:
    """Milliseconds of every variant, a panel per shape and stage."""
    keys = dict.fromkeys((row.case, row.stage) for row in run.rows)
    return _bars([(", ".join(key), [row for row in _measured(run) if (row.case, row.stage) == key]) for key in keys])


def draw_steps(run: Run) -> Figure | None:
    """Milliseconds of a training step, a panel per case."""
    cases = dict.fromkeys(row.case for row in run.rows)
    return _bars([(case, list(fastest_by_group([x for x in run.rows if x.case == case]).values())) for case in cases])


def draw_growth(run: Run) -> Figure | None:
    """Milliseconds and, where they were measured, GiB over N."""
    rows = _measured(run)
    if not rows:
        return None
    panels: list[tuple[str, Callable[[Row], float | None]]] = [("milliseconds", _milliseconds)]
    if any(row.peak_bytes for row in rows):
        panels.append(("peak memory, GiB", lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**30))
    figure, axes = _make_panels(len(panels), width=6.2, height=4.2)
    counts = sorted({row.blocks for row in rows if row.blocks and row.blocks > 1})
    tokens = sorted({row.tokens for row in rows if row.tokens})
    for axis, (label, value) in zip(axes, panels, strict=True):
        for variant in dict.fromkeys(row.variant for row in rows):
            mine = [row for row in rows if row.variant == variant]
            points = [(row.tokens, y) for row in mine if (y := value(row)) is not None]
            exponent = fitted_exponent(rows, variant) if label == "milliseconds" else None
            name = variant if exponent is None else f"{variant}, ~N^{exponent:.2f}"
            style = {"color": colour_of(variant), "linestyle": "--"}
            if mine[0].blocks in counts:  # more blocks are a darker blue
                shade = 0.35 + 0.6 * (counts.index(mine[0].blocks or 0) + 1) / len(counts)
                style = {"color": require_matplotlib().get_cmap("Blues")(shade)}
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [_thousands(n) for n in tokens], fontsize=8)
        axis.minorticks_off()
        logarithmic(axis)
        axis.set_xlabel("tokens N")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def draw_overhead(run: Run) -> Figure | None:
    """What mixing adds to plain linear attention, over N and M; cells with M² > N are hatched."""
    found = {(row.blocks, row.tokens): mixing_overhead(run, row) for row in run.rows}
    cells = {(m, n): 100 * value for (m, n), value in found.items() if m and n and value is not None}
    if not cells:
        return None
    plt = require_matplotlib()
    counts, tokens = (sorted({key[place] for key in cells}) for place in (0, 1))
    figure, axis = plt.subplots(figsize=(1.6 + 1.05 * len(tokens), 1.6 + 0.6 * len(counts)), layout="constrained")
    grid = [[cells.get((m, n), float("nan")) for n in tokens] for m in counts]
    image = axis.imshow(grid, cmap="Blues", vmin=0, vmax=min(max(100.0, *cells.values()), 300), aspect="auto")
    for y, m in enumerate(counts):
        for x, n in enumerate(tokens):
            if (m, n) in cells:
                value = cells[m, n]
                axis.text(x, y, f"{value:+.0f} %", ha="center", va="center", color="white" if value > 150 else "black")
            if m**2 > n:
                corner = (x - 0.5, y - 0.5)
                axis.add_patch(plt.Rectangle(corner, 1, 1, fill=False, hatch="///", edgecolor="#00000030", lw=0))
    axis.set_xticks(range(len(tokens)), [_thousands(n) for n in tokens])
    axis.set_yticks(range(len(counts)), [str(m) for m in counts])
    axis.set_xlabel("tokens N")
    axis.set_ylabel("token blocks M")
    figure.colorbar(image, ax=axis, label="% beyond plain linear")
    return figure


def _lines(
    run: Run,
    panel: Callable[[Row], str],
    key: Callable[[Row], int],
    label: Callable[[Row], str],
    value: Callable[[Row], float | None],
    names: tuple[str, str],
) -> Figure | None:
    """A line per attention over evenly spaced places, on a logarithmic axis, a panel per model.

    Args:
        run: of whole models.
        panel: title of the panel of a row; a row without one is left out.
        key: what orders the rows of a panel; panels of one place are left out.
        label: of a place.
        value: what is drawn.
        names: of the axes.
    """
    panels: dict[str, list[Row]] = {}
    for row in _measured(run):
        if row.model is not None and row.stage == "forward" and panel(row):
            panels.setdefault(panel(row), []).append(row)
    panels = {title: rows for title, rows in panels.items() if len({key(row) for row in rows}) > 1}
    if not panels:
        return None
    figure, axes = _make_panels(len(panels), width=5.6, height=3.6)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        places = {number: place for place, number in enumerate(sorted({key(row) for row in rows}))}
        lines: dict[str, list[tuple[int, float]]] = {}
        for number, place in places.items():
            for name, row in fastest_by_group([row for row in rows if key(row) == number]).items():
                if (y := value(row)) is not None:
                    lines.setdefault(name, []).append((place, y))
        for name, points in lines.items():
            style = ":" if name.endswith(COMPILED) else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colour_of(name), label=name)
        labels = {places[key(row)]: label(row) for row in rows}
        axis.set_xticks(list(labels), list(labels.values()))
        logarithmic(axis)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(names[0])
        axis.set_ylabel(names[1])
        axis.grid(alpha=0.25, which="both", axis="y")
        axis.legend(frameon=False, fontsize=8)
    return figure


def draw_throughput(run: Run) -> Figure | None:
    """Forwards per second against resolution, of the most frames, a panel per model."""
    longest: dict[str | None, int] = {}
    for row in _measured(run):
        longest[row.model] = max(longest.get(row.model, 0), row.frames or 0)
    return _lines(
        run,
        panel=lambda row: row.model or "" if (row.frames or 0) == longest[row.model] else "",
        key=lambda row: (row.height or 0) * (row.width or 0),
        label=lambda row: f"{row.height}" if row.height == row.width else f"{row.height}x{row.width}",
        value=lambda row: row.samples_per_second,
        names=("pixels", "samples per second"),
    )


def draw_frames(run: Run) -> Figure | None:
    """Seconds of a forward against frames, a panel per model and size."""
    return _lines(
        run,
        panel=lambda row: "" if row.frames is None else f"{row.model} {row.height}x{row.width}",
        key=lambda row: row.frames or 0,
        label=lambda row: str(row.frames),
        value=lambda row: row.whole_seconds,
        names=("frames", "seconds per forward"),
    )


def draw_parts(run: Run) -> Figure | None:
    """Milliseconds of each part, a panel per case, one bar per attention that is not compiled; of softmax the best."""
    rows = [row for row in _measured(run) if row.part is not None]
    cases = list(dict.fromkeys(row.case for row in rows))
    if not cases:
        return None
    parts = list(dict.fromkeys(row.part for row in rows if row.part is not None))
    chosen = {}
    for case in cases:
        best = fastest_by_group([row for row in run.rows if row.case == case and row.part is None])
        chosen[case] = [row.variant for name, row in best.items() if not name.endswith(COMPILED)]
    figure, axes = _make_panels(len(cases), width=6.2, height=1.4 + 0.36 * max(len(shown) for shown in chosen.values()))
    for axis, case in zip(axes, cases, strict=True):
        medians = {(row.variant, row.part): _milliseconds(row) for row in rows if row.case == case}
        shown = [variant for variant in chosen[case] if (variant, parts[0]) in medians]
        left = [0.0] * len(shown)
        for part in parts:
            widths = [max(0.0, medians.get((variant, part), 0.0)) for variant in shown]
            axis.barh(shown, widths, left=left, label=part, color=COLOURS[part], edgecolor="white", linewidth=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_title(case, fontsize=10, loc="left")
        axis.set_xlabel("milliseconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


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
