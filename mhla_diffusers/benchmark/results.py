"""Rows of results, and the files that hold them: one folder per device, one CSV and one JSON per command."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..files import read_json, write_json, write_text
from .conditions import Conditions, Rates
from .timing import Outcome

COMMANDS = ("op", "scaling", "transformer", "train", "pipeline")
"""Commands that write results, in the order of a report."""
PART = "part: "
"""How the stage of a row begins that holds a part of a variant's time."""
WORDS = ("variant", "stage", "remark")
"""Columns that hold no numbers."""


@dataclass(frozen=True)
class Row:
    """One variant in one case. What does not apply or was not measured is None."""

    case: str
    """What was measured: a shape, or a model at a size. Ratios are computed within a case and stage."""
    stage: str
    """forward, forward+backward, training step, denoising, …"""
    variant: str
    baseline: bool
    """Whether this is an attention to be faster than: softmax, or SANA's own."""
    dtype: str
    status: str
    """measured, absent or out of memory."""
    reason: str = ""
    """Why there is no time, or what is to be known of it."""
    tokens: int | None = None
    """N."""
    blocks: int | None = None
    """M; None for softmax."""
    batch: int = 1
    model: str | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    median: float | None = None
    """Seconds."""
    p20: float | None = None
    p80: float | None = None
    repetitions: int | None = None
    peak_bytes: int | None = None
    """Most bytes that the CUDA allocator held."""
    flops: int | None = None
    """Counted from shapes."""
    bytes: int | None = None
    """Least number that must move, counted from shapes."""
    matmul_fraction: float | None = None
    """Achieved FLOP/s as a fraction of the measured rate of matrix products."""
    copy_fraction: float | None = None
    """Achieved bytes/s as a fraction of the measured rate of copying."""
    layers: int | None = None
    """Layers that were timed."""
    all_layers: int | None = None
    """Layers of the real model."""
    whole_seconds: float | None = None
    """Seconds with all layers: measured, or extrapolated where ``layers`` is fewer."""

    @property
    def seconds(self) -> float | None:
        """What is compared: the time of the whole model or attention; None for a part that is no variant."""
        return self.median if self.layers is None else self.whole_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of a whole model: images or videos of one forward or training step; None of anything else."""
        return self.batch / self.whole_seconds if self.whole_seconds else None

    @property
    def part(self) -> str | None:
        """Name of the part of a variant that was timed; None for the whole."""
        return self.stage.removeprefix(PART) if self.stage.startswith(PART) else None


def make_row(outcome: Outcome, rates: Rates, *, flops: int | None = None, bytes: int | None = None, **what: Any) -> Row:
    """A row from the outcome of a variant.

    Args:
        outcome: of :func:`mhla_diffusers.benchmark.timing.time_interleaved`.
        rates: of the device.
        flops: counted from shapes.
        bytes: counted from shapes.
        **what: further fields of :class:`Row`.
    """
    timing = outcome.timing
    note = what.pop("note", "")
    if timing is None:
        return Row(status=outcome.status, reason=outcome.reason, flops=flops, bytes=bytes, **what)
    return Row(
        status=outcome.status,
        reason=note,
        flops=flops,
        bytes=bytes,
        peak_bytes=outcome.peak_bytes,
        matmul_fraction=flops / timing.median / rates.matmul if flops is not None else None,
        copy_fraction=bytes / timing.median / rates.copy if bytes is not None else None,
        **asdict(timing),
        **what,
    )


@dataclass
class Run:
    """What one command measured."""

    command: str
    """op, scaling, transformer, train or pipeline."""
    conditions: Conditions
    rates: Rates
    rows: list[Row] = field(default_factory=list)

    def times_baseline(self, row: Row) -> float | None:
        """How many times faster a row is than the fastest baseline of its case and stage, in this run.

        Where layers are cut, the times of the whole model are compared.
        """
        beside = [other for other in self.rows if (other.case, other.stage) == (row.case, row.stage) and other.baseline]
        baseline = min((seconds for other in beside if (seconds := other.seconds) is not None), default=None)
        return baseline / row.seconds if baseline and row.seconds else None

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        """Header and cells of some rows, those columns in which something stands."""
        cells = [self._cells(row) for row in rows]
        used = [name for name in cells[0] if any(line[name] for line in cells)]
        return used, [[line[name] for name in used] for line in cells]

    def _cells(self, row: Row) -> dict[str, str]:
        """Column → text; empty where nothing was measured."""
        remark = row.reason
        if row.status != "measured":
            remark = f"{row.status}: {row.reason}" if row.reason else row.status
        return {
            "variant": row.variant,
            "stage": row.stage,
            "median ms": _text(row.median, "{:.3g}", 1000),
            "p20": _text(row.p20, "{:.3g}", 1000),
            "p80": _text(row.p80, "{:.3g}", 1000),
            "samples/s": _text(row.samples_per_second, "{:.3g}"),
            "peak GiB": _text(row.peak_bytes, "{:.2f}", 2**-30),
            "of matmul rate": _text(row.matmul_fraction, "{:.0%}"),
            "of copy rate": _text(row.copy_fraction, "{:.0%}"),
            "times baseline": _text(self.times_baseline(row), "{:.2f}"),
            "remark": remark,
        }


def _text(number: float | None, form: str, factor: float = 1) -> str:
    return "" if number is None else form.format(factor * number)


def write_run(run: Run, output: Path) -> Path:
    """Write ``{command}.json`` and ``{command}.csv`` into the device's folder inside ``output``.

    An earlier result of the same command and device is replaced; that of another device never is.

    Returns:
        The JSON file.

    Raises:
        OSError: the folder cannot be written, or its file is of another device.
    """
    folder = output / run.conditions.folder_name
    check_device(folder, run.conditions)
    file = folder / f"{run.command}.json"
    write_json(asdict(run), file)
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in run.rows)
    write_text(text.getvalue(), file.with_suffix(".csv"))
    return file


def check_device(folder: Path, conditions: Conditions) -> None:
    """Make sure that a folder holds no results of another device.

    Raises:
        OSError: it does.
    """
    for run in read_runs([folder]) if folder.is_dir() else ():
        if run.conditions.device != conditions.device:
            raise OSError(
                f"{folder} holds results of {run.conditions.device!r}; this is {conditions.device!r}. "
                "Choose another output folder."
            )


def read_run(file: Path) -> Run:
    """The inverse of :func:`write_run`.

    Raises:
        OSError: no such file.
        ValueError: not a result of a benchmark.
    """
    saved = read_json(file)
    try:
        return Run(
            saved["command"],
            Conditions(**saved["conditions"]),
            Rates(**saved["rates"]),
            [Row(**row) for row in saved["rows"]],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of mhla bench: {error}.") from error


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All results in some folders and the folders inside them, ordered by command."""
    files = [file for folder in folders for command in COMMANDS for file in _results(folder, command)]
    runs = {file.resolve(): read_run(file) for file in files}
    return sorted(runs.values(), key=lambda run: COMMANDS.index(run.command))


def _results(folder: Path, command: str) -> Iterable[Path]:
    return [*folder.glob(f"{command}.json"), *sorted(folder.glob(f"*/{command}.json"))]
