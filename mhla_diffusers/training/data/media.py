"""Find and read videos and images with captions, in folders and webdataset's tar shards.

Shards are listed here instead of by webdataset's reader, which reads every byte of every shard, so a resumed encoding
would read everything again. It also misses a shard that was truncated between two members, and its errors for other
damage do not name the sample.
"""

import hashlib
import logging
import os
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...errors import check
from ...files import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    content_of,
    parse_json,
    read_csv,
    read_json_lines,
    read_text,
    visible_files,
)
from ...generation.pixels import (
    UnreadableMediaError,
    opened_video,
    read_picture,
    shown_pixels,
    shown_shape,
    video_seconds,
)
from ...reporting import times
from .clips import Clips

logger = logging.getLogger(__name__)

CAPTION_KEYS = ("text", "caption", "prompt", "label")
"""Metadata columns that may hold the caption."""
_MADE_UP = 0.9
"""Share of a clip's frames that its video must have; with fewer it repeats some."""
_SUFFIXES = VIDEO_SUFFIXES + IMAGE_SUFFIXES
NO_CAPTION = "it has no caption, or an empty one"
"""Problem of a file, or of a sample of a shard."""
_NO_FILE = "the metadata lists it, but it does not exist"
_NOT_LISTED = "the metadata does not list it"
_DOTS = "its name has a dot before that of its suffix, and members of a sample share their name up to the first dot"


@dataclass(frozen=True)
class Media:
    """A file, or a member of an uncompressed tar archive, and its caption."""

    path: Path
    """The file, or the archive."""
    name: str
    """Path inside the folder, after the path of its tar archive if any."""
    caption: str = ""
    """Prompt; for DiT the class."""
    problem: str | None = None
    """Why it cannot be used, if known without reading it."""
    offset: int | None = None
    """First byte of the member in its archive; None for a file."""
    size: int = 0
    """Bytes of the member."""
    origin: str = ""
    """Path of its source, as the settings name it."""

    def member(self) -> bytes:
        """Read the member; less than ``size`` bytes if the archive is truncated."""
        with self.path.open("rb") as file:
            file.seek(self.offset or 0)
            return file.read(self.size)


@dataclass(frozen=True)
class Original:
    """What a video or image is before a clip is cut out of it."""

    height: int
    """As it is shown, with square pixels."""
    width: int
    fps: float = 0.0
    """Frames per second; 0 for images, and where the video does not say."""
    seconds: float = 0.0
    """Length; 0 for images. Of a video that does not say, what was read."""
    repeats: bool = False
    """Whether frames were repeated to reach the clip's rate."""

    def scale_to(self, size: tuple[int, ...]) -> float:
        """Return the factor by which it is scaled to cover a size; above 1 it is enlarged."""
        return max(size[0] / self.height, size[1] / self.width)

    def share_cropped(self, size: tuple[int, ...]) -> float:
        """Return the share of its picture that is cut off."""
        return 1 - size[0] * size[1] / (self.height * self.width * self.scale_to(size) ** 2)


@dataclass(frozen=True)
class ClipRead:
    """A clip of a video, or a picture."""

    pixels: torch.Tensor
    """uint8 (3, frames, height, width)."""
    start: float
    """Time at which it begins in the video, in seconds from the first frame."""
    original: Original

    @property
    def bucket(self) -> tuple[int, ...]:
        """Frames, height and width."""
        return tuple(self.pixels.shape[1:])


def contents_of(media: Sequence[Media]) -> dict[str, str]:
    """Return name → what identifies the content of each file and its caption."""
    paths = {path: content_of(path) for path in {item.path for item in media}}
    texts = {item.name: f"{paths[item.path]} {item.offset} {item.size} {item.caption}" for item in media}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def find_media(source: str | Path, needs_captions: bool = True) -> list[Media]:
    """Return the videos and images of a folder or of webdataset's tar shards, with their captions.

    In a folder captions come from metadata.jsonl, from metadata.csv or from a .txt beside each file. Metadata has the
    columns ``file_name`` and ``text`` (or ``caption``, ``prompt``, ``label``); files that it does not list are left out
    with a warning. Hidden files do not count.

    In shards the members of a sample share their name up to its first dot: a video or image, and a .txt or a .json with
    one of the keys above. Samples without a caption and truncated shards do not raise, because nobody repairs a shard
    by hand; they are returned with their problem, and so are videos and images whose names do not fit.

    Args:
        source: a folder of files, a folder of uncompressed tar shards, one shard, or a pattern such as
            ``shards/*.tar``.
        needs_captions: whether to raise for files without a caption, in place of returning them with their problem.

    Raises:
        FileNotFoundError: no such source, no videos or images in it, or files of the metadata are missing.
        ValueError: missing, empty or unreadable captions beside files, metadata that names a file twice or has a
            caption that is not text, two files of metadata, or a folder of both files and shards.
    """
    media = list_media(source)
    check_usable(source, media, needs_captions)
    unlisted = [item.name for item in media if item.problem == _NOT_LISTED]
    if unlisted:
        logger.warning("%d files in %s are not in its metadata, such as %s.", len(unlisted), source, unlisted[0])
    return [item for item in media if item.problem != _NOT_LISTED]


def check_usable(source: str | Path, media: Sequence[Media], needs_captions: bool) -> None:
    """Raise as :func:`find_media` where files of :func:`list_media` are missing or have no caption."""
    names: dict[str | None, list[str]] = {}
    for item in media:
        if item.offset is None:
            names.setdefault(item.problem, []).append(item.name)
    if absent := names.get(_NO_FILE):
        raise FileNotFoundError(
            f"{source}: {len(absent)} files of the metadata do not exist, such as {', '.join(absent[:5])}."
        )
    empty, count = names.get(NO_CAPTION, []), len(media) - len(names.get(_NOT_LISTED, []))
    check(
        not (needs_captions and empty),
        f"{source}: {len(empty)} of {count} files have no caption or an empty one, such as "
        f"{', '.join(empty[:5])}. Write one into a .txt of the same name, or list the files with file_name and text in "
        "metadata.jsonl or metadata.csv; in a YAML file of sources, missing_captions: skip or empty goes on without.",
    )


def list_media(source: str | Path) -> list[Media]:
    """Return what :func:`find_media` does, and files without a caption, or in metadata alone, with their problem.

    Raises:
        FileNotFoundError: no such source, or no videos or images in it.
        ValueError: unreadable captions, metadata that names a file twice or has a caption that is not text, two files
            of metadata, or a folder of both files and shards.
    """
    folder = Path(source)
    shards = _find_shards(folder)
    if shards:
        return [media for name, path in shards.items() for media in _media_of_shard(name, path)]
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is neither a folder, a .tar file nor a pattern of any.")
    captions = _metadata(folder)
    files = {name: path for name, path in visible_files(folder).items() if path.suffix.lower() in _SUFFIXES}
    unlisted: list[str] = []
    if captions is None:
        captions = {}
        for name, path in files.items():
            text = path.with_suffix(".txt")
            captions[name] = read_text(text).strip() if text.is_file() else ""
        alone = _captions_alone(folder, files)
        if alone:
            logger.warning(
                "%d captions in %s have no video or image beside them (%s), such as %s.",
                *(len(alone), folder, ", ".join(_SUFFIXES), alone[0]),
            )
    else:
        unlisted = sorted(files.keys() - captions.keys())
    if not captions:
        raise FileNotFoundError(f"{folder} holds no videos or images ({', '.join(_SUFFIXES)}).")
    media = []
    for name, caption in captions.items():
        problem = None if caption else NO_CAPTION
        path = folder / name
        media.append(Media(path, name, caption, problem if path.is_file() else _NO_FILE))
    return media + [Media(folder / name, name, problem=_NOT_LISTED) for name in unlisted]


def _captions_alone(folder: Path, files: Mapping[str, Path]) -> list[str]:
    """Name the .txt files that belong to none of the videos and images."""
    captions = {path.with_suffix(".txt") for path in files.values()}
    texts = {name: path for name, path in visible_files(folder).items() if path.suffix == ".txt"}
    return [name for name, path in texts.items() if path not in captions]


def _metadata(folder: Path) -> dict[str, str] | None:
    """Return file name → caption, from the metadata file if there is one."""
    files = [folder / name for name in ("metadata.jsonl", "metadata.csv") if (folder / name).is_file()]
    if not files:
        return None
    check(len(files) == 1, f"{folder} holds metadata.jsonl and metadata.csv; remove one of them.")
    file = files[0]
    text = read_text(file)
    rows: Sequence[Any] = ()
    if text.strip():
        rows = read_csv(file) if file.suffix == ".csv" else read_json_lines(file)
    check(bool(rows), f"{file} is empty; it needs a row with file_name and text for every file, or remove it.")
    captions: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        names = row if isinstance(row, dict) else {}
        key = next((key for key in CAPTION_KEYS if key in names), None)
        if "file_name" not in names or key is None:
            has = ", ".join(map(str, names)) or repr(row)
            raise ValueError(f"{file} must have file_name and text in every row; a row has {has}.")
        check(bool(row["file_name"]), f"Row {number} of {file}: file_name={row['file_name']!r} must name a file.")
        name, caption = os.path.normpath(str(row["file_name"])), "" if row[key] is None else row[key]
        check(name not in captions, f"Row {number} of {file} names {name}, as an earlier row does; keep one of them.")
        check(
            type(caption) in (str, int),
            f"Row {number} of {file}: {key}={caption!r} must be text, or the number of a class.",
        )
        captions[name] = str(caption).strip()
    return captions


def _find_shards(source: Path) -> dict[str, Path]:
    """Name and path of the .tar files of a source; empty if it is something else."""
    if source.suffix == ".tar" and source.is_file():
        return {source.name: source}
    parts = source.parts
    first = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    if source.is_dir():
        folder, files = source, list(visible_files(source).values())
    elif first < len(parts):
        folder = Path(*parts[:first])
        files = list(folder.glob("/".join(parts[first:])))
    else:
        return {}
    shards = {str(path.relative_to(folder)): path for path in sorted(files) if path.suffix == ".tar"}
    if folder != source and not shards:
        raise FileNotFoundError(f"{source} matches no .tar file.")
    loose = [path.name for path in files if path.suffix.lower() in _SUFFIXES]
    if shards and loose:
        raise ValueError(
            f"{source} holds tar shards ({next(iter(shards))}, …) and videos or images ({loose[0]}, …); encode them "
            "from folders of their own."
        )
    return shards


def _media_of_shard(name: str, path: Path) -> list[Media]:
    """List the samples of a shard; if it is damaged or truncated, the shard itself with its problem comes last."""
    samples: dict[str, dict[str, Media]] = {}
    left_out: list[Media] = []
    problem: str | None = None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                key, _, extension = file.partition(".")
                if member.isreg() and not member.issparse() and key:
                    key = f"{folder}/{key}" if folder else key
                    where = Media(path, f"{name}/{key}.{extension.lower()}", "", None, member.offset_data, member.size)
                    members = samples.setdefault(key, {})
                    if extension.lower() in members:
                        twice = f"{where.name}, at byte {where.offset}"
                        left_out.append(replace(where, name=twice, problem="an earlier member has the same name"))
                    elif "." in extension and extension.lower().endswith(_SUFFIXES):
                        left_out.append(replace(where, problem=_DOTS))
                    else:
                        members[extension.lower()] = where
            end = Media(path, name, offset=archive.offset, size=tarfile.BLOCKSIZE)
        # tarfile accepts an archive that was truncated between two members; a complete one ends in zeros
        if end.member() != tarfile.NUL * tarfile.BLOCKSIZE:
            problem = f"the archive has no end; {len(samples)} samples were found before it was truncated"
    except (tarfile.TarError, OSError) as error:
        problem = f"no complete tar archive ({error}); {len(samples)} samples were found before the damage"
    listed = []
    for members in samples.values():
        # the video, else the image
        found = next((members[suffix[1:]] for suffix in _SUFFIXES if suffix[1:] in members), None)
        if found is None:
            continue
        caption, lack = "", NO_CAPTION
        try:
            caption = _caption(members)
        except ValueError as error:
            lack = f"its caption cannot be read: {error}"
        listed.append(replace(found, caption=caption, problem=None if caption else lack))
    listed += left_out
    if problem is None and not listed:
        problem = "it holds no videos or images"
    return listed if problem is None else [*listed, Media(path, name, "", problem)]


def _caption(members: dict[str, Media]) -> str:
    """Return the text of the .txt, else of the .json; empty if there is none. Raises ValueError if unreadable."""
    extension = next((extension for extension in ("txt", "json") if extension in members), None)
    if extension is None:
        return ""
    text = members[extension].member()
    check(len(text) == members[extension].size, "the archive ends in the middle of it")
    if extension == "txt":
        return text.decode("utf-8").strip()
    content = parse_json(text)
    names = content if isinstance(content, dict) else {}
    return str(next((names[key] for key in CAPTION_KEYS if names.get(key) is not None), "")).strip()


def read_clips(media: Media, clips: Clips) -> Iterator[ClipRead]:
    """Yield the clips of a video, or a picture, resized to cover the size and center-cropped.

    Holds no more frames than the longest clip has.

    Args:
        media: which.
        clips: frames, rate and sizes; their sizes are not "auto".

    Raises:
        UnreadableMediaError: with the reason, also after some clips.
        ImportError: a video, but PyAV is missing.
    """
    content = b""
    if media.offset is None:
        size = media.path.stat().st_size if media.path.is_file() else 0
    else:
        content, size = media.member(), media.size
        if len(content) < size:
            raise UnreadableMediaError(f"{media.path.name} ends in the middle of it")
    if size == 0:
        raise UnreadableMediaError("the file is empty")
    source: Path | BytesIO = media.path if media.offset is None else BytesIO(content)
    if Path(media.name).suffix.lower() not in IMAGE_SUFFIXES:
        yield from _read_video(source, clips)
        return
    if 1 not in clips.lengths:
        raise UnreadableMediaError(f"an image has no {clips.lengths[0]} frames")
    from PIL import Image, ImageOps

    picture = read_picture(source)
    original = Original(picture.height, picture.width)
    height, width = _size_of(original, clips)
    fitted = ImageOps.fit(picture, (width, height), method=Image.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    yield ClipRead(pixels.view(height, width, 3).permute(2, 0, 1)[:, None], 0.0, original)


def try_read(clips: Clips, media: Media) -> Iterator[ClipRead | str]:
    """Yield what :func:`read_clips` does, and why the file, or its rest, cannot be used in place of an error."""
    if media.problem is not None:
        yield media.problem
        return
    count = 0
    try:
        for clip in read_clips(media, clips):
            yield clip
            count += 1
    except UnreadableMediaError as error:
        yield f"after {count} clips: {error}" if count else str(error)


def _size_of(original: Original, clips: Clips) -> tuple[int, int]:
    """Return the size that a file is cut to."""
    shape = original.height, original.width
    size = clips.size_for(*shape)
    scale = original.scale_to(size)
    if scale > 1 and not clips.upscale:
        raise UnreadableMediaError(f"too small: {times(shape)} would be enlarged {scale:.3g} times to {times(size)}")
    return size


def _read_video(source: Path | BytesIO, clips: Clips) -> Iterator[ClipRead]:
    """Read frames nearest to 0, 1 / fps, 2 / fps, … seconds, which FFmpeg's filter finds, and join them to clips."""
    lengths, total = clips.lengths, _count_frames(source, clips.fps) if clips.extract == "uniform" else 0
    starts = {length: clips.starts(length, total) for length in lengths}
    given, last_time, number, is_found = 0, 0.0, -1, False
    begun: list[tuple[int, int]] = []  # first frame and length of clips that lack frames
    window: dict[int, torch.Tensor] = {}
    with opened_video(source) as (container, stream):
        start, graph, size = None, None, (0, 0)
        for frame in chain(container.decode(stream), (None,)):
            if frame is not None:
                start = frame.time if start is None else start
                last_time = frame.time - start
                given += 1
                graph = graph or _at_rate(frame, clips.fps)
            if graph is None:
                break
            graph.push(frame)
            for kept in _pulled(graph):
                number += 1
                if number == 0:
                    seconds, fps = video_seconds(container, stream), float(stream.average_rate or 0)
                    original = Original(*shown_shape(kept, stream), fps, seconds)
                    size = _size_of(original, clips)
                begun += [(number, length) for length in lengths if number in starts[length]]
                if begun:
                    window[number] = _fit_frame(kept, stream, size)
                for first, length in [clip for clip in begun if sum(clip) == number + 1]:
                    is_found = True
                    begun.remove((first, length))
                    pixels = torch.stack([window[place] for place in range(first, number + 1)], dim=1)
                    repeats = given < _MADE_UP * (number + 1)
                    found = replace(original, seconds=original.seconds or last_time, repeats=repeats)
                    yield ClipRead(pixels, first / clips.fps, found)
                window = {place: window[place] for place in window if begun and place >= min(begun)[0]}
                if not begun and not any(_has_later(starts[length], number) for length in lengths):
                    return
    if not is_found:
        needed = (lengths[0] - 1) / clips.fps
        raise UnreadableMediaError(
            f"too short: {last_time:.2f} s of video, but {lengths[0]} frames at {clips.fps:g} fps span {needed:.2f} s"
        )


def _has_later(starts: Collection[int], number: int) -> bool:
    """Return whether a clip begins after a frame."""
    return starts[-1] > number if isinstance(starts, range) else max(starts, default=-1) > number


def _count_frames(source: Path | BytesIO, fps: float) -> int:
    """Count the frames that a video has at a rate by the times of its packets, without decoding, or one less."""
    with opened_video(source) as (container, stream):
        shown = [packet.pts if packet.pts is not None else packet.dts for packet in container.demux(stream)]
        stamps = [time for time in shown if time is not None]
        span = float((max(stamps) - min(stamps)) * stream.time_base) if stamps else 0.0
    if isinstance(source, BytesIO):
        source.seek(0)
    return int(span * fps + 1e-6) + 1 if stamps else 0


def _at_rate(frame: Any, fps: float) -> Any:
    """Make a graph of FFmpeg's filters that takes frames like this one and gives those of another rate."""
    import av

    graph = av.filter.Graph()
    size = {"width": frame.width, "height": frame.height, "format": frame.format}
    first = graph.add_buffer(**size, time_base=frame.time_base)
    # timestamps of whole milliseconds, as in MKV, fall beside the times asked for: its fps takes the nearest frame
    rate = graph.add("fps", str(Fraction(fps).limit_denominator(1001)))
    graph.link_nodes(first, graph.add("setpts", "PTS-STARTPTS"), rate, graph.add("buffersink")).configure()
    return graph


def _pulled(graph: Any) -> Iterator[Any]:
    """Yield the frames that a graph has ready."""
    import av

    with suppress(av.BlockingIOError, av.EOFError):
        while True:
            yield graph.pull()


def _fit_frame(frame: Any, stream: Any, size: tuple[int, int]) -> torch.Tensor:
    """Return a frame scaled to cover a size and cropped to it: uint8 (3, height, width)."""
    shown, (height, width) = shown_shape(frame, stream), size
    scale = max(height / shown[0], width / shown[1])
    rows, columns = max(height, round(shown[0] * scale)), max(width, round(shown[1] * scale))
    top, left = (rows - height) // 2, (columns - width) // 2
    return shown_pixels(frame, rows, columns)[top : top + height, left : left + width].permute(2, 0, 1)
