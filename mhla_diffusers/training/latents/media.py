"""Videos and images with captions, and reading them."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ...families import Clip
from ...files import IMAGE_SUFFIXES


class UnreadableMediaError(ValueError):
    """A file that is damaged, too short or no video or image at all."""


@dataclass(frozen=True)
class TarMember:
    """A file inside an uncompressed tar archive."""

    archive: Path
    name: str
    offset: int
    """Of its first byte in the archive."""
    size: int

    def read(self) -> bytes:
        """Its content; less than ``size`` bytes if the archive ends before."""
        with self.archive.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class Media:
    """A file and what it shows."""

    file: Path | TarMember
    name: str
    """Path inside the folder, that of a tar archive before it."""
    caption: str
    """Prompt; for DiT the class."""
    problem: str | None = None
    """Why it cannot be used, if that is known without reading it."""


def read_clip(file: Path | TarMember, clip: Clip) -> torch.Tensor:
    """Frames of a video, or an image, resized to cover the size and cropped in the middle.

    Returns:
        uint8 (3, frames, height, width).

    Raises:
        UnreadableMediaError: with the reason.
        ImportError: a video, and PyAV is missing.
    """
    source: str | BytesIO
    if isinstance(file, TarMember):
        content = file.read()
        if len(content) < file.size:
            raise UnreadableMediaError(f"{file.archive.name} ends in the middle of it")
        source, size = BytesIO(content), file.size
    else:
        source, size = str(file), file.stat().st_size if file.is_file() else 0
    if size == 0:
        raise UnreadableMediaError("the file is empty")
    if Path(file.name).suffix.lower() in IMAGE_SUFFIXES:
        if clip.frames != 1:
            raise UnreadableMediaError(f"an image has no {clip.frames} frames")
        return _read_image(source, clip)[:, None]
    return torch.stack(list(_read_frames(source, clip)), dim=1)


def _read_image(source: str | BytesIO, clip: Clip) -> torch.Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(source) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            size = clip.size_for(upright.height, upright.width)
            fitted = ImageOps.fit(upright, (size[1], size[0]), method=Image.Resampling.BICUBIC)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise UnreadableMediaError(f"no readable image: {error}") from error
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.view(*size, 3).permute(2, 0, 1)


def _read_frames(source: str | BytesIO, clip: Clip) -> Iterator[torch.Tensor]:
    """(3, height, width) at 0, 1 / fps, 2 / fps, … seconds: the latest frame shown by then."""
    try:
        import av
    except ImportError as error:
        raise ImportError("Reading videos needs PyAV: pip install mhla_diffusers[train]") from error

    wanted = 0
    last_time = 0.0
    previous: Any = None
    try:
        with av.open(source, "r") as container:
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
