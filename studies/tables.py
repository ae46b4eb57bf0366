"""Tables of the studies."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from mhla_diffusers.files import write_text
from mhla_diffusers.reporting import markdown_table


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
