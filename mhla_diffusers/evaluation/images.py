"""Sets of images or videos: a folder of files, or the npz of the ADM suite. Read in batches, never whole."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from ..files import IMAGE_SUFFIXES, visible_files, written_aside
from ..generation.pixels import UnreadableMediaError, opened_video, read_picture, shown_pixels, shown_shape
from ..generation.record import SAMPLE_LIST
from ..settings import check_value
from .samples import require_samples

VIDEO_SUFFIX = ".mp4"
_ARRAY = "arr_0.npy"
_SHOWN_NAMES = 4
"""Files that a remark names."""


class Images:
    """A set of images or videos in a fixed order, from a folder or from ``arr_0`` of an npz, uint8 (n, H, W, 3).

    From a folder it takes the samples that its ``samples.json`` lists. Without such a list it takes the image files,
    including subfolders, or if there are none the MP4 files, sorted by path.

    Raises:
        FileNotFoundError: no images there, or samples of the list are missing.
        ValueError: another kind of file, or a damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.left_out: list[Path] = []
        """Images and videos of the folder that are not in the set."""
        if path.is_dir():
            shown = visible_files(path).values()
            images = [file for file in shown if file.suffix.lower() in IMAGE_SUFFIXES]
            videos = [file for file in shown if file.suffix.lower() == VIDEO_SUFFIX]
            self._files = images or videos
            if (path / SAMPLE_LIST).is_file():
                self._files = [path / sample.file for sample in require_samples(path)]
            taken = set(self._files)
            self.left_out = [file for file in (*images, *videos) if file not in taken]
            self._count = len(self._files)
            if not self._files:
                raise FileNotFoundError(
                    f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}) and no {VIDEO_SUFFIX} videos."
                )
            return
        if not path.is_file() or path.suffix != ".npz":
            raise FileNotFoundError(f"There are no images at {path}: it must be a folder or an npz file with arr_0.")
        self._files = []
        with _open_array(path) as (_, shape):
            self._count = shape[0]

    def __len__(self) -> int:
        return self._count

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """Yield at most ``size`` images of one resolution at a time: uint8 (B, 3, H, W), or (B, F, 3, H, W).

        Raises:
            ValueError: a size below 1, or a damaged image.
        """
        check_batch_size(size)
        if not self._files:
            with _open_array(self.path) as (stream, (count, *shape)):
                for start in range(0, count, size):
                    wanted = min(size, count - start) * shape[0] * shape[1] * 3
                    with npz_errors(self.path):
                        content = stream.read(wanted)
                    if len(content) < wanted:
                        raise UnreadableMediaError(f"{self.path} ends after {start} of {count} images; it is cut off.")
                    yield torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, *shape).permute(0, 3, 1, 2)
            return
        batch: list[torch.Tensor] = []
        for file in self._files:
            sample = read_sample(file)
            if batch and (len(batch) == size or sample.shape != batch[0].shape):
                yield torch.stack(batch)
                batch = []
            batch.append(sample)
        yield torch.stack(batch)

    def remark(self) -> str | None:
        """Return what is said of the files that are left out, or None if there are none."""
        if not self.left_out:
            return None
        names = ", ".join(str(file.relative_to(self.path)) for file in self.left_out[:_SHOWN_NAMES])
        more = f" and {len(self.left_out) - _SHOWN_NAMES} more" if len(self.left_out) > _SHOWN_NAMES else ""
        return f"{self.path} is scored without {names}{more}: of its files {len(self)} belong to the set."


def check_batch_size(size: int) -> None:
    """Raise ValueError unless a batch holds a sample."""
    check_value("batch_size", size, int, at_least=1)


def read_sample(file: Path) -> torch.Tensor:
    """Read an image, uint8 (3, H, W), or a video, uint8 (F, 3, H, W).

    Raises:
        UnreadableMediaError: a damaged file, with its name.
        ImportError: a video, but PyAV is missing.
    """
    try:
        if file.suffix.lower() != VIDEO_SUFFIX:
            rgb = read_picture(file)
            pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
            return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)
        with opened_video(file) as (container, stream):
            frames = [shown_pixels(x, *shown_shape(x, stream)) for x in container.decode(stream)]
        if not frames:
            raise UnreadableMediaError("a video without frames")
    except UnreadableMediaError as error:
        raise UnreadableMediaError(f"{file} is {error}. Remove it or generate it again.") from error
    return torch.stack(frames).permute(0, 3, 1, 2)


@contextmanager
def npz_errors(path: Path) -> Iterator[None]:
    """Name the file where reading an npz fails within the context.

    Raises:
        ValueError: it is damaged, or holds objects, which would need pickle.
    """
    try:
        yield
    except (ValueError, EOFError, OSError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a readable npz file: {error}. Get it again, with arrays of numbers."
        ) from error


@contextmanager
def _open_array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Yield the stream of ``arr_0``, positioned after its header, and its shape."""
    from numpy.lib import format as npy

    with npz_errors(path):
        archive = zipfile.ZipFile(path)
    with archive:
        if _ARRAY not in archive.namelist():
            raise ValueError(f"{path} holds no array arr_0, only {', '.join(archive.namelist())}.")
        with npz_errors(path):
            stream = archive.open(_ARRAY)
            read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
            shape, column_major, dtype = read(stream)
        with stream:
            if dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or column_major or 0 in shape:
                raise ValueError(f"{path} must hold images, arr_0 as uint8 (n, H, W, 3), got {dtype} {shape}.")
            yield stream, tuple(shape)


def write_npz(images: Images, path: Path) -> None:
    """Write images of one resolution as ``arr_0`` of an npz, uint8 (n, H, W, 3), which OpenAI's evaluator reads."""
    from numpy.lib import format as npy

    shape: tuple[int, ...] | None = None
    with (
        written_aside(path) as aside,
        zipfile.ZipFile(aside, "w") as archive,
        archive.open(_ARRAY, "w", force_zip64=True) as stream,
    ):
        for batch in images.batches(100):
            pixels = batch.permute(0, 2, 3, 1).contiguous()
            if shape is None:
                shape = tuple(pixels.shape[1:])
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), *shape)}
                npy.write_array_header_1_0(stream, header)
            if tuple(pixels.shape[1:]) != shape:
                raise ValueError(
                    f"An npz holds images of one size, but there are {shape[0]}x{shape[1]} and "
                    f"{pixels.shape[1]}x{pixels.shape[2]}."
                )
            stream.write(pixels.numpy().tobytes())
