"""One self-contained HTML page with everything that the demo made."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .table import HEADER, cells

if TYPE_CHECKING:
    from .run import Row

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
"""


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
    head = "".join(f"<th>{escape(text)}</th>" for text in HEADER)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in rows)
    images = "".join(
        f'<h2>{escape(heading)}</h2><img src="{_embedded(path)}" alt="{escape(heading)}">'
        for heading, path in figures.items()
    )
    facts = ", ".join(f"{escape(name)}: {escape(value)}" for name, value in circumstances.items())
    file.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>MHLA on tiny-{family}</title>'
        f"<style>{_STYLE}</style></head><body><h1>MHLA on tiny-{family}</h1>"
        "<p>Every patched row began from the same trained weights and was adapted on the same digits for the same "
        "number of updates. Everything on this page was computed in one run.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{facts}</p>{images}</body></html>\n",
        encoding="utf-8",
    )


def _embedded(path: Path) -> str:
    kind = "gif" if path.suffix == ".gif" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
