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
from collections.abc import Mapping, Sequence
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
FORMAT_VERSION = 6
_EMPTY = "empty.safetensors"


@dataclass(frozen=True)
class CachedClip:
    """A clip, and the file that holds its tensors."""

    bucket: tuple[int, ...]
    """Frames, height and width in pixels."""
    file: str = ""
    """Inside the cache; "" before it is encoded."""
    sha256: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the latents."""


@dataclass(frozen=True)
class SourceFile:
    """A video, picture or prompt, with its clips once they are read, or the reason for none."""

    name: str
    """Path inside its folder; of a prompt, its number and text."""
    caption: str = ""
    """Prompt; if it has several lines, training draws one each time. For DiT the class."""
    content: str = ""
    """Identifies the file's content and caption."""
    problem: str | None = None
    """Why it has no clips, or not all."""
    clips: tuple[CachedClip, ...] = ()

    @property
    def captions(self) -> list[str]:
        """The lines of the caption."""
        return self.caption.split("\n")


_LINE = TypeAdapter(SourceFile)


def read_index(folder: Path) -> tuple[dict[str, Any], list[SourceFile]]:
    """Read what made a cache, and its files; a last line that a killed process left unfinished does not count.

    FileNotFoundError for no cache, ValueError for a damaged index or one of an earlier version.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no latents; make them with mhla encode or synthesize.")
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


def check_made_with(folder: Path, made: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError unless a cache was made with some values; weights on the Hub, which are None, fit any."""
    for name, value in wanted.items():
        is_unknown = name.endswith("weights") and None in (made.get(name), value)
        check(
            made.get(name) == value or is_unknown,
            f"{folder} was made with {name}={made.get(name)!r}, not {value!r}; mhla encode into another folder.",
        )


class LatentCache:
    """The clips of folders of latents, as training data; each file is compared with its hash when it is read.

    Each of several folders has its share of the samples drawn. The last clips, which a run holds out, are of all
    folders in proportion to their numbers. FileNotFoundError where a folder or a file is missing; ValueError for a
    damaged one, or no clips.
    """

    def __init__(self, folders: str | Path | Mapping[str, float]) -> None:
        shares = folders if isinstance(folders, Mapping) else {str(folders): 1.0}
        self.headers: dict[Path, dict[str, Any]] = {}
        self.content: dict[str, str] = {}
        """Identifies all clips, because the index of a folder holds the hash of every file."""
        clips: list[tuple[float, float, Path, CachedClip]] = []
        for name, share in sorted(shares.items()):
            folder = Path(name)
            self.headers[folder], files = read_index(folder)
            self.content[name] = file_hash(folder / INDEX_NAME)[:16]
            found = [clip for file in files for clip in file.clips]
            check(
                bool(found),
                f"{folder} holds no clips: encoding stopped before the first, or no file could be used. Repeat the "
                "mhla encode or mhla synthesize command to resume.",
            )
            there = {f"clips/{path.name}" for path in (folder / "clips").glob("*.safetensors")}
            if missing := [clip.file for clip in found if clip.file not in there]:
                raise FileNotFoundError(f"The cache {folder} lacks {', '.join(missing[:5])}. {_remedy(folder)}")
            clips += [((at + 0.5) / len(found), share / len(found), folder, clip) for at, clip in enumerate(found)]
        clips.sort(key=lambda clip: clip[0])
        least = min(weight for _, weight, _, _ in clips)
        self.weights: Sequence[float] = [weight / least for _, weight, _, _ in clips]
        self.clips = [(folder, clip) for _, _, folder, clip in clips]
        self.shapes: Sequence[tuple[int, ...]] = [clip.shape for _, clip in self.clips]
        first, header = next(iter(self.headers.items()))
        self.empty: Sample | None = _read(first, _EMPTY, header["empty"])

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Sample:
        """One clip's tensors; ValueError if its file is damaged."""
        folder, clip = self.clips[index]
        return _read(folder, clip.file, clip.sha256)


def _read(folder: Path, name: str, sha256: str) -> Sample:
    content = (folder / name).read_bytes()
    check(
        hashlib.sha256(content).hexdigest() == sha256,
        f"{folder / name} is damaged or was changed: its SHA-256 is not the one in {INDEX_NAME}. {_remedy(folder)}",
    )
    return load(content)


class CacheWriter:
    """Writes a cache, or resumes one; a killed process loses only the file it was working on.

    Clips of files that are gone or have changed are removed. ValueError if the folder holds clips of another model, of
    other settings (``made_with``), or of other files alone.
    """

    def __init__(
        self, folder: str | Path, made_with: Mapping[str, Any], files: Sequence[SourceFile], empty: Sample
    ) -> None:
        self.folder, self.files = Path(folder), list[SourceFile]()
        header = {**made_with, "format_version": FORMAT_VERSION, "empty": ""}
        if (self.folder / INDEX_NAME).is_file():
            before, known = read_index(self.folder)
            if any(file.clips for file in known):  # an attempt that made none binds nobody
                wanted = {**dict.fromkeys(before), **header, "empty": before["empty"]}
                check_made_with(self.folder, before, wanted)
                self.files, header = self._keep(known, files), before
        if not (self.folder / _EMPTY).is_file() or file_hash(self.folder / _EMPTY) != header["empty"]:
            header["empty"] = self._write(empty, _EMPTY)
        lines = [json.dumps(header), *(_LINE.dump_json(file).decode() for file in self.files)]
        write_text("".join(f"{line}\n" for line in lines), self.folder / INDEX_NAME)
        used = {clip.file for file in self.files for clip in file.clips}
        for path in (self.folder / "clips").glob("*.safetensors"):
            if f"clips/{path.name}" not in used:
                path.unlink()
        self._next = 1 + max((int(Path(file).stem) for file in used), default=-1)
        kept = {file.name for file in self.files}
        self.left = [file for file in files if file.name not in kept]
        """Files that the cache lacks."""

    def _keep(self, known: Sequence[SourceFile], files: Sequence[SourceFile]) -> list[SourceFile]:
        contents = {file.name: file.content for file in files}
        gone = [file.name for file in known if file.name not in contents]
        check(
            len(gone) < len(known),
            f"{self.folder} holds latents of other files or prompts, such as {gone[:1]}; choose another folder.",
        )
        kept = [file for file in known if contents.get(file.name) == file.content]
        changed = [file.name for file in known if file not in kept and file.name in contents]
        words = {"have changed and are encoded again": changed, "are gone, and so are their clips": gone}
        for what, names in words.items():
            if names:
                logger.warning("%d files or captions %s, such as %s.", len(names), what, names[0])
        return kept

    def write(self, sample: Sample, bucket: tuple[int, ...]) -> CachedClip:
        """Write the tensors of a clip, which counts once :meth:`add` has its file."""
        name = f"clips/{self._next:08d}.safetensors"
        self._next += 1
        return CachedClip(bucket, name, self._write(sample, name), tuple(sample["latents"].shape))

    def _write(self, sample: Sample, name: str) -> str:
        write_tensors({key: tensor.cpu().contiguous() for key, tensor in sample.items()}, self.folder / name)
        return file_hash(self.folder / name)

    def add(self, file: SourceFile) -> None:
        """Append a file to the index."""
        self.files.append(file)
        with (self.folder / INDEX_NAME).open("ab") as index:
            index.write(_LINE.dump_json(file) + b"\n")
