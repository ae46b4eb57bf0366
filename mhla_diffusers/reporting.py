"""Text tables, progress, and matplotlib without a display."""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import required


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


def wrap(text: str) -> list[str]:
    """Split a text into lines of the terminal's width; words are not broken."""
    return textwrap.wrap(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)


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
        raise ValueError(f"size={text!r} must look like 480x832, height first, or 512 for a square.")
    return int(sides[0]), int(sides[-1])


def scaled(value: float, base: int, unit: str) -> str:
    """Format a number with three or four digits and a unit prefix, for powers of 1000 or 1024."""
    prefixes = ("", "k", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while value >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g} {prefixes[power]}{unit}" if value >= 1000 else f"{value:.3g} {prefixes[power]}{unit}"


def progress(items: Iterable[Any] | None = None, **settings: Any) -> Any:
    """Make a tqdm: a bar on a terminal or in a notebook, otherwise a count every half minute."""
    from tqdm.auto import tqdm

    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        settings |= {"ncols": 0, **dict.fromkeys(("mininterval", "maxinterval", "delay"), 30.0)}
    return tqdm(items, **{"dynamic_ncols": sys.stderr.isatty(), **settings})


def require_matplotlib() -> Any:
    """Import matplotlib's pyplot, without a display; ImportError if it is missing."""
    required("matplotlib", "plots").use("Agg")
    return required("matplotlib.pyplot", "plots")
