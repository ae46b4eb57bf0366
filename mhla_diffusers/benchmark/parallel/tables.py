"""What ``mhla bench parallel`` writes: tables of what was counted and of what was timed."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...reporting import write_table
from .counting import VARIANTS, Counts, Crossing, name_of
from .gloo import TIMED, Timed
from .plan import Planned

_PASSES = {"forward": "forward", "forward+backward": "with_backward"}
_SENT = ("model", "processes", "tokens", "pass", *(f"{name_of(variant)}, MB" for variant in VARIANTS))
_FROM = ("model", "processes", "softmax", "less from, forward", "less from, forward+backward")
_TIMED = ("model", "processes", "tokens", "pass", *(f"{name_of(variant)}, s" for variant in TIMED))

_PLAN = (
    "model",
    "frames",
    "GPUs",
    "attention",
    "shared by",
    "computing, s",
    "sending, s",
    "sending",
    "weights, GB",
    "one attention, GB",
)


def write_sent(found: Sequence[Counts], folder: Path) -> str:
    """Bytes that one process sends, as ``sent.md`` and ``sent.csv``.

    Returns:
        The Markdown.
    """
    rows = []
    for one in found:
        for name, field in _PASSES.items():
            sent = (one.sent.get(variant) for variant in VARIANTS)
            cells = ("-" if count is None else f"{getattr(count, field) / 1e6:,.1f}" for count in sent)
            rows.append((one.model, str(one.processes), f"{one.shape.tokens:,}", name, *cells))
    return write_table(_SENT, rows, folder, "sent")


def write_crossings(found: Iterable[Crossing], folder: Path) -> str:
    """From which N on MHLA round a ring sends less, as ``crossings.md`` and ``crossings.csv``."""

    def cell(tokens: int | None) -> str:
        return "none looked at" if tokens is None else f"{tokens:,}"

    rows = [
        (one.model, str(one.processes), name_of(one.rival), cell(one.tokens), cell(one.with_backward)) for one in found
    ]
    return write_table(_FROM, rows, folder, "crossings")


def write_timed(found: Iterable[Timed], folder: Path) -> str:
    """Seconds on gloo, as ``timed.md`` and ``timed.csv``."""
    rows = []
    for one in found:
        for name in _PASSES:
            seconds = (one.seconds.get((variant, name)) for variant in TIMED)
            cells = ("-" if value is None else f"{value:.3g}" for value in seconds)
            rows.append((one.model, str(one.processes), f"{one.shape.tokens:,}", name, *cells))
    return write_table(_TIMED, rows, folder, "timed")


def write_plan(found: Iterable[Planned], folder: Path) -> str:
    """Seconds of one forward and what a GPU holds, as ``plan.md`` and ``plan.csv``."""
    rows = [
        (
            one.question.model.name,
            str(one.question.size.frames or 1),
            str(one.layout.processes),
            one.attention,
            str(one.layout),
            _seconds(one.compute),
            _seconds(one.sending),
            f"{one.sending / one.seconds:.0%}",
            f"{one.weight_bytes / 1e9:.1f}",
            f"{one.attention_bytes / 1e9:.2f}",
        )
        for one in found
    ]
    return write_table(_PLAN, rows, folder, "plan")


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
