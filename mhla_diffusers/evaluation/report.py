"""The report of a comparison: one table, the same samples side by side, as HTML, Markdown and JSON."""

import platform
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

from ..files import write_json, write_text
from ..reporting import html_media, html_page, html_table, html_table_of
from .compare import Variant

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
_ADM = ("fid", "inception_score", "sfid", "precision", "recall")
_VBENCH = ("quality", "semantic", "total")
_SANA = ("fid", "clip_score", "geneval")
_PAPER: dict[str, tuple[tuple[str, ...], dict[str, tuple[float, ...]]]] = {
    "dit-xl-2-256": (
        _ADM,
        {
            "paper: DiT-XL/2, softmax": (9.62, 121.50, 6.85, 0.67, 0.67),
            "paper: DiT-XL/2, MHLA": (8.34, 121.27, 5.52, 0.69, 0.65),
            "paper: DiT-XL/2 guided, softmax": (2.27, 278.24, 4.60, 0.83, 0.57),
            "paper: DiT-XL/2 guided, MHLA": (2.54, 252.07, 4.67, 0.83, 0.56),
        },
    ),
    "sana": (_SANA, {"paper: SANA": (6.10, 28.15, 0.64), "paper: SANA-MHLA": (5.90, 28.26, 0.68)}),
    "wan2.1-t2v-1.3b": (
        _VBENCH,
        {
            "paper: Wan-FA": (85.23, 75.65, 83.31),
            "paper: Wan-LA": (69.96, 11.38, 58.24),
            "paper: Wan-MHLA": (84.26, 76.16, 82.62),
            "paper: Wan-MHLA-H": (84.87, 79.59, 83.82),
        },
    ),
}
"""Part of a Hub id → names of scores and the rows of Tab. 9, 4 and 5."""
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


def paper_rows(model: str | None) -> dict[str, dict[str, float]]:
    """Return the paper's rows for a model, by its Hub id or folder: name → scores; empty for other models."""
    name = (model or "").lower()
    scores, rows = next((found for part, found in _PAPER.items() if part in name), ((), {}))
    return {row: dict(zip(scores, values, strict=True)) for row, values in rows.items()}


def score_table(variants: Sequence[Variant]) -> Table:
    """Tabulate the scores of the variants, then the paper's rows of their model."""
    rows = {variant.name: variant.scores for variant in variants} | paper_rows(variants[0].choices.get("model"))
    names = list(dict.fromkeys(name for scores in rows.values() for name in scores))
    cells = [
        [row, *(f"{scores[name]:.4g}" if name in scores else "–" for name in names)] for row, scores in rows.items()
    ]
    return ["variant", *(_HEADINGS.get(name, name) for name in names)], cells


def difference_table(variants: Sequence[Variant]) -> Table:
    """Tabulate paired differences; no rows if nothing was paired."""
    base, *others = variants
    rows = [
        [
            *(variant.name, name, f"{found.value:+.4g}", f"{found.low:+.4g} to {found.high:+.4g}"),
            "yes" if found.excludes_zero else "no",
        ]
        for variant in others
        for name, found in variant.differences.items()
    ]
    return ["variant", "score", f"difference from {base.name}", "95 % interval", "sign settled"], rows


def similarity_table(variants: Sequence[Variant]) -> Table:
    """Tabulate similarities to the first variant; no rows if none was measured."""
    base, *others = variants
    rows = [
        [variant.name, _HEADINGS.get(name, name), f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}"]
        for variant in others
        for name, found in variant.similarities.items()
    ]
    return ["variant", "measure", f"similarity to {base.name}", "95 % interval"], rows


def write_report(
    variants: Sequence[Variant],
    folder: Path,
    *,
    remarks: Sequence[str] = (),
    reference: Path | None = None,
    shown: int = 6,
) -> Path:
    """Write ``report.html`` (self-contained), ``report.md`` and ``comparison.json``, and return the HTML file.

    Args:
        variants: measured by :func:`compare_sets`.
        folder: where to.
        remarks: on the scores.
        reference: what distances were measured from.
        shown: number of samples to show side by side, from the first on.
    """
    base = variants[0]
    found = {
        variant.name: {
            "choices": variant.choices,
            "scores": variant.scores,
            "differences": {name: interval._asdict() for name, interval in variant.differences.items()},
            "similarities": {name: interval._asdict() for name, interval in variant.similarities.items()},
        }
        for variant in variants
    }
    facts = {
        "family": base.choices.get("family"),
        "model": base.choices.get("model") or "the tiny pipeline",
        "samples": len(base.samples),
        "seed": base.choices.get("seed"),
        "settings": base.choices.get("settings"),
        "reference": reference.name if reference is not None else "none",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    said = ", ".join(f"{name}: {value}" for name, value in facts.items())
    tables = {"Paired differences": difference_table(variants), "Similarity": similarity_table(variants)}
    tables = {title: table for title, table in tables.items() if table[1]}

    sections = [f"<h2>{title}</h2><p>{_INTERVALS}</p>{html_table(*table)}" for title, table in tables.items()]
    pictures = [
        [escape(sample.text), *(html_media(variant.folder / sample.file, variant.name) for variant in variants)]
        for sample in base.samples[:shown]
    ]
    side_by_side = html_table_of(["text", *(variant.name for variant in variants)], pictures)
    notes = [f"<p>{escape(remark)}</p>" for remark in remarks]
    parts = [html_table(*score_table(variants)), f"<p>{escape(said)}</p>", *sections, *notes]
    body = "".join([*parts, "<h2>The same noise and text</h2>", side_by_side])

    markdown = [f"# {_TITLE}", _markdown(score_table(variants)), said]
    for title, table in tables.items():
        markdown += [f"## {title}", _markdown(table)]

    folder.mkdir(parents=True, exist_ok=True)
    write_json({"variants": found, "paper": paper_rows(base.choices.get("model"))}, folder / "comparison.json")
    write_text("\n\n".join([*markdown, *remarks]) + "\n", folder / "report.md")
    write_text(html_page(_TITLE, body), folder / "report.html")
    return folder / "report.html"


def _markdown(table: Table) -> str:
    header, rows = table
    lines: list[Sequence[str]] = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
