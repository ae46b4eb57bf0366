"""Run ``mhla bench`` in this process."""

from pathlib import Path

from typer.testing import CliRunner

from mhla_diffusers.benchmark.results import Run, read_runs
from mhla_diffusers.cli import app


def bench(*arguments: object) -> str:
    """Run a command and give what it printed; what it raises is raised here."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def measure(folder: Path, *arguments: object) -> Run:
    """Run a command on the CPU, as short as possible, and read what it wrote."""
    bench(*arguments, "--device", "cpu", "--seconds", 0.01, "--output", folder)
    (run,) = read_runs([folder])
    return run


def medians(run: Run, stage: str = "forward") -> dict[str, float]:
    """Variant → seconds of those that were measured."""
    rows = [row for row in run.rows if row.stage == stage and row.status == "measured"]
    assert all(0 < row.p20 <= row.median <= row.p80 for row in rows)
    return {row.variant: row.median for row in rows}
