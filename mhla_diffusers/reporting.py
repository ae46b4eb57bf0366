"""Text tables, self-contained HTML pages, and matplotlib without a display."""

import base64
import csv
import io
import mimetypes
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import installing
from .files import write_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #161616); }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid light-dark(#ddd, #444); text-align: right; }
th:first-child, td:first-child { text-align: left; }
img, video { max-width: 100%; }
"""
_SECONDS = 30.0
"""Seconds between two lines of progress without a terminal."""
_shown = {"quiet": False}
"""Whether no progress is shown."""


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> str:
    """Format a table as wide as the terminal at most, or 80 without one; words, such as names, stay whole.

    ``right`` aligns all columns but the first at the right.
    """
    lines = [list(header), *map(list, rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    least = 0
    for index, column in enumerate(zip(*lines, strict=True)):
        longest = max(len(word) for cell in column for word in (*cell.split(), ""))
        is_name = all(len(cell.split()) < 2 for cell in column)  # for rich to take the room from other columns
        table.add_column(justify="right" if right and index else "left", min_width=longest, no_wrap=is_name)
        least += longest + 2
    for line in lines:
        table.add_row(*map(Text, line))
    console = Console(width=max(shutil.get_terminal_size().columns, least), color_system=None, file=io.StringIO())
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def wrap(text: str, width: int | None = None) -> list[str]:
    """Split a text into lines of a width, the terminal's if None; words are not broken."""
    width = width or shutil.get_terminal_size().columns
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table of Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *rows])


def times(counts: Sequence[int] | None) -> str:
    """Format counts along axes, such as ``"7x3x5"``; ``"-"`` for None."""
    return "x".join(map(str, counts)) if counts else "-"


def parse_size(text: str) -> tuple[int, int]:
    """Parse height and width from "480x832", or from "512" for a square."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"size={text!r} is unknown; write 480x832, height first, or 512 for a square.")
    return int(sides[0]), int(sides[-1])


def from_to(ends: tuple[int, int] | None) -> str:
    """Format a range, such as ``"45 to 60"``, or one number; ``"-"`` for None."""
    if ends is None:
        return "-"
    low, high = ends
    return str(low) if low == high else f"{low} to {high}"


def scaled(value: float, base: int, unit: str) -> str:
    """Format a number with three digits or four, and the prefix of its unit for powers of 1000 or of 1024."""
    prefixes = ("", "k", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while value >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g} {prefixes[power]}{unit}" if value >= 1000 else f"{value:.3g} {prefixes[power]}{unit}"


def mean_and_spread(values: Sequence[float], style: str) -> str:
    """Format a mean, and the deviation if there are several values: ``"0.0802 ± 0.0007"`` for ``".4f"``."""
    return f"{fmean(values):{style}}" + (f" ± {stdev(values):{style}}" if len(values) > 1 else "")


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]], folder: Path, name: str) -> str:
    """Write a table as CSV and as Markdown, and return the Markdown."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    markdown = markdown_table(header, rows)
    for suffix, content in ((".csv", text.getvalue()), (".md", markdown)):
        write_text(content, folder / f"{name}{suffix}")
    return markdown


class _Lines:
    """Standard error that is not a terminal, to which tqdm writes a line where it would overwrite its bar."""

    def write(self, text: str) -> None:
        sys.stderr.write(f"{text.strip()}\n" if text.strip() else "")

    def flush(self) -> None:
        sys.stderr.flush()


def set_quiet(quiet: bool) -> None:
    """Show no progress from now on, or show it again."""
    if quiet != _shown["quiet"]:
        show_loading(not quiet)
    _shown["quiet"] = quiet


def show_loading(shown: bool) -> None:
    """Show the bars of diffusers, of transformers and of the Hub's client while they load, or hide them."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        (library.enable_progress_bar if shown else library.disable_progress_bar)()


def shows_bars() -> bool:
    """Whether progress is shown by bars: on a terminal, unless it is to be quiet."""
    return sys.stderr.isatty() and not _shown["quiet"]


def progress(items: Iterable[Any] | None = None, **settings: Any) -> Any:
    """Make a tqdm: a bar on a terminal or in a notebook, otherwise a line every half minute."""
    from tqdm.auto import tqdm

    settings |= {"disable": _shown["quiet"] or settings.get("disable", False), "dynamic_ncols": True}
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        waits = dict.fromkeys(("mininterval", "maxinterval", "delay"), _SECONDS)
        settings |= {"file": _Lines(), "dynamic_ncols": False, "ncols": 0, **waits}
    return tqdm(items, **settings)


def html_page(title: str, body: str) -> str:
    """Make a whole page; ``body`` is HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of texts."""
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def html_media(file: Path, description: str) -> str:
    """Embed an image or a looping video in the page."""
    kind = mimetypes.guess_type(file)[0] or ""
    source = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"
    if kind.startswith("video"):
        return f'<video src="{source}" autoplay loop muted playsinline title="{escape(description)}"></video>'
    return f'<img src="{source}" alt="{escape(description)}">'


def require_matplotlib() -> Any:
    """Import matplotlib's pyplot, without a display; ImportError if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib; {installing('plots')}.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
