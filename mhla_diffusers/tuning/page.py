"""The report of ``mhla tune``: strips of frames, and an HTML page."""

import base64
import math
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
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
td { padding: .3rem .8rem; border-bottom: 1px solid #8884; text-align: right; }
td:first-child { text-align: left; }
tr:first-child { font-weight: bold; }
tr:nth-child(2) { position: sticky; top: 0; background: Canvas; }
"""
"""The unpatched clip stays in sight above all others."""


def write_strip(frames: torch.Tensor, file: Path) -> None:
    """Write some frames of a clip, uint8 (F, 3, H, W), first and last among them, side by side as a PNG."""
    from PIL import Image

    chosen = frames[torch.linspace(0, len(frames) - 1, min(_SHOWN, len(frames))).round().long()]
    sheet = Image.fromarray(torch.cat(list(chosen), dim=-1).movedim(0, -1).contiguous().numpy())
    factor = _HEIGHT / sheet.height
    how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    with written_aside(file) as aside:
        sheet.resize((round(sheet.width * factor), _HEIGHT), how).save(aside)


def write_page(tuned: Tuned, record: Mapping[str, Any], file: Path) -> None:
    """Write every candidate, in the order of its trial, as an HTML page."""
    header = ("candidate", "PSNR, dB", "worst clip", "SSIM", "LPIPS", "seconds", "speedup", "prompts")
    rows = [_cells(number, trial) for number, trial in enumerate(tuned.trials)]
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    strips = [file.parent / "strips" / f"{number}.png" for number in range(len(tuned.trials))]
    encoded = [base64.b64encode(x.read_bytes()).decode() if x.is_file() else "" for x in strips]
    shown = [x and f'<img src="data:image/png;base64,{x}">' for x in encoded]
    table = ""
    for cells, frames in zip([header, *rows], ["frames", *shown], strict=True):
        table += f"<tr>{''.join(f'<td>{escape(cells[column])}</td>' for column in used)}<td>{frames}</td></tr>"
    title = escape(f"mhla tune: {record['model']}")
    call = ", ".join(f"{name} {value}" for name, value in record.items() if name != "prompts")
    body = f"<h1>{title}</h1><p><strong>{escape(str(tuned))}</strong></p><p>{escape(call)}</p>"
    body += f"<ol>{''.join(f'<li>{escape(prompt)}</li>' for prompt in tuned.prompts)}</ol><table>{table}</table>"
    body += "".join(f"<p>{escape(remark)}</p>" for remark in tuned.remarks)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    write_text(f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n", file)


def _cells(number: int, trial: Trial) -> list[str]:
    """Return the cells of a candidate; what does not apply is empty."""
    if not trial.clips:
        return [f"{number}: {trial.candidate.name} failed: {trial.failed}", *[""] * 7]
    means = [trial.mean("ssim"), trial.mean("lpips")]
    judged = [f"{value:.1f}" for value in (trial.psnr, trial.worst_clip)]
    judged += ["" if math.isnan(value) else f"{value:.3f}" for value in means]
    times = [f"{trial.mean('seconds'):.3g}", f"{trial.speedup:.2f}x", str(len(trial.clips))]
    return [f"{number}: {trial.candidate.name}", *(judged if number else [""] * len(judged)), *times]
