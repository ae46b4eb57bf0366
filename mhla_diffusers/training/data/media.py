"""Find and read videos and images with captions in a folder."""

import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from ...errors import check
from ...files import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    fingerprint,
    read_csv,
    read_json_lines,
    read_lines,
    visible_files,
)
from ...generation.pixels import UnreadableMediaError, opened_video, read_picture, shown_pixels, shown_shape
from .cache import CachedClip, SourceFile
from .clips import Clips

logger = logging.getLogger(__name__)

_SUFFIXES = VIDEO_SUFFIXES + IMAGE_SUFFIXES
_JITTER = 1e-3
"""Seconds that containers round timestamps to; of two frames that are equally near but for that, the earlier one."""


def find_media(folder: Path, orders: int = 1) -> list[SourceFile]:
    """Return the videos and images of a folder with their captions, or the reason why one has none.

    Captions come from metadata.jsonl, from metadata.csv or from a .txt beside each file, with one caption per line.
    Metadata has the columns ``file_name`` and ``text``, a text or in JSON a list of several. Hidden files do not count.
    Each caption is given in up to ``orders`` orders of its parts between commas.
    FileNotFoundError for no folder, or none in it; ValueError for metadata that cannot be read or contradicts itself.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder.")
    files = visible_files(folder)
    media = {name for name, path in files.items() if path.suffix.lower() in _SUFFIXES}
    captions = _metadata(folder)
    if captions is None:
        captions = _captions_beside(files, media)
    elif unlisted := sorted(media - captions.keys()):
        logger.warning("%d files in %s are not in its metadata, such as %s.", len(unlisted), folder, unlisted[0])
    if not captions:
        raise FileNotFoundError(f"{folder} holds no videos or images ({', '.join(_SUFFIXES)}).")
    found = []
    for name, caption in captions.items():
        caption = _in_several_orders(caption, orders)
        content = hashlib.sha256(f"{fingerprint(folder / name)} {caption}".encode()).hexdigest()[:16]
        found.append(SourceFile(name, caption, content, None if caption else "it has no caption, or an empty one"))
    return found


def _in_several_orders(captions: str, orders: int) -> str:
    """Add other orders to captions, a line each; they depend on the caption alone, so a resumed encoding has them."""
    lines = []
    for caption in captions.split("\n"):
        parts, chance = [part.strip() for part in caption.split(",") if part.strip()], random.Random(caption)
        lines += [caption, *(", ".join(chance.sample(parts, len(parts))) for _ in range(orders - 1))]
    return "\n".join(dict.fromkeys(lines))


def _captions_beside(files: dict[str, Path], media: Iterable[str]) -> dict[str, str]:
    """Return file name → caption, from the .txt of the same name."""
    texts = {str(Path(name).with_suffix("")): path for name, path in files.items() if path.suffix.lower() == ".txt"}
    stems = {name: str(Path(name).with_suffix("")) for name in sorted(media)}
    if alone := sorted(texts.keys() - set(stems.values())):
        logger.warning(
            "%d captions have no video or image of the same name (%s), such as %s.",
            *(len(alone), ", ".join(_SUFFIXES), texts[alone[0]]),
        )
    return {name: "\n".join(read_lines(texts[stem])) if stem in texts else "" for name, stem in stems.items()}


def _metadata(folder: Path) -> dict[str, str] | None:
    """Return file name → caption, from the metadata file if there is one."""
    found = [folder / name for name in ("metadata.jsonl", "metadata.csv") if (folder / name).is_file()]
    if not found:
        return None
    check(len(found) == 1, f"{folder} holds metadata.jsonl and metadata.csv; remove one of them.")
    (file,) = found
    rows: Sequence[Any] = read_csv(file) if file.suffix == ".csv" else read_json_lines(file)
    captions: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        if not (isinstance(row, dict) and row.get("file_name") and "text" in row):
            raise ValueError(f"Row {number} of {file} must have file_name and text; it is {row!r}.")
        name, text = os.path.normpath(str(row["file_name"])), "" if row["text"] is None else row["text"]
        several = text if isinstance(text, list) else [text]
        check(name not in captions, f"Row {number} of {file} names {name}, as an earlier row does; keep one of them.")
        check(
            all(type(one) in (str, int) for one in several),
            f"Row {number} of {file}: text={text!r} must be text, a list of texts, or the number of a class.",
        )
        captions[name] = "\n".join(" ".join(str(one).split("\n")).strip() for one in several)
    return captions


def read_files(
    folder: Path, files: Sequence[SourceFile], clips: Clips, keep: Callable[[SourceFile, torch.Tensor], CachedClip]
) -> Iterator[SourceFile]:
    """Yield each file once ``keep`` had all of its clips, as :func:`read_clips`; a thread reads one clip ahead."""

    def read() -> Iterator[tuple[SourceFile, torch.Tensor | str | None]]:
        for file in files:
            problem = file.problem
            try:
                for clip in read_clips(folder / file.name, clips) if problem is None else ():
                    yield file, clip
            except (UnreadableMediaError, OSError) as error:
                problem = str(error)
            yield file, problem

    found, kept = read(), list[CachedClip]()
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(next, found, None)
        while (read_one := ahead.result()) is not None:
            ahead = pool.submit(next, found, None)
            file, clip = read_one
            if isinstance(clip, torch.Tensor):
                kept.append(keep(file, clip))
            else:
                problem = f"after {len(kept)} clips: {clip}" if kept and clip else clip
                yield replace(file, problem=problem, clips=tuple(kept))
                kept = []


def read_clips(file: Path, clips: Clips) -> Iterator[torch.Tensor]:
    """Yield the clips of a video, or a picture, resized and center-cropped: uint8 (3, frames, height, width).

    Holds no more frames than the longest clip has. UnreadableMediaError, also after some clips, with the reason why the
    file, or its rest, cannot be used.
    """
    if file.stat().st_size == 0:
        raise UnreadableMediaError("the file is empty")
    if file.suffix.lower() not in IMAGE_SUFFIXES:
        yield from _read_video(file, clips)
        return
    picture = read_picture(file)
    if (count := getattr(Image.open(file), "n_frames", 1)) > 1:
        raise UnreadableMediaError(f"an animated image of {count} frames; convert it to a video, such as MP4")
    if 1 not in clips.frames:
        raise UnreadableMediaError(f"an image, but the shortest clip has {clips.frames[0]} frames")
    height, width = clips.size_for(picture.height, picture.width)
    fitted = ImageOps.fit(picture, (width, height), method=Image.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    yield pixels.view(height, width, 3).permute(2, 0, 1)[:, None]


def _read_video(file: Path, clips: Clips) -> Iterator[torch.Tensor]:
    """Join the frames nearest to 0, 1 / fps, 2 / fps, … seconds to clips."""
    count, found, longest = 0, 0, clips.frames[-1]
    begun: dict[int, list[torch.Tensor]] = {}  # clips that lack frames, by the number of their first
    with opened_video(file) as (container, stream):
        stream.thread_type = "AUTO"
        for count, frame in enumerate(frames_at(container.decode(stream), clips.fps), start=1):
            if count == 1:
                size = clips.size_for(*shown_shape(frame, stream))
                if 0 < (rate := float(stream.average_rate or 0)) < 0.9 * clips.fps and longest > 1:
                    logger.warning("%s has %g frames per second, so at %g some are repeated.", file, rate, clips.fps)
            if count == 1 or (clips.stride and (count - 1) % clips.stride == 0):
                begun[count - 1] = []
            if begun:
                pixels = _fit_frame(frame, stream, size)
            for first, taken in [*begun.items()]:
                taken.append(pixels)
                if len(taken) == longest or (len(taken) in clips.frames and not clips.longest):
                    found += 1
                    yield torch.stack(taken, dim=1)
                if len(taken) == longest:
                    del begun[first]
            if not begun and clips.stride is None:
                return
    for taken in begun.values() if clips.longest else ():
        if fitting := [length for length in clips.frames if length <= len(taken)]:
            found += 1
            yield torch.stack(taken[: fitting[-1]], dim=1)
    if not found:
        raise UnreadableMediaError(
            f"too short: {count} frames at {clips.fps:g} fps, but the shortest clip has {clips.frames[0]}"
        )


def frames_at(frames: Iterable[Any], fps: float) -> Iterator[Any]:
    """Yield the frames of PyAV nearest to 0, 1 / fps, 2 / fps, … seconds after the first, until the last one ends."""
    number, gap, first, held = 0, 0.0, 0.0, None
    for frame in chain(frames, [None]):
        if frame is not None and (frame.time is None or (held is not None and frame.time <= held.time)):
            continue  # times grow
        if held is None:
            first = frame.time if frame is not None else first
        else:
            gap = frame.time - held.time if frame is not None else gap
            while number / fps <= held.time + gap / 2 - first + _JITTER:
                yield held
                number += 1
        held = frame


def _fit_frame(frame: Any, stream: Any, size: tuple[int, int]) -> torch.Tensor:
    """Return a frame scaled to cover a size and cropped to it: uint8 (3, height, width)."""
    shown, (height, width) = shown_shape(frame, stream), size
    scale = max(height / shown[0], width / shown[1])
    rows, columns = max(height, round(shown[0] * scale)), max(width, round(shown[1] * scale))
    top, left = (rows - height) // 2, (columns - width) // 2
    return shown_pixels(frame, rows, columns)[top : top + height, left : left + width].permute(2, 0, 1)
