"""Videos and images with captions in a folder, and reading them."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")

_CAPTION_KEYS = ("text", "caption", "prompt", "label")


class UnreadableMediaError(ValueError):
    """A file that is damaged, too short or no video or image at all."""


@dataclass(frozen=True)
class Media:
    """A file and what it shows."""

    path: Path
    name: str
    """Path inside the folder."""
    caption: str
    """Prompt; for DiT the number of the class."""


@dataclass(frozen=True)
class Clip:
    """What is cut out of every file."""

    frames: int
    """1 for images."""
    fps: float
    """Frames per second that a video is sampled at."""
    sizes: tuple[tuple[int, int], ...]
    """(height, width) in pixels; a file gets the one that is nearest to its aspect ratio."""

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """The size nearest in aspect ratio."""
        return min(self.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))


def find_media(folder: str | Path) -> list[Media]:
    """The videos and images of a folder, with captions from metadata.jsonl, metadata.csv or a .txt beside each.

    Metadata has the columns ``file_name`` and ``text`` (or ``caption``, ``prompt``, ``label``).

    Raises:
        FileNotFoundError: no such folder, no videos or images in it, or files that the metadata names and that are
            not there.
        ValueError: missing or empty captions.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder.")
    captions = _metadata(folder)
    suffixes = VIDEO_SUFFIXES + IMAGE_SUFFIXES
    if captions is None:
        files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in suffixes]
        captions = {str(path.relative_to(folder)): _text_beside(path) for path in files}
    if not captions:
        raise FileNotFoundError(f"{folder} holds no videos or images ({', '.join(suffixes)}).")
    absent = [name for name in captions if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder}: the metadata names {_some(absent)}, which are not there.")
    empty = [name for name, caption in captions.items() if not caption]
    if empty:
        raise ValueError(
            f"{folder}: {len(empty)} of {len(captions)} files have no caption or an empty one: {_some(empty)}. Write "
            "one into a .txt of the same name, or list the files with file_name and text in metadata.jsonl or "
            "metadata.csv."
        )
    return [Media(folder / name, name, caption) for name, caption in captions.items()]


def _metadata(folder: Path) -> dict[str, str] | None:
    """File name → caption, from the metadata file if there is one."""
    lines, table = folder / "metadata.jsonl", folder / "metadata.csv"
    if lines.is_file():
        rows: Iterator[Any] = map(json.loads, filter(str.strip, lines.read_text(encoding="utf-8").splitlines()))
        return dict(_name_and_caption(row, lines) for row in rows)
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            return dict(_name_and_caption(row, table) for row in csv.DictReader(file))
    return None


def _name_and_caption(row: Mapping[str, Any], path: Path) -> tuple[str, str]:
    key = next((key for key in _CAPTION_KEYS if key in row), None)
    if "file_name" not in row or key is None:
        raise ValueError(f"{path} must have file_name and text in every row; a row has {', '.join(map(str, row))}.")
    return str(row["file_name"]), str("" if row[key] is None else row[key]).strip()


def _text_beside(path: Path) -> str:
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8").strip() if text.is_file() else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_clip(path: Path, clip: Clip) -> torch.Tensor:
    """Frames of a video, or an image, resized to cover the size and cropped in the middle.

    Returns:
        uint8 (3, frames, height, width).

    Raises:
        UnreadableMediaError: with the reason.
    """
    if not path.is_file() or path.stat().st_size == 0:
        raise UnreadableMediaError("the file is empty")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        if clip.frames != 1:
            raise UnreadableMediaError(f"an image has no {clip.frames} frames")
        return _read_image(path, clip)[:, None]
    return torch.stack(list(_read_frames(path, clip)), dim=1)


def _read_image(path: Path, clip: Clip) -> torch.Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            size = clip.size_for(upright.height, upright.width)
            fitted = ImageOps.fit(upright, (size[1], size[0]), method=Image.Resampling.BICUBIC)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise UnreadableMediaError(f"no readable image: {error}") from error
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.view(*size, 3).permute(2, 0, 1)


def _read_frames(path: Path, clip: Clip) -> Iterator[torch.Tensor]:
    """(3, height, width) at 0, 1 / fps, 2 / fps, … seconds: the latest frame shown by then."""
    import av

    wanted = 0
    last_time = 0.0
    previous: Any = None
    try:
        with av.open(str(path)) as container:
            start = None
            for frame in container.decode(video=0):
                start = frame.time if start is None else start
                last_time = frame.time - start
                while previous is not None and wanted < clip.frames and last_time > wanted / clip.fps + 1e-6:
                    yield _fit_frame(previous, clip)
                    wanted += 1
                previous = frame
                if wanted == clip.frames:
                    return
            if previous is not None and wanted < clip.frames and last_time >= wanted / clip.fps - 1e-6:
                yield _fit_frame(previous, clip)
                wanted += 1
    except (av.FFmpegError, OSError, IndexError, ValueError, TypeError) as error:
        raise UnreadableMediaError(f"no readable video: {error}") from error
    if wanted < clip.frames:
        needed = (clip.frames - 1) / clip.fps
        raise UnreadableMediaError(
            f"too short: {last_time:.2f} s of video, but {clip.frames} frames at {clip.fps:g} fps span {needed:.2f} s"
        )


def _fit_frame(frame: Any, clip: Clip) -> torch.Tensor:
    height, width = clip.size_for(frame.height, frame.width)
    scale = max(height / frame.height, width / frame.width)
    rows, columns = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    pixels = torch.from_numpy(
        frame.reformat(width=columns, height=rows, format="rgb24", interpolation="BICUBIC").to_ndarray()
    )
    top, left = (rows - height) // 2, (columns - width) // 2
    return pixels[top : top + height, left : left + width].permute(2, 0, 1)
