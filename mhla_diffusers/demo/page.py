"""What the demo shows: samples side by side, and loss curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..files import written_aside
from ..reporting import require_matplotlib, wrap
from ..tiny.digits import FRAMES_PER_SECOND, Scene

_SHOWN = 6
"""Scenes of a picture."""
_SCALE, _MARGIN, _LABEL, _GAP, _TEXT = 2, 136, 54, 4, 15
"""Enlargement of a picture, pixels beside the rows, above the columns, between the pictures, and of the letters."""


def draw_samples(pictures: Mapping[str, Sequence[torch.Tensor]], scenes: Sequence[Scene], file: Path) -> Path:
    """Draw samples side by side, one labelled row per attention and one column per scene.

    ``pictures`` has (F, 64, 64) in [0, 1] for every scene of an attention. Writes a PNG of the middle frame to
    ``file``, given without a suffix, and for clips a GIF of all. Returns the GIF of clips, otherwise the PNG.
    """
    from PIL import Image, ImageDraw

    rows = [torch.stack(list(clips[:_SHOWN])) for clips in pictures.values()]
    columns, frames, side = len(rows[0]), rows[0].shape[1], _SCALE * rows[0].shape[-1]
    blank = Image.new("L", (_MARGIN + columns * (side + _GAP), _LABEL + len(rows) * (side + _GAP)), 255)
    pen = ImageDraw.Draw(blank)
    labels = [(_MARGIN + column * (side + _GAP), 0, scene.caption) for column, scene in enumerate(scenes[:columns])]
    labels += [(4, _LABEL + row * (side + _GAP) + side // 2 - _TEXT, name) for row, name in enumerate(pictures)]
    for x, y, text in labels:
        # the font's own spaces are too narrow to be seen
        pen.text((x, y), "\n".join(wrap(text, 14)).replace(" ", "  "), fill=0, spacing=2, font_size=_TEXT)
    sheets = [blank.copy() for _ in range(frames)]
    for row, clips in enumerate(rows):
        for column, clip in enumerate((255 * clips.clamp(0, 1)).round().to(torch.uint8)):
            corner = _MARGIN + column * (side + _GAP), _LABEL + row * (side + _GAP)
            for sheet, picture in zip(sheets, clip, strict=True):
                sheet.paste(Image.fromarray(picture.numpy()).resize((side, side), Image.Resampling.NEAREST), corner)
    sheets[frames // 2].save(file.with_suffix(".png"))
    if frames == 1:
        return file.with_suffix(".png")
    settings = {"save_all": True, "duration": 1000 // FRAMES_PER_SECOND, "loop": 0}
    sheets[0].save(file.with_suffix(".gif"), append_images=sheets[1:], **settings)
    return file.with_suffix(".gif")


def draw_losses(curves: Mapping[str, Sequence[tuple[int, float]]], goal: float, file: Path) -> None:
    """Draw the held-out loss over the updates of each adaptation, with the control's as a line."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(goal, color="black", linestyle="--", label="control")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="updates", ylabel="held-out loss", yscale="log")
    axes.legend()
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=110)
    plt.close(figure)
