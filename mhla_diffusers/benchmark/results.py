"""Rows of results, and the files that hold them: one folder per device, one CSV and one JSON per command."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .conditions import Conditions
from .rates import Rates
from .timing import Outcome


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
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run.command}.json"
    _write(file, json.dumps(asdict(run), indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in run.rows)
    _write(file.with_suffix(".csv"), text.getvalue())
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
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return Run(
            saved["command"],
            Conditions(**saved["conditions"]),
            Rates(**saved["rates"]),
            [Row(**row) for row in saved["rows"]],
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no result of mhla bench: {error}.") from error


COMMANDS = ("op", "scaling", "transformer", "train", "pipeline")
"""Commands that write results, in the order of a report."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All results in some folders and the folders inside them, ordered by command."""
    files = [file for folder in folders for command in COMMANDS for file in _results(folder, command)]
    runs = {file.resolve(): read_run(file) for file in files}
    return sorted(runs.values(), key=lambda run: COMMANDS.index(run.command))


def _results(folder: Path, command: str) -> Iterable[Path]:
    return [*folder.glob(f"{command}.json"), *sorted(folder.glob(f"*/{command}.json"))]


def _write(file: Path, text: str) -> None:
    """Write aside and rename, so that a kill leaves the earlier file whole."""
    aside = file.with_name(f".{file.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)
