"""Plots of several runs, and one HTML page that holds everything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_text
from ..reporting import html_media, html_page, html_table, html_table_of, require_matplotlib
from .figures import COLOURS, FIGURES
from .results import WORDS, Run, read_runs

_INTRODUCTION = (
    "<p>Variants of a case were timed in turns; times are medians. Ratios are to the fastest baseline of the same case "
    "in the same run: exact softmax attention, or the model's own where that is linear. Fractions are of the rates "
    "that were measured on the device in the same run.</p>"
)


@dataclass(frozen=True)
class Plot:
    """A figure that was written."""

    heading: str
    file: Path
    """The SVG; a PNG lies beside it."""


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
    sections = []
    together = _draw_together(runs, output) if len(devices) > 1 else None
    if together is not None:
        sections.append(f"<h2>All devices</h2>{html_media(together.file, together.heading)}")
    for device in devices:
        mine = [run for run in runs if run.conditions.device == device]
        sections.append(f"<h2>{escape(device)}</h2>" + "".join(_section(run, output) for run in mine))
    page = output / "report.html"
    write_text(html_page("MHLA against softmax attention", _INTRODUCTION + "".join(sections)), page)
    return page


def draw_run(run: Run, folder: Path) -> Iterator[Plot]:
    """Write the figures of a run as SVG and PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    for name, (heading, draw) in FIGURES[run.command].items():
        figure = draw(run)
        if figure is not None:
            yield Plot(heading, _save(figure, folder / f"{name}.svg"))


def _section(run: Run, output: Path) -> str:
    plots = draw_run(run, output / run.conditions.folder_name / "plots")
    images = "".join(f"<h4>{escape(plot.heading)}</h4>{html_media(plot.file, plot.heading)}" for plot in plots)
    return (
        f"<h3>{escape(run.command)}</h3>{images}{_tables(run)}"
        f"<details><summary>Conditions</summary>{_conditions(run)}</details>"
    )


def _conditions(run: Run) -> str:
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
    return html_table(("condition", "value"), [(name, text) for name, text in facts.items() if text])


def _tables(run: Run) -> str:
    rows = [row for row in run.rows if row.part is None]
    tables = []
    for case in dict.fromkeys(row.case for row in rows):
        header, texts = run.table([row for row in rows if row.case == case])
        lines = [[_cell(*pair) for pair in zip(header, line, strict=True)] for line in texts]
        tables.append(f"<h4>{escape(case)}</h4>{html_table_of(header, lines)}")
    return f'<details><summary>Tables</summary><div style="overflow-x: auto">{"".join(tables)}</div></details>'


def _cell(column: str, text: str) -> str:
    return f'<div style="text-align: left">{escape(text)}</div>' if column in WORDS else escape(text)


def _draw_together(runs: Sequence[Run], output: Path) -> Plot | None:
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
    plt = require_matplotlib()
    devices = list(dict.fromkeys(run.conditions.device for run in runs))
    thickness = 0.8 / len(devices)
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.3 * len(shared) * len(devices)), layout="constrained")
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
    return Plot("The fastest MHLA variant against the fastest baseline", _save(figure, output / "devices.svg"))


def _save(figure: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".svg", ".png"):
        figure.savefig(file.with_suffix(suffix), dpi=130)
    require_matplotlib().close(figure)
    return file
