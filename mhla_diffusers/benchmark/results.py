"""What a command measures: its conditions, a row per variant, and the files that hold them."""

import csv
import io
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..files import read_json, write_json, write_text
from .timing import Budget, Clock, Outcome, Variant, summarise, time_interleaved

COMMANDS = ("op", "scaling", "transformer", "train", "pipeline")
"""Commands that write results, in the order of a report."""
PLAIN = "plain linear"
HYBRID = "MHLA hybrid 2/3"
CONTENT = "MHLA, sparse, by content"
"""Beside MHLA the sparse branch, whose lists are chosen at every call."""
EARLIER = ("MHLA, exact tiles by content", "MHLA, exact tiles")
"""In results that ship: the sparse branch before this one, over boxes of the grid, by content and with lists given."""
COMPILED = " + torch.compile"
"""Ends the name of a variant whose repeated blocks are compiled."""
PART = "part: "
"""Prefix of the stage of rows that hold a part of a variant's time."""
WORDS = ("variant", "stage", "remark")
"""Columns that hold no numbers."""
_PACKAGES = ("torch", "diffusers", "transformers", "triton")


@dataclass(frozen=True)
class Conditions:
    """Conditions that two runs must share for their times to be comparable."""

    device: str
    """Name of the card, or of the processor with the number of threads used."""
    device_type: str
    """cpu, cuda, …"""
    driver: str | None
    """Version of the NVIDIA driver; None elsewhere."""
    toolkit: str | None
    """CUDA or ROCm version that torch was built with."""
    python: str
    versions: dict[str, str]
    """Package → version; absent packages are left out."""
    commit: str | None
    """Of the checkout that the package runs from, "+changes" if files differ; None for an installed package."""
    threads: int | None
    """That torch uses on the CPU; None where nobody noted it."""
    date: str
    """UTC."""
    command: str

    @property
    def folder_name(self) -> str:
        """The device as the name of a folder, for example ``nvidia-h100-80gb-hbm3``."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


def gather_conditions(device: torch.device) -> Conditions:
    """The conditions of a run on a device."""
    from .. import __version__

    versions = {"mhla_diffusers": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cuda, threads, driver = device.type == "cuda", torch.get_num_threads(), None
    if cuda:
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is None and shutil.which("nvidia-smi") is not None:
            lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            driver = lines.splitlines()[0] if lines else None
    elif device.type == "cpu":
        name = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
    else:
        name = f"{platform.machine()} {device.type}"
    return Conditions(
        device=name,
        device_type=device.type,
        driver=driver,
        toolkit=(torch.version.cuda or torch.version.hip) if cuda else None,
        python=platform.python_version(),
        versions=versions,
        commit=_commit(Path(__file__)),
        threads=threads,
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        command=shlex.join(["mhla", *sys.argv[1:]]),
    )


def _processor() -> str:
    """Name of the processor, which Linux tells in a file and other systems through ``platform``."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
    return re.sub(r"\((R|TM)\)", "", names[0]) if names else platform.processor() or f"{platform.machine()} CPU"


def _commit(file: Path) -> str | None:
    """The commit of a file that git tracks."""
    git = ("git", "-C", str(file.parent))
    if shutil.which("git") is None or not _output(*git, "ls-files", file.name):
        return None
    commit = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _output(*command: str) -> str | None:
    """What a command prints; None if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None


@dataclass(frozen=True)
class Rates:
    """Measured limits of a device: the yardstick of every other figure."""

    matmul: float
    """FLOP/s of a large matrix product; a multiplication and an addition count two."""
    matmul_dtype: str
    copy: float
    """Bytes/s of a large copy; reading and writing both count."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a matrix product and a copy that are too large for any cache."""
    side, copied = (8192, 2**30) if device.type == "cuda" else (1024, 2**27)
    clock = Clock(device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs: tuple[Callable[[], object], ...] = (
        lambda: torch.mm(left, right, out=product),
        lambda: target.copy_(source),
    )
    medians = []
    for run in runs:
        run()
        medians.append(summarise([clock.seconds(run) for _ in range(7)]).median)
    return Rates(2 * side**3 / medians[0], str(dtype).removeprefix("torch."), 2 * copied / medians[1])


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
    """Why there is no time, or a remark on it."""
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
    psnr: float | None = None
    """In dB, of a sample against that of the plain pipeline from the same noise; 100 where they are equal."""
    ssim: float | None = None
    """Like it; 1 where they are equal."""

    @property
    def seconds(self) -> float | None:
        """The time to compare, of the whole model or attention; None for a part of a variant."""
        return self.median if self.layers is None else self.whole_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of a whole model: images or videos of one forward or training step; None of anything else."""
        return self.batch / self.whole_seconds if self.whole_seconds else None

    @property
    def part(self) -> str | None:
        """Name of the part of a variant that was timed; None for the whole."""
        return self.stage.removeprefix(PART) if self.stage.startswith(PART) else None


def make_row(outcome: Outcome, rates: Rates, *, dtype: torch.dtype | str, note: str = "", **what: Any) -> Row:
    """A row from the outcome of a variant.

    Args:
        outcome: what became of it.
        rates: of the device, which fractions are of.
        dtype: of the inputs.
        note: the row's reason where there is a time.
        **what: further fields of :class:`Row`.
    """
    what["dtype"], timing = str(dtype).removeprefix("torch."), outcome.timing
    if timing is None:
        return Row(status=outcome.status, reason=outcome.reason, **what)
    for name, rate in (("flops", rates.matmul), ("bytes", rates.copy)):
        if what.get(name) is not None:
            fraction = "matmul_fraction" if name == "flops" else "copy_fraction"
            what[fraction] = what[name] / timing.median / rate
    return Row(status=outcome.status, reason=note, peak_bytes=outcome.peak_bytes, **asdict(timing), **what)


@dataclass
class Run:
    """What one command measured."""

    command: str
    """One of ``COMMANDS``."""
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

        def text(number: float | None, form: str, factor: float = 1) -> str:
            return "" if number is None else form.format(factor * number)

        status = "" if row.status == "measured" else row.status
        return {
            "variant": row.variant,
            "stage": row.stage,
            "median ms": text(row.median, "{:.3g}", 1000),
            "p20": text(row.p20, "{:.3g}", 1000),
            "p80": text(row.p80, "{:.3g}", 1000),
            "samples/s": text(row.samples_per_second, "{:.3g}"),
            "peak GiB": text(row.peak_bytes, "{:.2f}", 2**-30),
            "of matmul rate": text(row.matmul_fraction, "{:.0%}"),
            "of copy rate": text(row.copy_fraction, "{:.0%}"),
            "times baseline": text(self.times_baseline(row), "{:.2f}"),
            "PSNR, dB": text(row.psnr, "{:.1f}"),
            "SSIM": text(row.ssim, "{:.3f}"),
            "remark": ": ".join(filter(None, (status, row.reason))),
        }


class Recorder:
    """Device, type and repetitions of a command's measurements, and its rows.

    Every case is printed as a table, and the files are rewritten after it, so that an interrupted run keeps its
    finished cases.

    Args:
        command: one of ``COMMANDS``.
        device: where the run measures; its rates are measured now.
        dtype: of the inputs.
        output: folder that gets a folder for the device.
        seconds: to spend on each variant.

    Raises:
        OSError: the device's folder holds results of another device.
    """

    def __init__(
        self, command: str, device: torch.device, dtype: torch.dtype, output: Path, seconds: float = 1.0
    ) -> None:
        self.device, self.dtype, self.budget = device, dtype, Budget(seconds)
        conditions = gather_conditions(device)
        _check_device(output / conditions.folder_name, conditions)
        self.run = Run(command, conditions, measure_rates(device, dtype))
        self.output = output
        versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
        console().print(f"{conditions.device}; {versions}", highlight=False)
        console().print(
            f"measured: {self.run.rates.matmul / 1e12:.3g} TFLOP/s in {self.run.rates.matmul_dtype} matrix products, "
            f"{self.run.rates.copy / 1e9:.3g} GB/s copied",
            highlight=False,
        )

    def measure(self, variants: Mapping[str, Variant]) -> dict[str, Outcome]:
        """Time variants in turns, see :func:`time_interleaved`."""
        return time_interleaved(variants, self.device, self.budget)

    def row(self, outcome: Outcome, **what: Any) -> Row:
        """A row of this run, see :func:`make_row`."""
        return make_row(outcome, self.run.rates, dtype=self.dtype, **what)

    def add(self, rows: Sequence[Row]) -> None:
        """Show and save the rows of one case."""
        self.run.rows.extend(rows)
        header, texts = self.run.table([row for row in rows if row.part is None])
        table = Table(title=rows[0].case, title_justify="left")
        for name in header:
            table.add_column(name, justify="left" if name in WORDS else "right")
        for line in texts:
            table.add_row(*line)
        console().print(table)
        if parts := list(dict.fromkeys(row.part for row in rows if row.part is not None)):
            table = Table("variant", title="Where the time goes, ms", title_justify="left")
            for part in parts:
                table.add_column(part, justify="right")
            medians = {(row.variant, row.part): row.median for row in rows}
            for variant in dict.fromkeys(row.variant for row in rows if row.part is not None):
                seconds = [medians.get((variant, part)) for part in parts]
                table.add_row(variant, *("" if x is None else f"{1000 * x:.3g}" for x in seconds))
            console().print(table)
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
    """The console; output to a file is not wrapped at 80 columns."""
    found = Console()
    return found if found.is_terminal else Console(width=200)


def write_run(run: Run, output: Path) -> Path:
    """Write ``{command}.json`` and ``{command}.csv`` into the device's folder inside ``output``.

    Replaces an earlier result of the same command and device, never one of another device.

    Returns:
        The JSON file.

    Raises:
        OSError: the folder cannot be written, or its file is of another device.
    """
    folder = output / run.conditions.folder_name
    _check_device(folder, run.conditions)
    file = folder / f"{run.command}.json"
    write_json(asdict(run), file)
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in run.rows)
    write_text(text.getvalue(), file.with_suffix(".csv"))
    return file


def _check_device(folder: Path, conditions: Conditions) -> None:
    """Refuse a folder that holds results of another device."""
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
        conditions, rates = Conditions(**saved["conditions"]), Rates(**saved["rates"])
        return Run(saved["command"], conditions, rates, [Row(**row) for row in saved["rows"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of mhla bench: {error}.") from error


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All results in some folders and the folders inside them, ordered by command."""
    files = [
        file
        for folder in folders
        for command in COMMANDS
        for file in (*folder.glob(f"{command}.json"), *sorted(folder.glob(f"*/{command}.json")))
    ]
    runs = {file.resolve(): read_run(file) for file in files}
    return sorted(runs.values(), key=lambda run: COMMANDS.index(run.command))
