"""The figure of ``mhla bench parallel``: bytes that one process sends, over the number of tokens."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..panels import colour_of, legend_below, logarithmic, make_panels, thousands
from .attentions import FAR, MHLA, SOFTMAX
from .counting import VARIANTS, Counts, Variant, name_of


def draw_sent(found: Sequence[Counts], file: Path) -> None:
    """Bytes of a forward over N, a panel per model, with the most processes that all variants can share.

    Args:
        found: at least one.
        file: a picture, such as PNG.

    Raises:
        OSError: it cannot be written.
    """
    models = [list(mine) for _, mine in groupby(found, key=lambda one: one.model)]
    shown = [max(mine, key=lambda one: (len(one.sent), one.processes)) for mine in models]
    figure, axes = make_panels(len(models), width=6.0, height=4.4)
    for axis, mine, chosen in zip(axes, models, shown, strict=True):
        _draw(axis, [one for one in mine if one.processes == chosen.processes])
    legend_below(figure, axes[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def _draw(axis: Any, found: Sequence[Counts]) -> None:
    """One panel, of counts of one model and one number of processes."""
    for variant in VARIANTS:
        points = [(one.shape.tokens, one.sent[variant].forward / 1e6) for one in found if variant in one.sent]
        if points:
            axis.plot(*zip(*points, strict=True), label=name_of(variant), **_style(variant))
    tokens = sorted({one.shape.tokens for one in found})
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [thousands(number) for number in tokens], fontsize=8, rotation=30, ha="right")
    axis.minorticks_off()
    logarithmic(axis)
    axis.set_title(f"{found[0].model}, {found[0].processes} processes", fontsize=10, loc="left")
    axis.set_xlabel("tokens N")
    axis.set_ylabel("MB that one process sends, one layer, forward")
    axis.grid(alpha=0.25, which="major")


def _style(variant: Variant) -> dict[str, Any]:
    """MHLA round a ring stands out; by heads it sends what softmax does, so lines coincide and markers tell them."""
    attention, by_heads = variant
    ours = attention != SOFTMAX
    return {
        "color": colour_of(attention),
        "linestyle": "--" if by_heads else ":" if attention == FAR else "-",
        "linewidth": 2.4 if attention == MHLA and not by_heads else 1.4,
        "marker": "x" if ours and by_heads else "o",
        "markersize": 7 if ours and by_heads else 4,
    }
