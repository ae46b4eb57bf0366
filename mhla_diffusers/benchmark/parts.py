"""Where the time of a transformer goes: self-attention, its projections, cross-attention, feed-forward, the rest."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..families import get_family
from .timing import Timing, summarise, synchronize

PARTS = ("self-attention", "projections", "cross-attention", "feed-forward", "rest")
_REPETITIONS = 3

_Mark = Any
"""A CUDA event, or seconds."""


def time_parts(transformer: Any, run: Callable[[], object], device: torch.device) -> dict[str, Timing]:
    """Seconds of each part of one forward, whose modules are timed by hooks.

    Args:
        transformer: not compiled.
        run: its forward, warmed up.
        device: where it runs.

    Returns:
        Part → timing.
    """
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(_REPETITIONS):
        for part, seconds in _once(transformer, run, device).items():
            found[part].append(seconds)
    return {part: summarise(seconds) for part, seconds in found.items()}


def _once(transformer: Any, run: Callable[[], object], device: torch.device) -> dict[str, float]:
    spans: list[tuple[str, _Mark, _Mark]] = []
    open_marks: list[_Mark] = []
    handles: list[RemovableHandle] = []

    def watch(part: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            open_marks.append(_mark(device))

        def end(*_: Any) -> None:
            spans.append((part, open_marks.pop(), _mark(device)))

        handles.extend((module.register_forward_pre_hook(begin), module.register_forward_hook(end)))

    for part, module in _modules(transformer):
        watch(part, module)
    try:
        synchronize(device)
        start = _mark(device)
        run()
        stop = _mark(device)
        synchronize(device)
    finally:
        for handle in handles:
            handle.remove()
    totals = dict.fromkeys(PARTS, 0.0)
    for part, first, last in spans:
        totals[part] += _between(first, last)
    totals["rest"] = _between(start, stop) - sum(totals[part] for part in PARTS if part not in ("projections", "rest"))
    totals["self-attention"] -= totals["projections"]
    return totals


def _modules(transformer: Any) -> Iterator[tuple[str, nn.Module]]:
    family = get_family(transformer)
    for attn in family.self_attentions(transformer).values():
        yield "self-attention", attn
        yield from (("projections", linear) for linear in (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]))
    for block in family.blocks_of(transformer).values():
        for part, names in (("cross-attention", ("attn2",)), ("feed-forward", ("ff", "ffn"))):
            for name in names:
                module = getattr(block, name, None)
                if isinstance(module, nn.Module):
                    yield part, module


def _mark(device: torch.device) -> _Mark:
    if device.type != "cuda":
        synchronize(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(first: _Mark, last: _Mark) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
