"""Time variants in turns, and write what was measured with its conditions: CSV and a Markdown table."""

import csv
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import write_text, written_aside
from ..reporting import markdown_table, progress, text_table, wrap

_CACHE_BYTES = 2**28
"""More than the level-2 cache of any card: overwritten before every timed run, which then finds the cache cold."""
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, ImportError)
"""What a backend raises that cannot run an attention here."""
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "triton")


@dataclass(frozen=True)
class Row:
    """One variant of one case, and what was measured: a line of the CSV. What does not apply is None."""

    variant: str
    case: str = ""
    """A shape, or a model at a size. Ratios are computed within a case and stage."""
    stage: str = ""
    """forward, forward+backward, denoising, …"""
    baseline: bool = False
    """Whether it is an attention to be faster than: exact softmax, or the model's own where that is linear."""
    dtype: str = ""
    reason: str = ""
    """Why there is no time, or a remark on it."""
    tokens: int | None = None
    median: float | None = None
    """Seconds, as p20 and p80."""
    p20: float | None = None
    p80: float | None = None
    repetitions: int | None = None
    peak_bytes: int | None = None
    """Most bytes that the CUDA allocator held, weights and inputs included; None on other devices."""
    flops: int | None = None
    """Counted from shapes; a backward pass counts as two forwards."""
    psnr: float | None = None
    """In dB, of a sample against the unpatched pipeline's from the same noise; 100 where they are equal."""
    ssim: float | None = None


Runs = dict[Row, Callable[[], object] | str]
"""Row without times → what to time, or the reason why it cannot run here."""


def time_interleaved(runs: Runs, device: torch.device, seconds: float = 1.0, most: int = 30) -> list[Row]:
    """Warm every variant up, then time round after round until each has its repetitions.

    A slow phase of the machine thus affects all of them. CUDA devices are timed with events and an overwritten cache.
    ``seconds`` is spent on each variant, within 3 to ``most`` repetitions. A row that cannot run gets the reason in
    place of times.
    """
    rows = {row: replace(row, reason=run) for row, run in runs.items() if isinstance(run, str)}
    calls = {row: run for row, run in runs.items() if not isinstance(run, str)}
    counts: dict[Row, int] = {}
    peaks: dict[Row, int | None] = {}
    for row, run in progress(calls.items(), desc="warming up", leave=False):
        with warnings.catch_warnings(record=True) as caught:  # in which PyTorch says why an attention cannot run
            warnings.simplefilter("always")
            try:
                taken, peaks[row], _ = timed(run, device)  # a first run, which compiles and loads
                if taken < seconds or device.type != "cpu":
                    taken, peaks[row], _ = timed(run, device)
                counts[row] = max(3, min(most, int(seconds / max(taken, 1e-9))))
            except _REFUSALS as error:
                texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
                said = [text.partition(" (Triggered")[0] for text in texts]
                rows[row] = refused(row, error, said)
    # after the peaks, which it would add to
    cache = torch.empty(_CACHE_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    times: dict[Row, list[float]] = {row: [] for row in counts}
    turns = [row for turn in range(max(counts.values(), default=0)) for row in counts if turn < counts[row]]
    for row in progress(turns, desc="timing", leave=False):
        if row not in rows:
            cache.zero_()
            try:
                times[row].append(timed(calls[row], device)[0])
            except _REFUSALS as error:  # memory may have gone to others since it was warmed up
                rows[row] = refused(row, error)
    return [rows.get(row) or measured(row, times[row], peaks[row]) for row in runs]


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, int | None, Any]:
    """Call a function once; return seconds, most bytes that the CUDA allocator held, None elsewhere, and its result."""
    if device.type != "cuda":
        _wait_for(device)
        start = time.perf_counter()
        result = run()
        _wait_for(device)
        return time.perf_counter() - start, None, result
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        result = run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated(device), result


def measured(row: Row, seconds: Sequence[float], peak: int | None) -> Row:
    """Return the row with the median and the percentiles of some repetitions, and a peak of memory."""
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(quantiles).tolist()
    return replace(row, median=median, p20=p20, p80=p80, repetitions=len(seconds), peak_bytes=peak)


def refused(row: Row, error: BaseException, reasons: Sequence[str] = ()) -> Row:
    """Return the row of a variant that did not run, with the reasons; frees unused CUDA memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    said = " ".join(dict.fromkeys(reasons)) or str(error) or type(error).__name__
    return replace(row, reason=said.partition("\n")[0][:300])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def gather_conditions(device: torch.device) -> dict[str, str]:
    """Return the conditions that make two runs comparable: name → text."""
    memory = driver = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    elif device.type == "cpu":
        named = re.search(r"^Model name:\s*(.+)$", _output("lscpu"), re.MULTILINE)
        name = re.sub(r"\((R|TM)\)", "", named[1]) if named else platform.machine()
        name = f"{name}, {torch.get_num_threads()} threads"
    else:
        name = device.type
    versions = {"mhla_diffusers": __version__}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    versions["Python"] = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    versions["CUDA or ROCm"] = torch.version.cuda or torch.version.hip or "none"
    git, commit = ("git", "-C", str(Path(__file__).parent)), ""
    if _output(*git, "ls-files", Path(__file__).name):  # a checkout of this package, not an environment inside another
        commit = _output(*git, "describe", "--always", "--dirty", "--abbrev=40")
    date, command = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), shlex.join(["mhla", *sys.argv[1:]])
    found = {"device": name, "memory": memory, "driver": driver, **versions}
    found |= {"commit": commit, "date": date, "command": command}
    return {name: text for name, text in found.items() if text}


def _output(*command: str) -> str:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


class Results:
    """The rows of one command on one device, printed and written case by case, so that an interrupted run keeps them.

    Files are ``{command}-{date}-{time}``, as .csv and as .md with the conditions, in a folder of ``output`` for the
    device, such as ``nvidia-h100-80gb-hbm3``. OSError if the folder cannot be written.
    """

    def __init__(self, command: str, device: torch.device, dtype: torch.dtype, output: Path) -> None:
        self.device, self.dtype = device, dtype
        self.conditions = gather_conditions(device)
        folder = output / re.sub(r"[^a-z0-9]+", "-", self.conditions["device"].lower()).strip("-")
        self.file = folder / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"  # a short run takes less than a second
        self.rows: list[Row] = []
        folder.mkdir(parents=True, exist_ok=True)  # before anything is measured

    def add(self, rows: Sequence[Row]) -> None:
        """Print and write the rows of one case."""
        rows = [replace(row, dtype=str(self.dtype).removeprefix("torch.")) for row in rows]
        self.rows += rows
        for title, table, remarks in tables_of(rows):
            lines = [title, text_table(*table, right=True), *(line for text in remarks for line in wrap(text))]
            sys.stdout.write("\n".join(lines) + "\n\n")
        with written_aside(self.file.with_suffix(".csv")) as aside, aside.open("w", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(column.name for column in fields(Row))
            writer.writerows(map(astuple, self.rows))
        write_text(page_of(self.rows, self.conditions), self.file.with_suffix(".md"))

    def finish(self) -> None:
        """Say where the files are; ValueError with the reasons if nothing was measured."""
        if all(row.median is None for row in self.rows):
            reasons = dict.fromkeys(f"{row.variant}: {row.reason}" for row in self.rows)
            raise ValueError(f"Nothing was measured: {'; '.join(reasons)}.")
        sys.stdout.write(f"Wrote {self.file}.csv and .md\n")


def page_of(rows: Sequence[Row], conditions: Mapping[str, str]) -> str:
    """Return the conditions and the tables of all cases as Markdown."""
    page = "".join(f"- {name}: {value}\n" for name, value in conditions.items())
    for title, table, remarks in tables_of(rows):
        page += f"\n{title}\n\n{markdown_table(*table)}" + "".join(f"\n{text}\n" for text in remarks)
    return page


def tables_of(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[list[str], list[list[str]]], list[str]]]:
    """Yield title, table and remarks of every case and stage: a line per remark, with its variants.

    A table has header and cells, without empty columns. "speedup" is over the fastest baseline; below 1 it is slower.
    """
    for case, stage in dict.fromkeys((row.case, row.stage) for row in rows):
        here = [row for row in rows if (row.case, row.stage) == (case, stage)]
        remarks: dict[str, list[str]] = {}
        for row in here:
            if row.reason:
                said = row.reason if row.median else f"not measured: {row.reason}"
                remarks.setdefault(said, []).append(row.variant)
        columns = _columns_of([row for row in here if row.median])
        table = list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]
        yield f"{case}, {stage}" if stage else case, table, [f"{said}: {'; '.join(x)}" for said, x in remarks.items()]


def _columns_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    baseline = min((row.median for row in rows if row.baseline and row.median), default=None)
    numbers: dict[str, tuple[str, list[float | None]]] = {
        "median ms": (".3g", [row.median and 1000 * row.median for row in rows]),
        "p20": (".3g", [row.p20 and 1000 * row.p20 for row in rows]),
        "p80": (".3g", [row.p80 and 1000 * row.p80 for row in rows]),
        "peak GiB": (".2f", [row.peak_bytes and row.peak_bytes / 2**30 for row in rows]),
        "TFLOP/s": (".3g", [row.flops / row.median / 1e12 if row.flops and row.median else None for row in rows]),
        "speedup": (".2f", [baseline / row.median if baseline and row.median else None for row in rows]),
        "PSNR, dB": (".1f", [row.psnr for row in rows]),
        "SSIM": (".3f", [row.ssim for row in rows]),
    }
    columns = {"variant": [row.variant for row in rows]}
    for name, (form, values) in numbers.items():
        if any(values):
            columns[name] = ["" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:{form}}" for x in values]
    return columns
