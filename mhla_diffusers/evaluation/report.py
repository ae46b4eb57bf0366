"""The report of a comparison: one table, the same samples side by side, as HTML and JSON."""

import platform
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

from ..files import write_json, write_text
from ..reporting import html_media, html_page, html_table
from .compare import Variant

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
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


def score_table(variants: Sequence[Variant]) -> Table:
    """Tabulate the scores of the variants."""
    names = list(dict.fromkeys(name for variant in variants for name in variant.scores))
    rows = [
        [variant.name, *(f"{variant.scores[name]:.4g}" if name in variant.scores else "–" for name in names)]
        for variant in variants
    ]
    return ["variant", *(_HEADINGS.get(name, name) for name in names)], rows


def difference_table(variants: Sequence[Variant]) -> Table:
    """Tabulate paired differences; no rows if nothing was paired."""
    base, *others = variants
    rows = []
    for variant in others:
        for name, found in variant.differences.items():
            interval = f"{found.low:+.4g} to {found.high:+.4g}"
            settled = "yes" if found.low > 0 or found.high < 0 else "no"
            rows.append([variant.name, name, f"{found.value:+.4g}", interval, settled])
    return ["variant", "score", f"difference from {base.name}", "95 % interval", "sign settled"], rows


def similarity_table(variants: Sequence[Variant]) -> Table:
    """Tabulate how alike samples are to the first variant's, with intervals; no rows if nothing was compared."""
    rows = [
        [variant.name, _HEADINGS.get(name, name), f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}"]
        for variant in variants[1:]
        for name, found in variant.similarities.items()
    ]
    return ["variant", "measure", f"similarity to {variants[0].name}", "95 % interval"], rows


def write_report(
    variants: Sequence[Variant],
    folder: Path,
    *,
    remarks: Sequence[str] = (),
    reference: Path | None = None,
    shown: int = 6,
) -> Path:
    """Write ``report.html`` (self-contained) and ``comparison.json``, and return the HTML file.

    Args:
        variants: measured by :func:`compare_sets`.
        folder: where to.
        remarks: on the scores.
        reference: what distances were measured from.
        shown: number of samples to show side by side, from the first on.
    """
    base = variants[0]
    facts = {
        "family": base.choices.get("family"),
        "model": base.choices.get("model") or "the tiny pipeline",
        **{name: base.choices.get(name) for name in ("seed", "settings")},
        "samples": len(base.samples),
        "reference": reference.name if reference is not None else "none",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    parts = [html_table(*score_table(variants))]
    parts.append(f"<p>{escape(', '.join(f'{name}: {value}' for name, value in facts.items()))}</p>")
    tables = ("Paired differences", difference_table(variants)), ("Similarity", similarity_table(variants))
    for title, table in tables:
        if table[1]:
            parts.append(f"<h2>{title}</h2><p>Over the same samples, with 95 % bootstrap intervals of the samples.</p>")
            parts.append(html_table(*table))
    parts += [f"<p>{escape(remark)}</p>" for remark in remarks]
    pictures = [
        [escape(sample.text), *(html_media(variant.folder / sample.file, variant.name) for variant in variants)]
        for sample in base.samples[:shown]
    ]
    parts.append("<h2>The same noise and text</h2>")
    parts.append(html_table(["text", *(variant.name for variant in variants)], pictures, is_html=True))

    found = {
        variant.name: {
            "choices": variant.choices,
            "scores": variant.scores,
            "differences": {name: interval._asdict() for name, interval in variant.differences.items()},
            "similarities": {name: interval._asdict() for name, interval in variant.similarities.items()},
        }
        for variant in variants
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json({"variants": found, "remarks": list(remarks)}, folder / "comparison.json")
    write_text(html_page("Attention variants compared", "".join(parts)), folder / "report.html")
    return folder / "report.html"
