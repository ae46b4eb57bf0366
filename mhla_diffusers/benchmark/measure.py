"""Time variants in turns, and write what was measured with its conditions: CSV, a Markdown table, a plot."""

import csv
import gc
import io
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch

from ..files import check_writable, read_csv, write_text
from ..reporting import require_matplotlib
from ..settings import Settings, allow, check_value

_CACHE_BYTES = 2**28
"""More than the level-2 cache of any card: overwritten before every timed run, which then finds the cache cold."""
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, ImportError)
"""What a backend raises that cannot run an attention here."""
_PACKAGES = ("mhla_diffusers", "torch", "diffusers", "transformers", "triton")
_TEXTS = ("case", "stage", "variant", "dtype", "status", "reason")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Budget(Settings):
    """How often a variant runs; ValueError for a value that is not allowed."""

    seconds: float = field(default=1.0, metadata=allow(above=0))
    """Spent on each variant, as far as the numbers of repetitions allow."""
    least: int = field(default=3, metadata=allow(at_least=1))
    most: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("most", self.most, int, at_least=self.least)


@dataclass(frozen=True)
class Variant:
    """One thing to time."""

    name: str
    run: Callable[[], object] | str
    """The call, or the reason why it cannot be made here."""
    baseline: bool = False
    """Whether it is an attention to be faster than: exact softmax, or the model's own where that is linear."""
    flops: int | None = None
    """Counted from shapes; a backward pass counts as two forwards."""
    blocks: int | None = None
    """M; None for softmax."""
    note: str = ""
    """Remark on its time."""


@dataclass(frozen=True)
class Row:
    """One variant of one case, measured: a line of the CSV. What does not apply or was not measured is None."""

    variant: str
    case: str = ""
    """A shape, or a model at a size. Ratios are computed within a case and stage."""
    stage: str = ""
    """forward, forward+backward, training step, denoising, …"""
    baseline: bool = False
    dtype: str = ""
    status: Literal["measured", "absent", "out of memory"] = "measured"
    reason: str = ""
    """Why there is no time, or a remark on it."""
    tokens: int | None = None
    blocks: int | None = None
    batch: int | None = None
    """Samples per forward of a whole model."""
    median: float | None = None
    """Seconds."""
    p20: float | None = None
    p80: float | None = None
    repetitions: int | None = None
    peak_bytes: int | None = None
    """Most bytes that the CUDA allocator held, weights and inputs included; None on other devices."""
    flops: int | None = None
    whole_seconds: float | None = None
    """Seconds with all layers, extrapolated where only some were built."""
    sent_bytes: int | None = None
    """Bytes that one of several processes sends."""
    psnr: float | None = None
    """In dB, of a sample against the unpatched pipeline's from the same noise; 100 where they are equal."""
    ssim: float | None = None
    """SSIM of the same samples; 1 where they are equal."""

    @property
    def spread(self) -> float:
        """(80th − 20th percentile) / median; 0 where nothing was measured."""
        return ((self.p80 or 0.0) - (self.p20 or 0.0)) / self.median if self.median else 0.0

    @property
    def seconds(self) -> float | None:
        """Time to compare: of all layers where it is known."""
        return self.median if self.whole_seconds is None else self.whole_seconds


# ---- time -----------------------------------------------------------------------------------------------------------


def time_interleaved(
    variants: Mapping[str, Callable[[], object] | str], device: torch.device, budget: Budget
) -> dict[str, Row]:
    """Warm every variant up, then time round after round until each has its repetitions.

    A slow phase of the machine so affects all of them. A variant that runs out of memory, or whose backend refuses the
    call, is not timed; its row says why.

    Args:
        variants: name → the call, or the reason why there is none.
        device: where they run. CUDA devices are timed with events and an overwritten cache.
        budget: how often.

    Returns:
        Name → row with status, times and peak memory, in the order of ``variants``.
    """
    rows = {name: Row(name, status="absent", reason=run) for name, run in variants.items() if isinstance(run, str)}
    runs = {name: run for name, run in variants.items() if not isinstance(run, str)}
    counts: dict[str, int] = {}
    peaks: dict[str, int | None] = {}
    for name, run in with_progress(runs.items(), "warming up"):
        try:
            seconds = _seconds(run, device)  # of a first run, which compiles and loads
            if seconds < budget.seconds or device.type != "cpu":
                seconds = _seconds(run, device)
            peaks[name] = peak_bytes(run, device)
        except _REFUSALS as error:
            row = refused_row(name, error)
            rows[name] = replace(row, reason=_warnings_of(run) or row.reason) if row.status == "absent" else row
            if device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            counts[name] = max(budget.least, min(budget.most, int(budget.seconds / max(seconds, 1e-9))))
    # after the peaks, which it would add to
    cache = torch.empty(_CACHE_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in counts}
    turns = [name for turn in range(max(counts.values(), default=0)) for name in counts if turn < counts[name]]
    for name in with_progress(turns, "timing"):
        if name in rows:
            continue
        cache.zero_()
        try:
            times[name].append(_seconds(runs[name], device))
        except _REFUSALS as error:  # memory may have gone to others since it was warmed up
            rows[name] = refused_row(name, error)
            del times[name]
    rows |= {name: measured_row(name, seconds, peaks[name]) for name, seconds in times.items()}
    return {name: rows[name] for name in variants}


def measured_row(name: str, seconds: Sequence[float], peak: int | None) -> Row:
    """Return a row with the median and the percentiles of some repetitions."""
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(quantiles).tolist()
    return Row(name, median=median, p20=p20, p80=p80, repetitions=len(seconds), peak_bytes=peak)


def refused_row(name: str, error: BaseException) -> Row:
    """Return a row of a variant that raised this; the CPU's allocator has no error class of its own."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    no_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    return Row(name, status="out of memory" if no_memory else "absent", reason=lines[0][:300])


def with_progress(items: Collection[Item], what: str) -> Iterable[Item]:
    """Return the items, with a bar in a terminal that goes away at the end."""
    from tqdm.auto import tqdm

    return tqdm(items, desc=what, leave=False, disable=None)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that the CUDA allocator holds during a run; None on other devices."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, or of the machine for any other, after unused memory is given back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)  # with the page cache, which the system gives up when asked


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one run, on a CUDA device by events."""
    if device.type != "cuda":
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000


def _warnings_of(run: Callable[[], object]) -> str:
    """Return why a backend refuses a call: PyTorch warns of the reasons, and its error leaves them out."""
    with warnings.catch_warnings(record=True) as caught, suppress(*_REFUSALS):
        warnings.simplefilter("always")
        run()
    texts = [str(warning.message).splitlines()[0].split(" (Triggered")[0] for warning in caught]
    return " ".join(dict.fromkeys(texts))[:300]


# ---- conditions and files -------------------------------------------------------------------------------------------


def gather_conditions(device: torch.device) -> dict[str, str]:
    """Gather what two runs must share for their times to be comparable: name of a condition → text."""
    found = {}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        if torch.version.hip is None and shutil.which("nvidia-smi") is not None:
            found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[
                0
            ]
        found["CUDA or ROCm"] = str(torch.version.cuda or torch.version.hip)
    elif device.type == "cpu":
        file, threads = Path("/proc/cpuinfo"), torch.get_num_threads()
        names = re.findall(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
        name = re.sub(r"\((R|TM)\)", "", names[0]) if names else platform.processor() or platform.machine()
        found["device"] = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
    else:
        found["device"] = f"{platform.machine()} {device.type}"
    found["Python"] = platform.python_version()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    git = ("git", "-C", str(Path(__file__).parent))
    if shutil.which("git") is not None and _output(*git, "ls-files", Path(__file__).name):
        changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
        found["commit"] = _output(*git, "rev-parse", "HEAD") + ("+changes" if changed else "")
    found["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    found["command"] = shlex.join(["mhla", *sys.argv[1:]])
    return found


def _output(*command: str) -> str:
    """Return what a command prints; empty if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


class Results:
    """The rows of one command on one device, printed and written case by case.

    An interrupted run so keeps its finished cases. Files are ``{command}.csv`` and ``{command}.md`` in a folder of the
    device, such as ``nvidia-h100-80gb-hbm3``; the Markdown has the conditions too.

    Args:
        command: name of the files.
        device: where the run measures.
        dtype: of the inputs.
        output: gets the device's folder.
        budget: how often each variant runs.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        command: str,
        device: torch.device,
        dtype: torch.dtype,
        output: Path,
        budget: Budget = Budget(),
    ) -> None:
        self.device, self.dtype, self.budget = device, dtype, budget
        self.conditions = gather_conditions(device)
        self.file = output / re.sub(r"[^a-z0-9]+", "-", self.conditions["device"].lower()).strip("-") / command
        self.rows: list[Row] = []
        check_writable(self.file.parent)  # before anything is measured

    def measure(self, variants: Iterable[Variant], **what: Any) -> list[Row]:
        """Time variants in turns; the rows have what is given of their case, and are not added yet."""
        known = {variant.name: variant for variant in variants}
        rows = time_interleaved({name: one.run for name, one in known.items()}, self.device, self.budget)
        return [
            replace(
                row,
                baseline=known[name].baseline,
                flops=known[name].flops,
                blocks=known[name].blocks,
                reason=row.reason or known[name].note,
                **what,
            )
            for name, row in rows.items()
        ]

    def add(self, rows: Sequence[Row]) -> None:
        """Print and write the rows of one case."""
        from rich.console import Console
        from rich.table import Table

        rows = [replace(row, dtype=str(self.dtype).removeprefix("torch.")) for row in rows]
        self.rows += rows
        header, lines = table_of(rows)
        table = Table(*header, title=rows[0].case, title_justify="left")
        for line in lines:
            table.add_row(*line)
        console = Console() if sys.stdout.isatty() else Console(width=200)  # a file is not wrapped at 80 columns
        console.print(table)
        text = io.StringIO()
        writer = csv.DictWriter(text, [column.name for column in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        write_text(text.getvalue(), self.file.with_suffix(".csv"))
        page = "".join(f"- {name}: {value}\n" for name, value in self.conditions.items())
        for case in dict.fromkeys(row.case for row in self.rows):
            header, lines = table_of([row for row in self.rows if row.case == case])
            cells = [header, ["---"] * len(header), *lines]
            page += f"\n{case}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells)
        write_text(page, self.file.with_suffix(".md"))

    def finish(self) -> list[Row]:
        """Say where the files are, and return all rows; ValueError with the reasons if nothing was measured."""
        if all(row.median is None for row in self.rows):
            reasons = dict.fromkeys(f"{row.variant} is {row.status} ({row.reason})" for row in self.rows)
            raise ValueError(f"Nothing was measured: {'; '.join(reasons)}.")
        sys.stdout.write(f"Wrote {self.file}.csv and .md\n")
        return self.rows


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the rows of some cases, with the columns that are not empty.

    "times baseline" says how many times faster a row is than the fastest baseline of its case and stage among them.
    """

    def text(number: float | None, form: str, factor: float = 1) -> str:
        return "" if number is None else form.format(factor * number)

    lines = []
    for row in rows:
        beside = [other for other in rows if (other.case, other.stage) == (row.case, row.stage) and other.baseline]
        baseline = min((seconds for other in beside if (seconds := other.seconds) is not None), default=None)
        lines.append(
            {
                "variant": row.variant,
                "stage": row.stage,
                "median ms": text(row.median, "{:.3g}", 1000),
                "p20": text(row.p20, "{:.3g}", 1000),
                "p80": text(row.p80, "{:.3g}", 1000),
                "all layers ms": text(row.whole_seconds, "{:.3g}", 1000),
                "samples/s": text(row.batch / row.seconds if row.batch and row.seconds else None, "{:.3g}"),
                "peak GiB": text(row.peak_bytes, "{:.2f}", 2**-30),
                "TFLOP/s": text(row.flops / row.median if row.flops and row.median else None, "{:.3g}", 1e-12),
                "MB sent": text(row.sent_bytes, "{:,.1f}", 1e-6),
                "times baseline": text(baseline / row.seconds if baseline and row.seconds else None, "{:.2f}"),
                "PSNR, dB": text(row.psnr, "{:.1f}"),
                "SSIM": text(row.ssim, "{:.3f}"),
                "remark": ": ".join(filter(None, ("" if row.status == "measured" else row.status, row.reason))),
            }
        )
    used = [name for name in lines[0] if any(line[name] for line in lines)]
    return used, [[line[name] for name in used] for line in lines]


def read_rows(file: Path) -> list[Row]:
    """Read the rows of a CSV that ``mhla bench`` has written.

    Raises:
        OSError: no such file.
        ValueError: not such a CSV.
    """

    def value(column: str, text: str | None) -> Any:
        if column in _TEXTS:
            return text or ""
        return text == "True" if column == "baseline" else float(text) if text else None

    try:
        return [Row(**{name: value(name, text) for name, text in line.items()}) for line in read_csv(file)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is no result of mhla bench: {error}.") from error


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw a panel of bars, in milliseconds, for every case and stage, as PNG or whatever the suffix says.

    Raises:
        ValueError: nothing was measured.
        ImportError: matplotlib is missing.
    """
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            panels.setdefault((row.case, row.stage), []).append(row)
    if not panels:
        raise ValueError("Nothing to draw: no row holds a time.")
    columns = min(2, len(panels))
    lines, longest = -(-len(panels) // columns), max(map(len, panels.values()))
    size = (6.2 * columns, (1.1 + 0.3 * longest) * lines)
    figure, axes = require_matplotlib().subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (key, shown) in zip(axes.flat, panels.items(), strict=False):
        values = [1000 * (row.seconds or 0) for row in shown]
        colours = ["#555555" if row.baseline else "#0072b2" for row in shown]
        bars = axis.barh([row.variant for row in shown], values, color=colours)
        if max(values) > 20 * min(values):
            axis.set_xscale("log")
        axis.bar_label(bars, [f"{x:.3g}" for x in values], padding=3, fontsize=8)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(", ".join(key), fontsize=10, loc="left")
        axis.set_xlabel("milliseconds")
    figure.savefig(file, dpi=130)
    require_matplotlib().close(figure)
