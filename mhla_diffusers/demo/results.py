"""What the demo measures of each attention, and the table of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..reporting import text_table

_HEADER = (
    "attention",
    "held-out loss ↓",
    "digit accuracy ↑",
    "Fréchet distance ↓",
    "rank of attention ↑",
    "entropy (nats)",
    "ms per transformer step ↓",
)


@dataclass
class Row:
    """What was measured of one variant."""

    name: str
    held_out_loss: float
    digit_accuracy: float
    frechet_distance: float
    rank: float
    entropy: float
    seconds_per_step: float | None = None
    """Of the transformer with two samples; None in all rows where the machine was too busy to tell."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns as text."""
        return (
            self.name,
            f"{self.held_out_loss:.4f}",
            f"{self.digit_accuracy:.1%}",
            f"{self.frechet_distance:.2f}",
            f"{self.rank:.1f}",
            f"{self.entropy:.2f}",
            *([f"{1000 * self.seconds_per_step:.1f}"] if self.seconds_per_step is not None else []),
        )


@dataclass
class Outcome:
    """One variant: its row, what it generated, and what it learnt to mix."""

    row: Row
    pictures: list[torch.Tensor]
    """For every scene (F, 64, 64) in [0, 1]."""
    mixing: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Layer → its mixing matrix (M, M) before and after; empty where it is not learnt."""


def header_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Names of the columns that the rows have."""
    return _HEADER[: len(rows[0].cells)]


def format_table(rows: Sequence[Row]) -> str:
    """The table with aligned columns."""
    return text_table(header_of(rows), (row.cells for row in rows), right=True)
