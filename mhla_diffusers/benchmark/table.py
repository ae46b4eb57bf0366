"""Results as a table in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .results import Row, Run

HEADER = (
    "stage",
    "variant",
    "median ms",
    "p20",
    "p80",
    "peak GiB",
    "of matmul rate",
    "of copy rate",
    "times baseline",
    "remark",
)


PART = "part: "
"""How the stage of a row begins that holds a part of a variant's time."""


def cells(run: Run, row: Row) -> tuple[str, ...]:
    """The columns of one row as text; what was not measured is empty."""
    ratio = run.times_baseline(row)
    milliseconds = (None if x is None else f"{1000 * x:.3g}" for x in (row.median, row.p20, row.p80))
    return (
        row.stage,
        row.variant,
        *(text or "" for text in milliseconds),
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
        "" if row.matmul_fraction is None else f"{row.matmul_fraction:.0%}",
        "" if row.copy_fraction is None else f"{row.copy_fraction:.0%}",
        "" if ratio is None else f"{ratio:.2f}",
        remark(row),
    )


def remark(row: Row) -> str:
    """Why there is no time, or what is to be known of it."""
    if row.status == "measured":
        return row.reason
    return f"{row.status}: {row.reason}" if row.reason else row.status


def columns_in_use(rows: Sequence[Sequence[str]]) -> list[int]:
    """Places of the columns of ``HEADER`` in which something stands."""
    return [place for place in range(len(HEADER)) if any(row[place] for row in rows)]


def print_rows(run: Run, rows: Sequence[Row]) -> None:
    """Print a table of the rows of one case, and one of the parts of each variant."""
    parts = [row for row in rows if row.stage.startswith(PART)]
    rows = [row for row in rows if not row.stage.startswith(PART)]
    texts = [cells(run, row) for row in rows]
    places = columns_in_use(texts)
    table = Table(title=rows[0].case, title_justify="left")
    for place in places:
        words = HEADER[place] in ("stage", "variant", "remark")
        table.add_column(HEADER[place], justify="left" if words else "right")
    for row in texts:
        table.add_row(*(row[place] for place in places))
    console().print(table)
    if parts:
        _print_parts(parts)


def _print_parts(rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.stage.removeprefix(PART) for row in rows))
    table = Table("variant", title="Where the time goes, ms", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    medians = {(row.variant, row.stage.removeprefix(PART)): row.median for row in rows}
    for variant in dict.fromkeys(row.variant for row in rows):
        seconds = [medians.get((variant, name)) for name in names]
        table.add_row(variant, *("" if x is None else f"{1000 * x:.3g}" for x in seconds))
    console().print(table)


def print_conditions(run: Run) -> None:
    """Print device and measured rates."""
    conditions, rates = run.conditions, run.rates
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    console().print(f"{conditions.device}; {versions}", highlight=False)
    console().print(
        f"measured: {rates.matmul / 1e12:.3g} TFLOP/s in {rates.matmul_dtype} matrix products, "
        f"{rates.copy / 1e9:.3g} GB/s copied",
        highlight=False,
    )


def console() -> Console:
    """The terminal; output that goes elsewhere is not broken at 80 columns."""
    found = Console()
    return found if found.is_terminal else Console(width=200)
