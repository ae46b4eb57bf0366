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
from .compare import Comparison

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
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
"""Scores with a known better direction; others are shown by name only."""


def score_table(comparison: Comparison) -> Table:
    """The variants, then the paper's rows."""
    rows = {variant.name: variant.scores for variant in comparison.variants} | comparison.paper
    names = list(dict.fromkeys(name for scores in rows.values() for name in scores))
    cells = [
        [row, *(f"{scores[name]:.4g}" if name in scores else "–" for name in names)] for row, scores in rows.items()
    ]
    return ["variant", *(_HEADINGS.get(name, name) for name in names)], cells


def difference_table(comparison: Comparison) -> Table:
    """Paired differences; no rows if nothing was paired."""
    base, *others = comparison.variants
    rows = []
    for variant in others:
        for name, found in variant.differences.items():
            settled, interval = "yes" if found.excludes_zero else "no", f"{found.low:+.4g} to {found.high:+.4g}"
            rows.append([variant.name, name, f"{found.value:+.4g}", interval, settled])
    return ["variant", "score", f"difference from {base.name}", "95 % interval", "sign settled"], rows


def similarity_table(comparison: Comparison) -> Table:
    """Similarities to the first variant; no rows if none was measured."""
    base, *others = comparison.variants
    rows = [
        [variant.name, _HEADINGS.get(name, name), f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}"]
        for variant in others
        for name, found in variant.similarities.items()
    ]
    return ["variant", "measure", f"similarity to {base.name}", "95 % interval"], rows


def write_report(comparison: Comparison, folder: Path, shown: int = 6) -> Path:
    """Write ``report.html`` (self-contained), ``report.md`` and ``comparison.json``.

    Args:
        comparison: what was measured.
        folder: where to.
        shown: number of samples to show side by side, from the first on.

    Returns:
        The HTML file.
    """
    variants, base = comparison.variants, comparison.variants[0]
    found = {
        "variants": {
            variant.name: {
                "choices": variant.choices,
                "scores": variant.scores,
                "differences": {name: asdict(interval) for name, interval in variant.differences.items()},
                "similarities": {name: asdict(interval) for name, interval in variant.similarities.items()},
            }
            for variant in variants
        },
        "paper": comparison.paper,
    }
    facts = {
        "family": base.choices.get("family"),
        "model": base.choices.get("model") or "the tiny pipeline",
        "samples": len(base.samples),
        "seed": base.choices.get("seed"),
        "settings": base.choices.get("settings"),
        "reference": comparison.reference.name if comparison.reference is not None else "none",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    said = ", ".join(f"{name}: {value}" for name, value in facts.items())
    tables = {"Paired differences": difference_table(comparison), "Similarity": similarity_table(comparison)}
    tables = {title: table for title, table in tables.items() if table[1]}

    sections = [f"<h2>{title}</h2><p>{_INTERVALS}</p>{html_table(*table)}" for title, table in tables.items()]
    remarks = [f"<p>{escape(remark)}</p>" for remark in comparison.remarks]
    pictures = [
        [escape(sample.text), *(html_media(variant.folder / sample.file, variant.name) for variant in variants)]
        for sample in base.samples[:shown]
    ]
    side_by_side = html_table_of(["text", *(variant.name for variant in variants)], pictures)
    parts = [html_table(*score_table(comparison)), f"<p>{escape(said)}</p>", *sections, *remarks]
    body = "".join([*parts, "<h2>The same noise and text</h2>", side_by_side])

    markdown = [f"# {_TITLE}", _markdown(score_table(comparison)), said]
    for title, table in tables.items():
        markdown += [f"## {title}", _markdown(table)]

    folder.mkdir(parents=True, exist_ok=True)
    write_json(found, folder / "comparison.json")
    write_text("\n\n".join([*markdown, *comparison.remarks]) + "\n", folder / "report.md")
    write_text(html_page(_TITLE, body), folder / "report.html")
    return folder / "report.html"


def _markdown(table: Table) -> str:
    header, rows = table
    lines: list[Sequence[str]] = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
