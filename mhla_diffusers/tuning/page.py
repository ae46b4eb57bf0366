"""What ``mhla tune`` writes to look at: strips of frames, the page and the table."""

import base64
import csv
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..files import write_text, written_aside
from .candidates import Trial, Tuned

_SHOWN = 5
"""Frames of a strip."""
_HEIGHT = 128
"""Pixels of a strip."""
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
td, th { padding: 0.4rem 0.7rem; text-align: right; }
img { max-width: 100%; }
.strips { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; align-items: start; }
.strips > figure { position: sticky; top: 0; }
figure { margin: 0 0 .8rem; }
"""
"""The unpatched strip stays in sight beside all others."""


def write_strip(frames: torch.Tensor, file: Path) -> None:
    """Write some frames of a clip, uint8 (F, 3, H, W), first and last among them, side by side as a PNG."""
    from PIL import Image

    chosen = frames[torch.linspace(0, len(frames) - 1, min(_SHOWN, len(frames))).round().long()]
    sheet = Image.fromarray(torch.cat(list(chosen), dim=-1).movedim(0, -1).contiguous().numpy())
    factor = _HEIGHT / sheet.height
    how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    with written_aside(file) as aside:
        sheet.resize((round(sheet.width * factor), _HEIGHT), how).save(aside)


def write_page(tuned: Tuned, record: Mapping[str, Any], folder: Path) -> None:
    """Write ``tune.html`` and ``tune.csv``: every candidate, in the order of its trial."""
    header = ["candidate", "PSNR, dB", "worst clip", "worst frame", "SSIM", "LPIPS", "s a clip", "speedup", "peak GiB"]
    header.append("prompts")
    rows = [_cells(number, trial) for number, trial in enumerate(tuned.trials)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(text.getvalue(), folder / "tune.csv")
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    own, *others = [
        f"<figure><figcaption>{escape(_caption(number, trial))}</figcaption>"
        f'<img src="data:image/png;base64,{_in_base64(folder / "strips" / f"{number}.png")}"></figure>'
        for number, trial in enumerate(tuned.trials)
        if trial.clips
    ]
    call = ", ".join(f"{name} {value}" for name, value in record.items() if name != "prompts")
    body = f"<style>{_STYLE}</style><p><strong>{escape(str(tuned))}</strong></p><p>{escape(call)}</p>"
    body += f"<ol>{''.join(f'<li>{escape(prompt)}</li>' for prompt in tuned.prompts)}</ol>"
    lines = ["".join(f"<td>{escape(row[column])}</td>" for column in used) for row in (header, *rows)]
    body += f'<div style="overflow-x: auto"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'
    body += "".join(f"<p>{escape(remark)}</p>" for remark in tuned.remarks)
    body += f'<h2>{escape(tuned.prompts[0])}</h2><div class="strips">{own}<div>{"".join(others)}</div></div>'
    title = escape(f"mhla tune: {record['model']}")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
    write_text(f"{head}{body}</html>\n", folder / "tune.html")


def _in_base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("ascii")


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
