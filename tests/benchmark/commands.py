"""Run ``mhla bench`` in this process."""

import csv
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from mhla_diffusers.benchmark.measure import Row
from mhla_diffusers.cli import app


def bench(*arguments: object) -> str:
    """Run a command and give what it printed; what it raises is raised here."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def measure(folder: Path, *arguments: object) -> list[Row]:
    """Run a command on the CPU, as short as possible, and read what it wrote."""
    short = () if arguments[0] == "pipeline" else ("--seconds", 0.01)
    bench(*arguments, "--device", "cpu", *short, "--output", folder)
    (file,) = folder.glob("*/*.csv")
    return read_rows(file)


def read_rows(file: Path) -> list[Row]:
    """The rows of a CSV of results."""

    def value(column: str, text: str) -> Any:
        if column in ("case", "stage", "variant", "dtype", "reason"):
            return text
        return text == "True" if column == "baseline" else float(text) if text else None

    with file.open(encoding="utf-8") as lines:
        return [Row(**{name: value(name, text) for name, text in line.items()}) for line in csv.DictReader(lines)]


def medians(rows: list[Row], stage: str = "forward") -> dict[str, float]:
    """Variant → seconds of those that were measured."""
    found = [row for row in rows if row.stage == stage and row.median]
    assert all(0 < row.p20 <= row.median <= row.p80 for row in found)
    return {row.variant: row.median for row in found}
