"""One self-contained HTML page with everything that the demo made."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..reporting import html_media, html_page, html_table
from .table import HEADER, cells

if TYPE_CHECKING:
    from .run import Row


def write_page(
    file: Path,
    family: str,
    rows: Sequence["Row"],
    figures: Mapping[str, Path],
    circumstances: Mapping[str, str],
) -> None:
    """Write the page; images are inside it, so that the file can be sent alone.

    Args:
        file: where to.
        family: which tiny pipeline was used.
        rows: of the table.
        figures: heading → image file.
        circumstances: machine, date and the like.
    """
    images = "".join(f"<h2>{escape(heading)}</h2>{html_media(path, heading)}" for heading, path in figures.items())
    facts = ", ".join(f"{escape(name)}: {escape(value)}" for name, value in circumstances.items())
    body = (
        "<p>Every patched row began from the same trained weights and was adapted on the same digits for the same "
        f"number of updates. Everything on this page was computed in one run.</p>{html_table(HEADER, map(cells, rows))}"
        f"<p>{facts}</p>{images}"
    )
    file.write_text(html_page(f"MHLA on tiny-{family}", body), encoding="utf-8")
