"""Timing of several variants, interleaved, so that a slow spell of the machine meets all of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over its repetitions."""

    median: float
    p20: float
    p80: float
    repetitions: int


def time_interleaved(
    variants: Mapping[str, Callable[[], object]], repetitions: Mapping[str, int], device: torch.device
) -> dict[str, Timing]:
    """Run every variant once to warm up, then round after round until each has its repetitions.

    Args:
        variants: name → what to time.
        repetitions: name → how often.
        device: where they run; an accelerator is waited for.

    Returns:
        Name → timing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for turn in range(max(repetitions.values())):
        for name, run in variants.items():
            if turn < repetitions[name]:
                seconds[name].append(_seconds(run, device))
    return {name: _summary(values) for name, values in seconds.items()}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _summary(seconds: list[float]) -> Timing:
    values = torch.tensor(seconds, dtype=torch.float64)
    median, p20, p80 = values.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist()
    return Timing(median, p20, p80, len(seconds))
