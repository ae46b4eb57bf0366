"""A folder of generated files: the files, the list of their prompts, and the record of how they were made.

Torch is imported where it is used, because ``mhla eval --help`` imports this file.
"""

import errno
import glob
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import installing
from ..files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_json, visible_files, write_json, written_aside

RECORD_NAME = "generation.json"
"""Records beside generated files how they were made."""
MEASURED = "error at dense steps"
"""Entry of the record that says how far the patched attentions were from full attention there."""
SAMPLE_LIST = "samples.json"
"""File that makes a folder a set for ``mhla eval``: [{"file": …, "text": …, "image": …}, …]."""


@dataclass(frozen=True)
class Sample:
    """One file to generate. Its noise depends on its own seed, or on the seed of the set and ``file``."""

    file: str
    """Path inside the folder of the set."""
    text: str
    """Input of the model: a prompt, or the number of a class."""
    image: str | None = None
    """Path of the picture that the model was given, if any."""
    seed: int | None = None
    """Seed of its noise, if it has one of its own."""


def write_sample_list(samples: Sequence[Sample], folder: Path) -> None:
    """Write the list of a set into its folder."""
    entries = [{name: value for name, value in asdict(sample).items() if value is not None} for sample in samples]
    write_json(entries, folder / SAMPLE_LIST)


def read_sample_list(folder: Path) -> list[Sample] | None:
    """Read the list of a set; None if the folder has none.

    Raises:
        ValueError: the list is damaged, or names a file twice or outside the folder.
    """
    file = folder / SAMPLE_LIST
    if not file.is_file():
        return None
    try:
        entries = read_json(file)
        samples = [Sample(str(x["file"]), str(x["text"]), x.get("image"), x.get("seed")) for x in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a list of samples with file and text.") from error
    listed: set[str] = set()
    for sample in samples:
        path = os.path.normpath(sample.file)
        if path in listed or Path(path).is_absolute() or Path(path).parts[:1] in ((), ("..",)):
            problem = "twice" if path in listed else "outside the folder" if Path(path).parts else "without a name"
            raise ValueError(f"{file} lists {sample.file!r} {problem}; every sample needs a file of its own inside it.")
        listed.add(path)
    return samples


def check_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Raise ValueError unless the files of a folder were made with the same choices, so that they can be kept."""
    file = folder / RECORD_NAME
    # without samples it is left over from a failed run and means nothing
    if not file.exists() or first_sample(folder) is None:
        return
    recorded = read_json(file)
    if not isinstance(recorded, dict):
        raise ValueError(f"{file} is damaged: it must name how the samples were made. Choose another output folder.")
    changed = []
    for name, now in choices.items():
        before = recorded.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):  # only what differs
            same = {key for key in before.keys() & now.keys() if before[key] == now[key]}
            before, now = ({key: kept[key] for key in kept if key not in same} for kept in (before, now))
        changed.append(f"{name}={before!r}, now {now!r}")
    if changed:
        raise ValueError(
            f"{folder} has files made with other settings ({'; '.join(changed)}). Choose another output folder."
        )


def record_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Record how the files are made, so that later runs do not mix other files in; see :func:`check_choices`.

    What :func:`record_measured` has written stays while there are files.
    """
    check_choices(folder, choices)
    file = folder / RECORD_NAME
    earlier = read_json(file) if file.exists() and first_sample(folder) is not None else {}
    write_json({**choices, **({MEASURED: earlier[MEASURED]} if MEASURED in earlier else {})}, file)


def record_measured(folder: Path, words: Sequence[str]) -> None:
    """Add to the record what dense steps measured, a sentence for each transformer."""
    write_json({**read_json(folder / RECORD_NAME), MEASURED: list(words)}, folder / RECORD_NAME)


def first_sample(folder: Path) -> Path | None:
    """Find any image or video in a folder or its subfolders."""
    # names of files that are being written begin with a dot
    samples = (x for x in visible_files(folder).values() if x.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
    return next(samples, None)


def write_sample(sample: Any, file: Path, frames_per_second: int) -> None:
    """Write what a pipeline generated, atomically: a PIL image as .png, frames (F, H, W, 3) in [0, 1] as .mp4."""
    for left in file.parent.glob(f".*-{glob.escape(file.name)}"):  # by a run that was killed; one process has a sample
        left.unlink(missing_ok=True)
    with written_aside(file) as aside:
        if file.suffix == ".mp4":
            write_video(sample, aside, frames_per_second)
        else:
            sample.save(aside)


def write_video(frames: Any, file: Path, frames_per_second: int) -> None:
    """Write frames (F, H, W, 3) in [0, 1] as an MP4 (H.264); OSError if ffmpeg failed, as on a full disk."""
    import torch

    imageio = import_imageio()
    pixels = [(255 * torch.as_tensor(frame).clamp(0, 1)).round().to(torch.uint8).numpy() for frame in frames]
    failed = OSError(errno.EIO, "ffmpeg failed before the video was complete, as on a full disk", str(file))
    try:
        imageio.mimwrite(file, pixels, format="FFMPEG", fps=frames_per_second, macro_block_size=2, quality=9)
    except OSError as error:
        raise failed from error
    if not is_whole_video(file):  # imageio ignores ffmpeg's exit status
        raise failed


def is_whole_video(file: Path) -> bool:
    """Return whether the boxes of an MP4 fill it, with the index of its frames, which is written last."""
    length, place, kinds = file.stat().st_size, 0, set()
    with file.open("rb") as stream:
        while place + 8 <= length:
            stream.seek(place)
            size, kind = struct.unpack(">I4s", stream.read(8))
            if size == 1:  # the size is in the next eight bytes
                size = int.from_bytes(stream.read(8), "big")
            elif size == 0:  # the rest of the file
                size = length - place
            if size < 8:
                return False
            kinds.add(kind)
            place += size
    return place == length and {b"mdat", b"moov"} <= kinds


def import_imageio() -> Any:
    """Import imageio, which writes MP4 through imageio-ffmpeg; the ImportError says how to get both."""
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - imageio writes MP4 through it
    except ImportError as error:
        raise ImportError(f"Writing videos needs imageio and imageio-ffmpeg; {installing('video')}.") from error
    return imageio
