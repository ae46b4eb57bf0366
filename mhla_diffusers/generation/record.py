"""A folder of generated files: writing them, and the record of how they were made."""

import errno
import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..config import adapted_patch_folder
from ..files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, file_hash, read_json, write_json, written_aside

RECORD_NAME = "generation.json"
"""File beside what was generated that says how."""

_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"


def check_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Make sure that what lies in a folder was made with the same choices, so that it may be kept.

    Raises:
        ValueError: the folder holds files that were made with other choices.
    """
    file = folder / RECORD_NAME
    # without samples it is what a run has left that failed, and speaks of nothing
    if not file.exists() or first_sample(folder) is None:
        return
    recorded = read_json(file)
    changed = [
        "{}={!r}, now {!r}".format(name, *_differing(recorded.get(name), now))
        for name, now in choices.items()
        if recorded.get(name) != now
    ]
    if changed:
        raise ValueError(f"{folder} holds files made otherwise ({'; '.join(changed)}). Choose another output folder.")


def record_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Keep beside the files what they were made with, so that nothing made otherwise is taken for them later.

    Raises:
        ValueError: the folder holds files that were made with other choices.
        OSError: the folder cannot be written.
    """
    check_choices(folder, choices)
    write_json(choices, folder / RECORD_NAME)


def _differing(before: Any, now: Any) -> tuple[Any, Any]:
    """Two values of a choice; of two mappings, what is not the same in both."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return before, now
    same = [name for name in before if name in now and before[name] == now[name]]
    first, second = ({name: kept[name] for name in kept if name not in same} for kept in (before, now))
    return first, second


def identity_of_weights(weights: str) -> str | None:
    """Hash of the files that a folder of weights holds, so that a record tells when they change; None for a Hub id."""
    folder = adapted_patch_folder(weights) or Path(weights)
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    return hashlib.sha256("".join(file.name + file_hash(file) for file in files).encode()).hexdigest()[:16]


def first_sample(folder: Path) -> Path | None:
    """Any image or video in a folder or those within it, or None if there is none."""
    samples = (file for file in folder.rglob("*") if file.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
    # a file that is being written has a dot before its name
    return next((file for file in samples if not file.name.startswith(".")), None)


def is_whole(file: Path) -> bool:
    """Whether a file is there and holds all of an MP4 or PNG; of other formats, whether it is there."""
    if not file.is_file():
        return False
    length = file.stat().st_size
    with file.open("rb") as stream:
        if file.suffix == ".mp4":
            return _is_whole_video(stream, length)
        if file.suffix == ".png":
            stream.seek(max(0, length - len(_END_OF_PNG)))
            return stream.read() == _END_OF_PNG
    return True


def _is_whole_video(stream: BinaryIO, length: int) -> bool:
    """Whether the boxes of an MP4 fill the file, and the index of its frames, which is written last, is among them."""
    kinds, place = set(), 0
    while place + 8 <= length:
        stream.seek(place)
        size, kind = struct.unpack(">I4s", stream.read(8))
        if size == 1:  # the next eight bytes tell it
            size = int.from_bytes(stream.read(8), "big")
        elif size == 0:  # the rest of the file
            size = length - place
        if size < 8:
            return False
        kinds.add(kind)
        place += size
    return place == length and {b"mdat", b"moov"} <= kinds


def write_sample(sample: Any, file: Path, frames_per_second: int) -> None:
    """Write what a pipeline generated, whole or not at all.

    Args:
        sample: a PIL image, or frames (F, H, W, 3) in [0, 1].
        file: ``.png`` for an image, ``.mp4`` for frames.
        frames_per_second: of a video.

    Raises:
        OSError: the file cannot be written.
        ImportError: frames, and imageio is missing.
    """
    with written_aside(file) as aside:
        if file.suffix == ".mp4":
            write_video(sample, aside, frames_per_second)
        else:
            sample.save(aside)


def write_video(frames: Any, file: Path, frames_per_second: int) -> None:
    """Write an MP4 (H.264).

    Args:
        frames: (F, H, W, 3) in [0, 1].
        file: where to.
        frames_per_second: how fast it plays.

    Raises:
        OSError: ffmpeg failed, as on a full disk.
        ImportError: imageio is missing.
    """
    imageio = import_imageio()
    pixels = [(255 * torch.as_tensor(frame).clamp(0, 1)).round().to(torch.uint8).numpy() for frame in frames]
    failed = OSError(errno.EIO, "ffmpeg failed before the video was whole, as on a full disk", str(file))
    try:
        imageio.mimwrite(file, pixels, format="FFMPEG", fps=frames_per_second, macro_block_size=2, quality=9)
    except OSError as error:
        raise failed from error
    if not is_whole(file):  # imageio does not look at how ffmpeg ended
        raise failed


def import_imageio() -> Any:
    """imageio, which writes MP4 through imageio-ffmpeg.

    Raises:
        ImportError: one of the two is missing.
    """
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - imageio writes MP4 through it
    except ImportError as error:
        raise ImportError(
            "Writing videos needs imageio and imageio-ffmpeg: pip install mhla_diffusers[video]"
        ) from error
    return imageio
