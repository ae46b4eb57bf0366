"""What the demo shows: samples side by side, loss curves, mixing matrices, and the page with all of it."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..analysis.pictures import middle_of, side_by_side
from ..files import write_text
from ..generation.record import write_video
from ..reporting import html_media, html_page, html_table, require_matplotlib
from ..tiny.digits import FRAMES_PER_SECOND, Scene
from .results import Outcome, Row, header_of

_SHOWN = 6
_SCALE = 2
_LABEL = 26
_GAP = 4


def draw_pictures(outcomes: Sequence[Outcome], scenes: Sequence[Scene], folder: Path) -> Path:
    """Samples side by side, one row per attention and one column per scene.

    Writes ``samples.png``, and for clips ``samples.mp4`` and ``samples.gif`` too; each clip goes as well into a file of
    its own, ``clips/{scene}-{attention}.mp4``.

    Returns:
        The file to show: the GIF of clips, otherwise the PNG.
    """
    shown = min(_SHOWN, len(scenes))
    names = [outcome.row.name for outcome in outcomes]
    rows = [torch.stack(outcome.pictures[:shown]) for outcome in outcomes]
    frames = [_sheet([row[:, frame] for row in rows], names, scenes[:shown]) for frame in range(rows[0].shape[1])]
    frames[len(frames) // 2].save(folder / "samples.png")
    if len(frames) == 1:
        return folder / "samples.png"
    pixels = [_as_tensor(frame) for frame in frames]
    write_video(pixels, folder / "samples.mp4", FRAMES_PER_SECOND)
    _save_gif(frames, folder / "samples.gif")
    (folder / "clips").mkdir(exist_ok=True)
    for outcome in outcomes:
        for place, (scene, clip) in enumerate(zip(scenes, outcome.pictures, strict=True)):
            name = file_name(f"{place:02d} {scene.caption} {outcome.row.name}")
            write_video(clip[..., None].expand(-1, -1, -1, 3), folder / "clips" / f"{name}.mp4", FRAMES_PER_SECOND)
    return folder / "samples.gif"


def draw_clips(name: str, pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], file: Path) -> Path:
    """Clips of one attention side by side, as a GIF.

    Args:
        name: of the attention.
        pictures: for every scene (F, 64, 64) in [0, 1].
        scenes: what they show.
        file: where to.
    """
    shown = min(_SHOWN, len(scenes))
    clips = torch.stack(list(pictures[:shown]))
    _save_gif([_sheet([clips[:, frame]], [name], scenes[:shown]) for frame in range(clips.shape[1])], file)
    return file


def _save_gif(frames: Sequence[Any], file: Path) -> None:
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)


def _sheet(rows: Sequence[torch.Tensor], names: Sequence[str], scenes: Sequence[Scene]) -> Any:
    """One image with a row per attention: each of ``rows`` is (scenes, H, W) in [0, 1]."""
    from PIL import Image, ImageDraw

    side = rows[0].shape[-1] * _SCALE
    margin = 130
    width, height = margin + len(scenes) * (side + _GAP), _LABEL + len(rows) * (side + _GAP)
    sheet = Image.new("L", (width + width % 2, height + height % 2), 255)
    pen = ImageDraw.Draw(sheet)
    for column, scene in enumerate(scenes):
        words = scene.caption.split(" and ")
        for line, text in enumerate((words[0] + (" and" if len(words) > 1 else ""), *words[1:])):
            pen.text((margin + column * (side + _GAP), 12 * line), text, fill=0)
    for index, (row, name) in enumerate(zip(rows, names, strict=True)):
        top = _LABEL + index * (side + _GAP)
        pen.text((4, top + side // 2), name, fill=0)
        for column, picture in enumerate(row):
            pixels = (255 * picture.clamp(0, 1)).round().to(torch.uint8).numpy()
            image = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(image, (margin + column * (side + _GAP), top))
    return sheet


def _as_tensor(image: Any) -> torch.Tensor:
    """A grey PIL image as (H, W, 3) in [0, 1]."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 1)
    return (pixels / 255).expand(-1, -1, 3)


def draw_mixing(outcome: Outcome, blocks: Sequence[int], file: Path) -> Path:
    """The first replaced layer's mixing matrix before and after, and the row of its middle block on the block grid.

    Args:
        outcome: of a variant that learns to mix.
        blocks: block counts.
        file: where to.
    """
    plt = require_matplotlib()
    name, pair = next(iter(outcome.mixing.items()))
    figure, axes = plt.subplots(2, 2, figsize=(8, 6.4), layout="constrained")
    middle = middle_of(blocks)
    largest = max(float(matrix.max()) for matrix in pair)
    for column, (matrix, when) in enumerate(zip(pair, ("before", "after"), strict=True)):
        axes[0, column].imshow(matrix, vmin=0, vmax=largest, cmap="magma")
        axes[0, column].set_title(f"{name}\n{when}: {len(matrix)} x {len(matrix)} blocks", fontsize=9)
        axes[0, column].set_xlabel("key block")
        axes[0, column].set_ylabel("query block")
        strip = side_by_side(matrix[middle], blocks)
        image = axes[1, column].imshow(strip, vmin=0, vmax=largest, cmap="magma")
        axes[1, column].set_title(
            f"row of query block {middle} on the block grid {'x'.join(map(str, blocks))}", fontsize=9
        )
        axes[1, column].set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def file_name(text: str) -> str:
    """A name of a scene or variant as a file can have it."""
    return text.replace(",", "").replace(" ", "-").replace("/", "-")


def write_page(
    file: Path,
    title: str,
    rows: Sequence[Row],
    figures: Mapping[str, Path],
    remarks: Sequence[str],
    circumstances: Mapping[str, str],
    sections: Mapping[str, str],
) -> None:
    """Write the page; images are inside it, so that the file can be sent alone.

    Args:
        file: where to.
        title: of the page.
        rows: of the table.
        figures: heading → image file.
        remarks: sentences before the table, each a paragraph.
        circumstances: machine, date and the like.
        sections: heading → HTML of what comes last.
    """
    table = html_table(header_of(rows), (row.cells for row in rows))
    images = "".join(f"<h2>{escape(heading)}</h2>{html_media(path, heading)}" for heading, path in figures.items())
    facts = ", ".join(f"{escape(name)}: {escape(value)}" for name, value in circumstances.items())
    said = "".join(f"<p>{escape(remark)}</p>" for remark in remarks)
    more = "".join(f"<h2>{escape(heading)}</h2>{section}" for heading, section in sections.items())
    write_text(html_page(title, f"{said}{table}<p>{facts}</p>{images}{more}"), file)
