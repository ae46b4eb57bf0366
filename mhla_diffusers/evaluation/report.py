"""The report of a comparison: its tables, the same samples side by side, as HTML and JSON."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..files import write_json, write_text
from ..reporting import html_media, html_page, html_table
from .compare import Variant

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
_BETTER = dict.fromkeys(("fid", "sfid", "kid", "lpips"), " ↓") | dict.fromkeys(
    ("inception_score", "precision", "recall", "clip_score", "psnr", "ssim"), " ↑"
)


def score_table(variants: Sequence[Variant]) -> Table:
    """Tabulate the scores of the variants."""
    names = list(dict.fromkeys(name for variant in variants for name in variant.scores))
    rows = [
        [variant.name, *(f"{variant.scores[name]:.4g}" if name in variant.scores else "–" for name in names)]
        for variant in variants
    ]
    return ["variant", *(name + _BETTER.get(name, "") for name in names)], rows


def interval_table(variants: Sequence[Variant]) -> Table:
    """Tabulate differences from the first variant and similarity to it; no rows if nothing was paired."""
    rows = []
    for variant in variants[1:]:
        for what, found, sign in (("difference", variant.differences, "+"), ("similarity", variant.similarities, "")):
            for name, interval in found.items():
                rows.append([variant.name, f"{name}, {what}", *(f"{number:{sign}.4g}" for number in interval)])
    return ["variant", f"from {variants[0].name}", "mean", "95 % from", "to"], rows


def write_report(variants: Sequence[Variant], folder: Path, remarks: Sequence[str] = (), shown: int = 6) -> Path:
    """Write ``report.html`` (self-contained) and ``comparison.json``, and return the HTML file.

    Args:
        variants: measured by :func:`compare_sets`.
        folder: where to.
        remarks: on the scores.
        shown: number of samples to show side by side, from the first on.
    """
    base = variants[0]
    made = ", ".join(f"{name}: {base.choices.get(name)}" for name in ("family", "model", "seed", "settings"))
    pictures = [
        [escape(sample.text), *(html_media(variant.folder / sample.file, variant.name) for variant in variants)]
        for sample in base.samples[:shown]
    ]
    body = [
        html_table(*score_table(variants)),
        *(f"<p>{escape(text)}</p>" for text in (made, f"{len(base.samples)} samples", *remarks)),
        "<h2>Over the same samples, with bootstrap intervals</h2>",
        html_table(*interval_table(variants)),
        "<h2>The same noise and text</h2>",
        html_table(["text", *(variant.name for variant in variants)], pictures, is_html=True),
    ]
    found = {
        variant.name: {
            "choices": variant.choices,
            "scores": variant.scores,
            "differences": {name: interval._asdict() for name, interval in variant.differences.items()},
            "similarities": {name: interval._asdict() for name, interval in variant.similarities.items()},
        }
        for variant in variants
    }
    write_json({"variants": found, "remarks": list(remarks)}, folder / "comparison.json")
    write_text(html_page("Attention variants compared", "".join(body)), folder / "report.html")
    return folder / "report.html"
