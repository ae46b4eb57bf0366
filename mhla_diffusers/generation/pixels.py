"""Reading pictures and videos as they are meant to be seen: upright, and 8 bits per channel."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps

from ..errors import required


class UnreadableMediaError(ValueError):
    """A file that is not a usable image or video; the message can follow "file is"."""


def read_picture(source: Path) -> Image.Image:
    """Read a picture as RGB of 8 bits, turned as its EXIF data says; UnreadableMediaError if that fails.

    What is transparent is laid on white.
    """
    try:
        with Image.open(source) as image:
            turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I"):  # 16-bit grey, which PIL's own conversion cuts off at 255
            scaled = numpy.asarray(turned).astype(numpy.float64) * 255 / 65535
            turned = Image.fromarray(scaled.round().clip(0, 255).astype(numpy.uint8))
        if turned.has_transparency_data:
            opaque = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque)
        return turned.convert("RGB")
    except (OSError, Image.DecompressionBombError, ValueError, SyntaxError) as error:
        raise UnreadableMediaError(f"not a readable image: {error}") from error


@contextmanager
def opened_video(source: Path) -> Iterator[tuple[Any, Any]]:
    """Context with the container and the stream of a video of PyAV; UnreadableMediaError for what fails in it."""
    av = required("av", "video")
    try:
        with av.open(str(source), "r") as container:
            if not container.streams.video:
                kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "no stream"
                raise UnreadableMediaError(f"it holds no video, but {kinds}")
            yield container, container.streams.video[0]
    except UnreadableMediaError:
        raise
    except (av.FFmpegError, OSError, IndexError, ValueError, TypeError) as error:
        raise UnreadableMediaError(f"not a readable video: {error}") from error


def shown_shape(frame: Any, stream: Any) -> tuple[int, int]:
    """Return height and width of a frame of PyAV as it is shown, with square pixels."""
    height, width = frame.height, round(frame.width * float(stream.sample_aspect_ratio or 1))
    return (width, height) if _orientation(frame)[0] else (height, width)


def shown_pixels(frame: Any, height: int, width: int) -> torch.Tensor:
    """Return a frame of PyAV, scaled to a size and turned and mirrored as it is shown: uint8 (height, width, 3)."""
    transposed, columns, rows = _orientation(frame)
    stored = (width, height)[::-1] if transposed else (width, height)
    scaled = frame.reformat(width=stored[0], height=stored[1], format="rgb24", interpolation="BICUBIC")
    pixels = torch.from_numpy(scaled.to_ndarray())
    return (pixels.transpose(0, 1) if transposed else pixels).flip([0] * rows + [1] * columns)


def _orientation(frame: Any) -> tuple[bool, bool, bool]:
    """Return whether to transpose a frame, then to flip its columns and its rows."""
    matrix = next((data for data in frame.side_data if data.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return False, False, False
    a, b, _, c, d, *_ = numpy.frombuffer(matrix, dtype=numpy.int32).tolist()  # x' = a x + c y, y' = b x + d y
    return (True, c < 0, b < 0) if abs(b) > abs(a) else (False, a < 0, d < 0)
