"""Shows and saves what a command measures as soon as it is measured."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .conditions import Rates, gather_conditions, measure_rates
from .results import WORDS, Row, Run, check_device, write_run


class Recorder:
    """Prints every case as a table and rewrites the files after it, so that a run that is cut off leaves its cases.

    Args:
        command: op, scaling, transformer, train or pipeline.
        device: where the run measures; its rates are measured now.
        dtype: of the matrix product.
        output: folder that gets a folder for the device.

    Raises:
        OSError: the device's folder holds results of another device.
    """

    def __init__(self, command: str, device: torch.device, dtype: torch.dtype, output: Path) -> None:
        conditions = gather_conditions(device)
        check_device(output / conditions.folder_name, conditions)
        self.run = Run(command, conditions, measure_rates(device, dtype))
        self.output = output
        _print_conditions(self.run)

    @property
    def rates(self) -> Rates:
        """Of the device."""
        return self.run.rates

    def add(self, rows: Sequence[Row]) -> None:
        """Show and save the rows of one case."""
        self.run.rows.extend(rows)
        _print_rows(self.run, [row for row in rows if row.part is None])
        _print_parts([row for row in rows if row.part is not None])
        write_run(self.run, self.output)

    def finish(self) -> Run:
        """Say where the files are.

        Raises:
            ValueError: nothing was measured, with the reasons.
        """
        files = self.output / self.run.conditions.folder_name / self.run.command
        console().print(f"Wrote {files}.json and .csv", highlight=False)
        if all(row.median is None for row in self.run.rows):
            reasons = dict.fromkeys(f"{row.variant} is {row.status} ({row.reason})" for row in self.run.rows)
            raise ValueError(f"Nothing was measured: {'; '.join(reasons)}.")
        return self.run


def console() -> Console:
    """The terminal; output that goes elsewhere is not broken at 80 columns."""
    found = Console()
    return found if found.is_terminal else Console(width=200)


def _print_conditions(run: Run) -> None:
    """Device and measured rates."""
    conditions, rates = run.conditions, run.rates
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    console().print(f"{conditions.device}; {versions}", highlight=False)
    console().print(
        f"measured: {rates.matmul / 1e12:.3g} TFLOP/s in {rates.matmul_dtype} matrix products, "
        f"{rates.copy / 1e9:.3g} GB/s copied",
        highlight=False,
    )


def _print_rows(run: Run, rows: Sequence[Row]) -> None:
    header, texts = run.table(rows)
    table = Table(title=rows[0].case, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for line in texts:
        table.add_row(*line)
    console().print(table)


def _print_parts(rows: Sequence[Row]) -> None:
    if not rows:
        return
    parts = list(dict.fromkeys(row.part for row in rows if row.part is not None))
    table = Table("variant", title="Where the time goes, ms", title_justify="left")
    for part in parts:
        table.add_column(part, justify="right")
    medians = {(row.variant, row.part): row.median for row in rows}
    for variant in dict.fromkeys(row.variant for row in rows):
        seconds = [medians.get((variant, part)) for part in parts]
        table.add_row(variant, *("" if x is None else f"{1000 * x:.3g}" for x in seconds))
    console().print(table)
