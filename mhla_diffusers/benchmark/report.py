"""Plots of several runs, and one HTML page that holds everything."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..reporting import require_matplotlib
from .figures import FIGURES
from .results import Run, read_runs
from .series import COLOURS
from .table import HEADER, PART, cells, columns_in_use

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 3rem; border-bottom: 2px solid #0072b2; }
h3 { margin: 2rem 0 0.3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.8rem 0 0.2rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
td.remark { white-space: normal; min-width: 12rem; color: #666; }
tr.mhla td { background: #eaf4fb; }
tr.none td { color: #888; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: 13px; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
img { max-width: 100%; }
summary { cursor: pointer; color: #0072b2; margin: 0.6rem 0; }
"""
_WORDS = ("stage", "variant", "remark")


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
        sections.append(f"<h2>All devices</h2>{_image(together)}")
    for device in devices:
        mine = [run for run in runs if run.conditions.device == device]
        sections.append(f"<h2>{escape(device)}</h2>" + "".join(_section(run, output) for run in mine))
    page = output / "report.html"
    aside = output / ".report.html"
    aside.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mhla bench</title>'
        f"<style>{_STYLE}</style></head><body><h1>MHLA against softmax attention</h1>"
        "<p>Variants of a case were timed in turns; times are medians. Ratios are to the fastest baseline of the same "
        "case in the same run: exact softmax attention, or for SANA its own linear attention. Fractions are of the "
        "rates that were measured on the device in the same run.</p>"
        f"{''.join(sections)}</body></html>\n",
        encoding="utf-8",
    )
    aside.replace(page)
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
    images = "".join(f"<h4>{escape(plot.heading)}</h4>{_image(plot)}" for plot in plots)
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
        "CPU threads": str(conditions.threads),
        "date (UTC)": conditions.date,
        "command": conditions.command,
        "matrix products": f"{rates.matmul / 1e12:.3g} TFLOP/s in {rates.matmul_dtype}, measured",
        "copying": f"{rates.copy / 1e9:.3g} GB/s read and written, measured",
    }
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items() if v)}</dl>"


def _tables(run: Run) -> str:
    rows = [row for row in run.rows if not row.stage.startswith(PART)]
    tables = []
    for case in dict.fromkeys(row.case for row in rows):
        texts = [cells(run, row) for row in rows if row.case == case]
        places = columns_in_use(texts)
        head = "".join(f"<th{_kind(place)}>{escape(HEADER[place])}</th>" for place in places)
        body = "".join(_line(text, places) for text in texts)
        caption = f"<caption>{escape(case)}</caption>"
        tables.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return f'<details><summary>Tables</summary><div class="wide">{"".join(tables)}</div></details>'


def _line(text: Sequence[str], places: Sequence[int]) -> str:
    variant, median = text[HEADER.index("variant")], text[HEADER.index("median ms")]
    kind = "none" if not median else "mhla" if variant.startswith("MHLA") else ""
    body = "".join(f"<td{_kind(place)}>{escape(text[place])}</td>" for place in places)
    return f'<tr class="{kind}">{body}</tr>'


def _kind(place: int) -> str:
    if HEADER[place] not in _WORDS:
        return ""
    return ' class="text remark"' if HEADER[place] == "remark" else ' class="text"'


def _draw_together(runs: Sequence[Run], output: Path) -> Plot | None:
    """How many times faster MHLA is than the fastest baseline, for every case that several devices have."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        for row in run.rows:
            ratio = run.times_baseline(row)
            if ratio is not None and row.variant.startswith("MHLA") and not row.stage.startswith(PART):
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


def _image(plot: Plot) -> str:
    data = base64.b64encode(plot.file.read_bytes()).decode("ascii")
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(plot.heading)}">'
