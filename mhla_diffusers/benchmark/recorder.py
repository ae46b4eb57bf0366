"""Shows and saves what a command measures as soon as it is measured."""

from collections.abc import Sequence
from pathlib import Path

import torch

from .conditions import gather_conditions
from .rates import Rates, measure_rates
from .results import Row, Run, check_device, write_run
from .table import console, print_conditions, print_rows


class Recorder:
    """Prints every case as a table and rewrites the files after it, so that a run that is cut off leaves its cases.

    Args:
        command: op, scaling, transformer, train or pipeline.
        device: where the run measures; its rates are measured now.
        dtype: of the matrix product.
        output: folder that gets a folder for the device; None to write nothing.

    Raises:
        OSError: the device's folder holds results of another device.
    """

    def __init__(self, command: str, device: torch.device, dtype: torch.dtype, output: Path | None) -> None:
        conditions = gather_conditions(device)
        if output is not None:
            check_device(output / conditions.folder_name, conditions)
        self.run = Run(command, conditions, measure_rates(device, dtype))
        self.output = output
        print_conditions(self.run)

    @property
    def rates(self) -> Rates:
        """Of the device."""
        return self.run.rates

    def add(self, rows: Sequence[Row]) -> None:
        """Show and save the rows of one case."""
        self.run.rows.extend(rows)
        print_rows(self.run, rows)
        if self.output is not None:
            write_run(self.run, self.output)

    def say(self, text: str) -> None:
        """Show a line."""
        console().print(text, highlight=False)

    def finish(self) -> Run:
        """Say where the files are."""
        if self.output is not None:
            self.say(f"Wrote {self.output / self.run.conditions.folder_name / self.run.command}.json and .csv")
        return self.run
