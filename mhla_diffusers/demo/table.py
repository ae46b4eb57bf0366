"""The demo's table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Row

HEADER = (
    "attention",
    "held-out loss ↓",
    "digit accuracy ↑",
    "Fréchet distance ↓",
    "rank of attention ↑",
    "entropy (nats)",
    "ms per transformer step ↓",
)


def cells(row: "Row") -> tuple[str, ...]:
    """The columns of one row as text."""
    return (
        row.name,
        f"{row.held_out_loss:.4f}",
        f"{row.digit_accuracy:.1%}",
        f"{row.frechet_distance:.2f}",
        f"{row.rank:.1f}",
        f"{row.entropy:.2f}",
        f"{1000 * row.seconds_per_step:.1f}",
    )


def format_table(rows: Sequence["Row"]) -> str:
    """The table with aligned columns."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
