"""A folder of generated files: how each was made, and how images and videos are written.

Torch is imported where it is used, because ``mhla eval --help`` imports this file.
"""

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import required
from ..files import read_json, written_aside

RECORD_FILE = "samples.json"
"""Makes a folder a set for ``mhla eval``."""


@dataclass(frozen=True)
class Sample:
    """One file to generate."""

    file: str
    """Path inside the folder of the set."""
    text: str
    """A prompt, or a class by number or name."""
    image: str | None = None
    """Path of the picture that the model was given, if any."""
    seed: int = 0
    """Seed of the noise."""


@dataclass
class Record:
    """What ``samples.json`` says of a folder."""

    choices: Mapping[str, Any]
    """Everything but prompt and seed that determines a sample."""
    samples: list[Sample]


def read_record(folder: Path) -> Record | None:
    """Read a folder's ``samples.json``; None without one, ValueError for a damaged one."""
    file = folder / RECORD_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        return Record(content["choices"], [Sample(**one) for one in content["samples"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a record of this version. Generate into an empty folder.") from error


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
    """Write frames (F, H, W, 3) in [0, 1] as an MP4 (H.264, nearly lossless); OSError if that fails."""
    import torch

    av = required("av", "video")
    pixels = (255 * torch.stack([torch.as_tensor(one) for one in frames]).clamp(0, 1)).round().to(torch.uint8).numpy()
    try:
        with av.open(str(file), "w") as container:
            stream = container.add_stream("libx264", rate=Fraction(frames_per_second), options={"qp": "5"})
            stream.height, stream.width = (side + side % 2 for side in pixels.shape[1:3])  # H.264 takes even sides
            stream.pix_fmt = "yuv420p"
            for frame in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
