"""Time and memory of several variants, interleaved, so that a slow phase of the machine affects all of them."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

_CACHE_BYTES = 2**28
"""More than the level-2 cache of any card: overwritten before every timed run, which then finds the cache cold."""
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, ImportError)
"""What a backend raises that cannot run an attention here."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over its repetitions."""

    median: float
    p20: float
    p80: float
    repetitions: int


@dataclass(frozen=True)
class Absent:
    """Placeholder for a variant that cannot run here."""

    reason: str


Variant = Callable[[], object] | Absent
"""The call to time, or why it cannot be timed."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one variant."""

    status: Literal["measured", "absent", "out of memory"]
    timing: Timing | None = None
    peak_bytes: int | None = None
    """Most bytes that the CUDA allocator held during a run, weights and inputs included; None on other devices."""
    reason: str = ""
    """Why there is no time."""


@dataclass(frozen=True)
class Budget:
    """How often a variant runs.

    Raises:
        ValueError: a value that is not allowed.
    """

    seconds: float = 1.0
    """Spent on each variant, as far as the numbers of repetitions allow."""
    least: int = 3
    most: int = 30

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be positive.")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"repetitions from {self.least} to {self.most}: at least 1, and no fewer at most.")

    def repetitions(self, seconds: float) -> int:
        """Repetitions of a variant that takes so long."""
        return max(self.least, min(self.most, int(self.seconds / max(seconds, 1e-9))))


def time_interleaved(variants: Mapping[str, Variant], device: torch.device, budget: Budget) -> dict[str, Outcome]:
    """Warm every variant up, then time round after round until each has its repetitions.

    A variant that runs out of memory, or whose backend refuses the call, is not timed; its outcome says why.

    Args:
        variants: name → what to time.
        device: where they run. CUDA devices are timed with events and an overwritten cache.
        budget: how often.

    Returns:
        Name → outcome, in the order of ``variants``.
    """
    outcomes = {name: Outcome("absent", reason=run.reason) for name, run in variants.items() if isinstance(run, Absent)}
    runs = {name: run for name, run in variants.items() if not isinstance(run, Absent)}
    counts: dict[str, int] = {}
    peaks: dict[str, int | None] = {}
    for name, run in show_progress(runs.items(), "warming up"):
        first = _warm_up(run, device, budget)
        if isinstance(first, Outcome):
            outcomes[name] = first
        else:
            counts[name], peaks[name] = budget.repetitions(first), peak_bytes(run, device)
    clock = Clock(device)  # after the peaks, which it would add to
    seconds: dict[str, list[float]] = {name: [] for name in counts}
    turns = [name for turn in range(max(counts.values(), default=0)) for name in counts if turn < counts[name]]
    for name in show_progress(turns, "timing"):
        seconds[name].append(clock.seconds(runs[name]))
    outcomes |= {name: Outcome("measured", summarise(values), peaks[name]) for name, values in seconds.items()}
    return {name: outcomes[name] for name in variants}


Item = TypeVar("Item")


def show_progress(items: Collection[Item], what: str) -> Iterable[Item]:
    """The items, with a bar in a terminal that goes away at the end."""
    from tqdm.auto import tqdm

    return tqdm(items, desc=what, leave=False, disable=None)


class Clock:
    """Times one run on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cache = torch.empty(_CACHE_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one run."""
        if self.device.type != "cuda":
            return _seconds(run, self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            self._cache.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1000


def synchronize(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that the CUDA allocator holds during a run; None on other devices."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or in the machine for any other; what nothing uses is given back first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def summarise(seconds: Sequence[float]) -> Timing:
    """Median and percentiles."""
    values = torch.tensor(seconds, dtype=torch.float64)
    median, p20, p80 = values.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist()
    return Timing(median, p20, p80, len(seconds))


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a variant that raised this; the CPU's allocator has no error class of its own."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    no_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    return Outcome("out of memory" if no_memory else "absent", reason=lines[0][:300])


def _warm_up(run: Callable[[], object], device: torch.device, budget: Budget) -> float | Outcome:
    """Run once to compile and load, and unless that took long once more; seconds of the last run, or why it failed."""
    try:
        seconds = _seconds(run, device)
        return seconds if seconds > budget.seconds and device.type == "cpu" else _seconds(run, device)
    except _REFUSALS as error:
        outcome = outcome_of(error)
    if outcome.status == "absent":
        outcome = replace(outcome, reason=_warnings_of(run) or outcome.reason)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return outcome


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _warnings_of(run: Callable[[], object]) -> str:
    """What PyTorch warns of when a backend refuses a call: the reasons, which its error leaves out."""
    with warnings.catch_warnings(record=True) as caught, suppress(*_REFUSALS):
        warnings.simplefilter("always")
        run()
    texts = [str(warning.message).splitlines()[0].split(" (Triggered")[0] for warning in caught]
    return " ".join(dict.fromkeys(texts))[:300]
