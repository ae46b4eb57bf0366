"""What the demo shows: samples side by side, loss curves, and the page with all of it."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..files import write_text, written_aside
from ..generation.record import write_video
from ..reporting import html_page, require_matplotlib
from ..tiny.digits import FRAMES_PER_SECOND, Scene

_SHOWN = 6
_SCALE = 2
_MARGIN, _LABEL, _GAP = 130, 26, 4


def draw_pictures(pictures: Mapping[str, Sequence[torch.Tensor]], scenes: Sequence[Scene], folder: Path) -> Path:
    """Samples side by side, one row per attention and one column per scene.

    Writes ``samples.png``, and for clips ``samples.mp4`` and ``samples.gif`` too; each clip goes as well into a file of
    its own, ``clips/{scene}-{attention}.mp4``.

    Args:
        pictures: attention → for every scene (F, 64, 64) in [0, 1].
        scenes: what they show.
        folder: where to.

    Returns:
        The file to show: the GIF of clips, otherwise the PNG.
    """
    frames = _sheets(pictures, scenes)
    frames[len(frames) // 2].save(folder / "samples.png")
    if len(frames) == 1:
        return folder / "samples.png"
    pixels = [
        torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8).view(sheet.height, sheet.width, 1)
        for sheet in frames
    ]
    write_video([(one / 255).expand(-1, -1, 3) for one in pixels], folder / "samples.mp4", FRAMES_PER_SECOND)
    (folder / "clips").mkdir(exist_ok=True)
    for name, clips in pictures.items():
        for place, (scene, clip) in enumerate(zip(scenes, clips, strict=True)):
            file = folder / "clips" / f"{file_name(f'{place:02d} {scene.caption} {name}')}.mp4"
            write_video(clip[..., None].expand(-1, -1, -1, 3), file, FRAMES_PER_SECOND)
    return _save_gif(frames, folder / "samples.gif")


def draw_clips(name: str, pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], file: Path) -> Path:
    """Clips of one attention side by side, as a GIF; for every scene one (F, 64, 64) in [0, 1]."""
    return _save_gif(_sheets({name: pictures}, scenes), file)


def _save_gif(frames: Sequence[Any], file: Path) -> Path:
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)
    return file


def _sheets(pictures: Mapping[str, Sequence[torch.Tensor]], scenes: Sequence[Scene]) -> list[Any]:
    """For each frame one grey PIL image with a labelled row per attention."""
    from PIL import Image, ImageDraw

    shown = scenes[:_SHOWN]
    rows = {name: torch.stack(list(clips[:_SHOWN])) for name, clips in pictures.items()}
    count, side = next(iter(rows.values())).shape[1], next(iter(rows.values())).shape[-1] * _SCALE
    width, height = _MARGIN + len(shown) * (side + _GAP), _LABEL + len(rows) * (side + _GAP)
    blank = Image.new("L", (width + width % 2, height + height % 2), 255)
    pen = ImageDraw.Draw(blank)
    for column, scene in enumerate(shown):
        words = scene.caption.split(" and ")
        for line, text in enumerate((words[0] + (" and" if len(words) > 1 else ""), *words[1:])):
            pen.text((_MARGIN + column * (side + _GAP), 12 * line), text, fill=0)
    for index, name in enumerate(rows):
        pen.text((4, _LABEL + index * (side + _GAP) + side // 2), name, fill=0)
    sheets = [blank.copy() for _ in range(count)]
    for index, clips in enumerate(rows.values()):
        for column, clip in enumerate((255 * clips.clamp(0, 1)).round().to(torch.uint8)):
            corner = _MARGIN + column * (side + _GAP), _LABEL + index * (side + _GAP)
            for sheet, picture in zip(sheets, clip, strict=True):
                sheet.paste(Image.fromarray(picture.numpy()).resize((side, side), Image.Resampling.NEAREST), corner)
    return sheets


def draw_loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]], goal: float, file: Path) -> None:
    """Held-out loss over the updates of each adaptation, with the control's as a line."""
    plt: Any = require_matplotlib()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(goal, color="black", linestyle="--", label="control")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel("updates")
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    axes.legend()
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=110)
    plt.close(figure)


def file_name(text: str) -> str:
    """A name of a scene or variant as a file can have it."""
    return text.replace(",", "").replace(" ", "-").replace("/", "-")


def write_page(file: Path, title: str, circumstances: Mapping[str, str], sections: Mapping[str, str]) -> None:
    """Write the page; images are inside it, so that the file can be sent alone.

    Args:
        file: where to.
        title: of the page.
        circumstances: machine, date and the like.
        sections: heading → HTML.
    """
    facts = ", ".join(f"{escape(name)}: {escape(value)}" for name, value in circumstances.items())
    parts = "".join(f"<h2>{escape(heading)}</h2>{part}" for heading, part in sections.items())
    said = "Everything on this page was computed in one run, but for the times of the card that is not here"
    write_text(html_page(title, f"<p>{said} ({facts}).</p>{parts}"), file)
