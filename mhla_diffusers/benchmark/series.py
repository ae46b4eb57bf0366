"""Which results are drawn together, and in which colours."""

from collections.abc import Sequence

from .results import Row
from .scaling import SOFTMAX
from .variants import COMPILED, HYBRID

COLOURS = {
    "softmax": "#555555",
    "own linear": "#009e73",
    "plain linear": "#e69f00",
    HYBRID: "#56b4e9",
    "MHLA": "#0072b2",
    "unpatched": "#555555",
    "self-attention": "#0072b2",
    "projections": "#56b4e9",
    "cross-attention": "#e69f00",
    "feed-forward": "#009e73",
    "text encoding": "#e69f00",
    "denoising": "#0072b2",
    "VAE": "#009e73",
    "rest": "#cccccc",
}
"""Told apart by colour-blind people too."""


def group_of(variant: str) -> str:
    """What a variant is drawn as: all softmax backends are one."""
    name = variant.removesuffix(COMPILED)
    return next((group for group in (SOFTMAX, HYBRID, "MHLA", "plain linear") if name.startswith(group)), name)


def colour_of(variant: str) -> str:
    """Of a variant or part."""
    return COLOURS.get(group_of(variant), "#cccccc")


def fastest_by_group(rows: Sequence[Row]) -> dict[str, Row]:
    """Group → its fastest measured row, compiled variants apart: of the softmax backends the best is shown."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.median is None or row.layers == 0:
            continue
        compiled = COMPILED if row.variant.endswith(COMPILED) else ""
        name = group_of(row.variant) + compiled
        if name not in best or row.median < (best[name].median or 0):
            best[name] = row
    order = list(COLOURS)
    return dict(
        sorted(best.items(), key=lambda item: order.index(group_of(item[0])) if group_of(item[0]) in order else 0)
    )
