"""The report of a comparison: one table, the same samples side by side, as HTML, Markdown and JSON."""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch

from ..files import write_json, write_text
from ..reporting import html_media, html_page, html_table, html_table_of
from .compare import Comparison, Row

_TITLE = "Attention variants compared"
_INTERVALS = "Over the same samples, with 95 % bootstrap intervals of the samples."
_HEADINGS = {
    "fid": "FID ↓",
    "sfid": "sFID ↓",
    "kid": "KID ↓",
    "inception_score": "Inception score ↑",
    "precision": "precision ↑",
    "recall": "recall ↑",
    "clip_score": "CLIP score ↑",
    "geneval": "GenEval ↑",
    "quality": "Quality ↑",
    "semantic": "Semantic ↑",
    "total": "Total ↑",
    "held_out_loss": "held-out loss ↓",
    "psnr": "PSNR (dB) ↑",
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
}
"""Scores of which it is known where better values lie; others stand under their own name."""


def write_report(comparison: Comparison, folder: Path, shown: int = 6) -> Path:
    """Write ``report.html`` (self-contained), ``report.md`` and ``comparison.json``.

    Args:
        comparison: what was measured.
        folder: where to.
        shown: how many samples are shown side by side, the first ones.

    Returns:
        The HTML file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    write_json(_as_json(comparison), folder / "comparison.json")
    write_text(_markdown(comparison), folder / "report.md")
    write_text(_html(comparison, shown), page)
    return page


def score_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the variants, then the paper's rows."""
    names = list(dict.fromkeys(name for row in comparison.rows for name in row.scores))
    names += [name for row in comparison.paper.values() for name in row if name not in names]
    names = list(dict.fromkeys(names))
    header = ["variant", *(_HEADINGS.get(name, name) for name in names)]
    measured = [(row.variant.name, row.scores) for row in comparison.rows]
    rows = [
        [name, *(f"{scores[score]:.4g}" if score in scores else "–" for score in names)]
        for name, scores in (*measured, *comparison.paper.items())
    ]
    return header, rows


def difference_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the paired differences; no rows where nothing was paired."""
    base = comparison.rows[0].variant.name
    header = ["variant", "score", f"difference from {base}", "95 % interval", "sign settled"]
    rows = []
    for row in comparison.rows[1:]:
        for name, found in row.differences.items():
            settled = "yes" if found.excludes_zero else "no"
            interval = f"{found.low:+.4g} to {found.high:+.4g}"
            rows.append([row.variant.name, name, f"{found.value:+.4g}", interval, settled])
    return header, rows


def similarity_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the similarities to the first variant; no rows where none was measured."""
    header = ["variant", "measure", f"similarity to {comparison.rows[0].variant.name}", "95 % interval"]
    rows = [
        [row.variant.name, _HEADINGS.get(name, name), f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}"]
        for row in comparison.rows[1:]
        for name, found in row.similarities.items()
    ]
    return header, rows


def _sections(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of the tables with intervals, those that have rows."""
    tables = {"Paired differences": difference_table(comparison), "Similarity": similarity_table(comparison)}
    return [(title, header, rows) for title, (header, rows) in tables.items() if rows]


def _facts(comparison: Comparison) -> str:
    choices, samples = comparison.rows[0].variant.choices, comparison.rows[0].variant.samples
    facts = {
        "family": choices.get("family"),
        "model": choices.get("model") or "the tiny pipeline",
        "samples": len(samples),
        "seed": choices.get("seed"),
        "settings": choices.get("settings"),
        "reference": comparison.reference.name if comparison.reference is not None else "none",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    return ", ".join(f"{name}: {value}" for name, value in facts.items())


def _html(comparison: Comparison, shown: int) -> str:
    intervals = "".join(
        f"<h2>{title}</h2><p>{_INTERVALS}</p>{html_table(header, rows)}"
        for title, header, rows in _sections(comparison)
    )
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in comparison.remarks)
    body = f"{html_table(*score_table(comparison))}<p>{escape(_facts(comparison))}</p>{intervals}{remarks}"
    return html_page(_TITLE, f"{body}<h2>The same noise and text</h2>{_side_by_side(comparison.rows, shown)}")


def _side_by_side(rows: Sequence[Row], shown: int) -> str:
    header = ["text", *(row.variant.name for row in rows)]
    cells = [
        [escape(sample.text), *(html_media(row.variant.folder / sample.file, row.variant.name) for row in rows)]
        for sample in rows[0].variant.samples[:shown]
    ]
    return html_table_of(header, cells)


def _markdown(comparison: Comparison) -> str:
    parts = [f"# {_TITLE}", _markdown_table(*score_table(comparison)), _facts(comparison)]
    for title, header, rows in _sections(comparison):
        parts += [f"## {title}", _markdown_table(header, rows)]
    return "\n\n".join([*parts, *comparison.remarks]) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _as_json(comparison: Comparison) -> dict[str, object]:
    return {
        "variants": {
            row.variant.name: {
                "choices": row.variant.choices,
                "scores": row.scores,
                "differences": {name: asdict(interval) for name, interval in row.differences.items()},
                "similarities": {name: asdict(interval) for name, interval in row.similarities.items()},
            }
            for row in comparison.rows
        },
        "paper": comparison.paper,
    }
