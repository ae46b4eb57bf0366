"""Latents and conditioning on disk: a safetensors file per clip, and an index that grows by a line per source file.

::

    folder/
      index.jsonl                   what made the latents; then a line per source file or prompt, with its clips
      empty.safetensors             conditioning of the empty prompt
      clips/00000000.safetensors    latents, encoder_hidden_states, …
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import load

from ...errors import check
from ...families import Sample
from ...files import file_hash, write_tensors, write_text

logger = logging.getLogger(__name__)

INDEX_NAME = "index.jsonl"
FORMAT_VERSION = 5
_EMPTY = "empty.safetensors"
_NO_MADE_WITH = ("format_version", "empty", "shares")


@dataclass(frozen=True)
class CachedClip:
    """A clip, and the file that holds its tensors."""

    bucket: tuple[int, ...]
    """Frames, height and width in pixels."""
    start: float = 0.0
    """Time at which it begins in its source file, in seconds."""
    file: str = ""
    """Inside the cache; "" before it is encoded."""
    sha256: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the latents."""


@dataclass(frozen=True)
class CachedFile:
    """A source file or prompt with its clips, or with the reason for none."""

    name: str
    caption: str
    content: str = ""
    """Identifies the file's content and caption."""
    origin: str = ""
    """Folder that it is from, as the settings of the data name it; "" for prompts."""
    problem: str | None = None
    """Why it has no clips, or not all."""
    clips: tuple[CachedClip, ...] = ()


_LINE = TypeAdapter(CachedFile)


def read_index(folder: Path) -> tuple[dict[str, Any], list[CachedFile]]:
    """Read what made a cache, and its files; a last line that a killed process left unfinished does not count.

    FileNotFoundError for no cache, ValueError for a damaged index or one of an earlier version.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no latents: {INDEX_NAME} is missing. Make them with mhla encode.")
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        header: dict[str, Any] = json.loads(first)
        version = header["format_version"]
        check(version == FORMAT_VERSION, f"format version {version!r} is not {FORMAT_VERSION}.")
        return header, [_LINE.validate_json(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error} {_remedy(folder)}") from error


def _remedy(folder: Path) -> str:
    return f"Delete {folder} and make it again with mhla encode or mhla synthesize."


def check_made_with(folder: Path, made: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError unless a cache was made with some values; weights on the Hub, which are None, fit any."""
    for name, value in wanted.items():
        is_unknown = name.endswith("weights") and None in (made.get(name), value)
        check(
            made.get(name) == value or is_unknown,
            f"{folder} was made with {name}={made.get(name)!r}, not {value!r}; {remedy}",
        )


class LatentCache:
    """The clips of a cache, as training data; each file is compared with its hash when it is read.

    Files of several sources alternate in proportion, so that the last ones, which are held out, are of each.
    FileNotFoundError where the cache or a file is missing; ValueError for a damaged one, or no clips.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header, self.files = read_index(self.folder)
        self.content = file_hash(self.folder / INDEX_NAME)[:16]
        """Identifies all clips, because the index holds the hash of every file."""
        clips = [(file, clip) for file in self.files for clip in file.clips]
        check(
            bool(clips),
            f"{self.folder} holds no clips: encoding stopped before the first, or no file could be used. The same "
            "mhla encode or mhla synthesize command goes on.",
        )
        there = {f"clips/{path.name}" for path in (self.folder / "clips").glob("*.safetensors")}
        if missing := [clip.file for _, clip in clips if clip.file not in there]:
            raise FileNotFoundError(f"The cache {self.folder} lacks {', '.join(missing[:5])}. {_remedy(self.folder)}")
        counts, places, seen = Counter(file.origin for file, _ in clips), [], Counter[str]()
        for file, _ in clips:
            places.append((seen[file.origin] + 0.5) / counts[file.origin])
            seen[file.origin] += 1
        self.clips = [clips[index] for index in sorted(range(len(clips)), key=places.__getitem__)]
        self.shapes: Sequence[tuple[int, ...]] = [clip.shape for _, clip in self.clips]
        shares = {name: share / counts[name] for name, share in self.header["shares"].items() if counts[name]}
        self.weights: Sequence[float] | None = [
            shares[file.origin] / min(shares.values()) if shares else 1.0 for file, _ in self.clips
        ]
        self.empty: Sample | None = self._read(_EMPTY, self.header["empty"])

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Sample:
        """One clip's tensors; ValueError if its file is damaged."""
        _, clip = self.clips[index]
        return self._read(clip.file, clip.sha256)

    def _read(self, name: str, sha256: str) -> Sample:
        content = (self.folder / name).read_bytes()
        check(
            hashlib.sha256(content).hexdigest() == sha256,
            f"{self.folder / name} is damaged or was changed: its SHA-256 is not the one in {INDEX_NAME}. "
            f"{_remedy(self.folder)}",
        )
        return load(content)


class CacheWriter:
    """Makes a cache, or goes on with one; what a killed process loses is the file that it was at.

    ``contents`` maps every source file to what identifies its content, and the cache loses all other files; ``shares``
    maps a source to its share of an epoch. ValueError if the folder holds clips of another model, of other settings
    (``made_with``), or of other files alone.
    """

    def __init__(
        self,
        folder: str | Path,
        made_with: Mapping[str, Any],
        contents: Mapping[str, str],
        empty: Sample,
        shares: Mapping[str, float],
    ) -> None:
        self.folder, self.files = Path(folder), list[CachedFile]()
        header: dict[str, Any] = {**made_with, "format_version": FORMAT_VERSION, "shares": dict(shares)}
        if (self.folder / INDEX_NAME).is_file():
            before, files = read_index(self.folder)
            if any(file.clips for file in files):  # an attempt that made none binds nobody
                made = {name: value for name, value in before.items() if name not in _NO_MADE_WITH}
                wanted = {**dict.fromkeys(made), **made_with}
                check_made_with(self.folder, made, wanted, "choose another folder.")
                self._keep(files, contents)
                header["empty"] = before["empty"]
        if not (self.folder / _EMPTY).is_file() or file_hash(self.folder / _EMPTY) != header.get("empty"):
            write_tensors(_contiguous(empty), self.folder / _EMPTY)
            header["empty"] = file_hash(self.folder / _EMPTY)
        lines = [json.dumps(header), *(_LINE.dump_json(file).decode() for file in self.files)]
        write_text("".join(f"{line}\n" for line in lines), self.folder / INDEX_NAME)
        used = {clip.file for file in self.files for clip in file.clips}
        for path in (self.folder / "clips").glob("*.safetensors"):
            if f"clips/{path.name}" not in used:
                path.unlink()
        self._next = 1 + max((int(Path(file).stem) for file in used), default=-1)

    def _keep(self, files: Iterable[CachedFile], contents: Mapping[str, str]) -> None:
        known = {file.name: file for file in files}
        gone = sorted(known.keys() - contents.keys())
        changed = sorted(name for name in known.keys() & contents.keys() if known[name].content != contents[name])
        check(
            len(gone) < len(known),
            f"{self.folder} holds latents of other files or prompts, such as {gone[:1]}; choose another folder.",
        )
        for names, what in (
            (changed, "have changed and are encoded again"),
            (gone, "are gone, and so are their clips"),
        ):
            if names:
                logger.warning("%d files or captions %s, such as %s.", len(names), what, names[0])
        self.files = [file for name, file in known.items() if name not in {*gone, *changed}]

    def write(self, sample: Sample, bucket: tuple[int, ...], start: float = 0.0) -> CachedClip:
        """Write the tensors of a clip, which counts once :meth:`add` has its file."""
        name = f"clips/{self._next:08d}.safetensors"
        self._next += 1
        write_tensors(_contiguous(sample), self.folder / name)
        sha256 = file_hash(self.folder / name)
        return CachedClip(bucket, start, name, sha256, tuple(sample["latents"].shape))

    def add(self, file: CachedFile) -> None:
        """Append a file to the index."""
        self.files.append(file)
        with (self.folder / INDEX_NAME).open("ab") as index:
            index.write(_LINE.dump_json(file) + b"\n")


def _contiguous(sample: Sample) -> Sample:
    return {name: tensor.cpu().contiguous() for name, tensor in sample.items()}
