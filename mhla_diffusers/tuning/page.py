"""What ``mhla tune`` writes to look at: strips of frames, the page and the table."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..files import write_text, written_aside
from ..reporting import html_media, html_page, html_table
from .candidates import Trial, Tuned

_SHOWN = 5
"""Frames of a strip."""
_HEIGHT = 128
"""Pixels of a strip."""
_WIDTH, _DEPTH, _MARGIN = 900, 420, 56
"""Size of the plot, and the room for the numbers of its axes."""
_STYLE = """
svg text { font: 12px system-ui, sans-serif; fill: currentColor; stroke: none; }
.strips { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; align-items: start; }
.strips > figure { position: sticky; top: 0; }
figure { margin: 0 0 .8rem; }
"""
"""The unpatched strip stays in sight beside all others."""


def write_strip(frames: torch.Tensor, file: Path) -> None:
    """Write some frames of a clip, first and last among them, side by side as a picture.

    Args:
        frames: uint8 (F, 3, H, W).
        file: a PNG.
    """
    from PIL import Image

    chosen = frames[torch.linspace(0, len(frames) - 1, min(_SHOWN, len(frames))).round().long()]
    sheet = Image.fromarray(torch.cat(list(chosen), dim=-1).movedim(0, -1).contiguous().numpy())
    factor = _HEIGHT / sheet.height
    how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    with written_aside(file) as aside:
        sheet.resize((round(sheet.width * factor), _HEIGHT), how).save(aside)


def write_page(tuned: Tuned, record: Mapping[str, Any], folder: Path) -> None:
    """Write ``tune.html`` and ``tune.csv``: every candidate, numbered as in the plot."""
    header = ["candidate", "PSNR, dB", "worst clip", "worst frame", "SSIM", "LPIPS", "s a clip", "speedup", "peak GiB"]
    header.append("prompts")
    rows = [_cells(number, trial) for number, trial in enumerate(tuned.trials)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(text.getvalue(), folder / "tune.csv")
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    own, *others = [
        f"<figure><figcaption>{escape(_caption(number, trial))}</figcaption>"
        f"{html_media(folder / 'strips' / f'{number}.png', trial.candidate.name)}</figure>"
        for number, trial in enumerate(tuned.trials)
        if trial.clips
    ]
    call = ", ".join(f"{name} {value}" for name, value in record.items() if name != "prompts")
    body = f"<style>{_STYLE}</style><p><strong>{escape(str(tuned))}</strong></p><p>{escape(call)}</p>"
    body += f"<ol>{''.join(f'<li>{escape(prompt)}</li>' for prompt in tuned.prompts)}</ol>"
    body += _frontier(tuned) + html_table([header[i] for i in used], [[row[i] for i in used] for row in rows])
    body += "".join(f"<p>{escape(remark)}</p>" for remark in tuned.remarks)
    body += f'<h2>{escape(tuned.prompts[0])}</h2><div class="strips">{own}<div>{"".join(others)}</div></div>'
    write_text(html_page(f"mhla tune: {record['model']}", body), folder / "tune.html")


def _cells(number: int, trial: Trial) -> list[str]:
    """Return the cells of a candidate; what does not apply is empty."""
    if not trial.clips:
        return [f"{number}: {trial.candidate.name} failed: {trial.failed}", *[""] * 9]
    peak = "" if trial.peak_bytes is None else f"{trial.peak_bytes / 2**30:.2f}"
    means = [trial.mean("ssim"), trial.mean("lpips")]
    judged = [f"{value:.1f}" for value in (trial.psnr, trial.worst_clip, trial.worst_frame)]
    judged += ["" if value != value else f"{value:.3f}" for value in means]
    times = [f"{trial.mean('seconds'):.3g}", f"{trial.speedup:.2f}x", peak, str(len(trial.clips))]
    return [f"{number}: {trial.candidate.name}", *(judged if number else [""] * len(judged)), *times]


def _caption(number: int, trial: Trial) -> str:
    if not number:
        return trial.candidate.name
    clip = trial.clips[0]
    return f"{number}: {trial.candidate.name}, {clip['psnr']:.1f} dB in {clip['seconds']:.3g} s"


def _frontier(tuned: Tuned) -> str:
    """Plot dB over seconds of the first prompt; a line joins the best candidates."""
    own, target = tuned.trials[0].clips[0]["seconds"], tuned.target
    points = [
        (number, trial.clips[0]["seconds"], trial.clips[0]["psnr"], trial)
        for number, trial in enumerate(tuned.trials)
        if number and trial.clips
    ]
    goal = [] if target.psnr is None else [target.psnr]
    limit = own / target.speedup if target.speedup else None
    left, right = 0.0, 1.08 * max([own, *(x for _, x, _, _ in points)])
    low, high = min([*goal, *(y for _, _, y, _ in points)]) - 2, max([*goal, *(y for _, _, y, _ in points)]) + 2

    def across(seconds: float) -> float:
        return _MARGIN + (seconds - left) / (right - left) * (_WIDTH - _MARGIN)

    def down(psnr: float) -> float:
        return (high - psnr) / (high - low) * (_DEPTH - _MARGIN)

    def line(ends: Sequence[float], dashes: str = "", text: str = "", at: tuple[float, float] = (0, 0)) -> str:
        x1, y1, x2, y2 = ends
        label = f'<text x="{at[0]:.0f}" y="{at[1]:.0f}">{escape(text)}</text>' if text else ""
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-dasharray="{dashes}"/>{label}'

    bottom = _DEPTH - _MARGIN
    parts = [line((_MARGIN, 0, _MARGIN, bottom)), line((_MARGIN, bottom, _WIDTH, bottom))]
    for seconds in _ticks(left, right):
        parts.append(line((across(seconds), bottom, across(seconds), bottom + 5)))
        parts.append(f'<text x="{across(seconds):.0f}" y="{bottom + 20}" text-anchor="middle">{seconds:g}</text>')
    for psnr in _ticks(low, high):
        parts.append(line((_MARGIN - 5, down(psnr), _MARGIN, down(psnr))))
        parts.append(f'<text x="{_MARGIN - 9}" y="{down(psnr) + 4:.0f}" text-anchor="end">{psnr:g}</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_DEPTH - 8}" text-anchor="end">seconds of the first prompt</text>')
    parts.append(f'<text x="{_MARGIN + 8}" y="14">PSNR, dB</text>')
    for x, text in [(own, "unpatched"), *([(limit, f"{target.speedup:g}x")] if limit else [])]:
        parts.append(line((across(x), 0, across(x), bottom), "6 4", text, (across(x) + 5, bottom - 8)))
    parts += [line((_MARGIN, down(y), _WIDTH, down(y)), "2 4", f"{y:g} dB", (_WIDTH - 52, down(y) - 5)) for y in goal]
    front = [
        (x, y) for _, x, y, _ in points if not any(a <= x and b >= y and (a, b) != (x, y) for _, a, b, _ in points)
    ]
    path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in sorted(front))
    parts.append(f'<polyline points="{path}" fill="none" stroke="#0072b2" stroke-width="2"/>')
    for number, x, y, trial in points:
        colour = "#d55e00" if trial is tuned.best else "#0072b2"
        parts.append(
            f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="10" fill="{colour}" stroke="none">'
            f"<title>{escape(_caption(number, trial))}</title></circle>"
            f'<text x="{across(x):.1f}" y="{down(y) + 4:.1f}" text-anchor="middle" style="fill:#fff">{number}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_DEPTH}" role="img" aria-label="PSNR over seconds" stroke="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range, four to ten of them."""
    power = 10.0 ** torch.tensor((high - low) / 4).log10().floor().item()
    step = next(factor * power for factor in (5, 2, 1) if factor * power <= (high - low) / 4)
    return [round(n * step, 6) for n in range(int(low // step), int(high // step) + 1) if low <= n * step]
