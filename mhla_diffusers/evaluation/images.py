"""Sets of images or videos: a complete sample set, any folder of files, or the npz of the ADM suite."""

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from ..files import IMAGE_SUFFIXES, visible_files
from ..generation.pixels import UnreadableMediaError, opened_video, read_picture, shown_pixels, shown_shape
from ..generation.record import SAMPLE_LIST, Sample, read_sample_list

VIDEO_SUFFIX = ".mp4"


def require_samples(folder: Path) -> list[Sample]:
    """Read the list of a complete set.

    Raises:
        FileNotFoundError: no list, or missing files.
        ValueError: the list is damaged or empty.
    """
    samples = read_sample_list(folder)
    if samples is None:
        raise FileNotFoundError(
            f"{folder} has no {SAMPLE_LIST}; generate the set with mhla eval samples or mhla generate."
        )
    if not samples:
        raise ValueError(f"{folder / SAMPLE_LIST} lists no samples.")
    missing = [sample.file for sample in samples if not (folder / sample.file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(samples)} samples, for example {missing[0]}; run the command that "
            "makes the set again, which resumes where it stopped."
        )
    return samples


class Images:
    """A set of images or videos in a fixed order, from a folder or from ``arr_0`` of an npz, uint8 (n, H, W, 3).

    From a folder it takes the samples that its ``samples.json`` lists. Without such a list it takes the image files,
    including subfolders, or if there are none the MP4 files, sorted by path.

    Raises:
        FileNotFoundError: no images there, or samples of the list are missing.
        ValueError: another kind of file, or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, list[Path]()
        self._array = torch.empty(0)
        if path.suffix == ".npz" and path.is_file():
            array = read_npz(path).get("arr_0", numpy.empty(0))
            if array.dtype != "uint8" or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
                raise ValueError(
                    f"{path} must hold images, arr_0 as uint8 (n, H, W, 3), got {array.dtype} {array.shape}."
                )
            self._array = torch.from_numpy(array).permute(0, 3, 1, 2)
            return
        if (path / SAMPLE_LIST).is_file():
            self._files = [path / sample.file for sample in require_samples(path)]
        elif path.is_dir():
            shown = visible_files(path).values()
            images = [file for file in shown if file.suffix.lower() in IMAGE_SUFFIXES]
            self._files = images or [file for file in shown if file.suffix.lower() == VIDEO_SUFFIX]
        if not self._files:
            raise FileNotFoundError(
                f"There are no images at {path}: it must be a folder of images ({', '.join(IMAGE_SUFFIXES)}) or "
                f"{VIDEO_SUFFIX} videos, or an npz file with arr_0."
            )

    def __len__(self) -> int:
        return len(self._files) or len(self._array)

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """Yield at most ``size`` images of one resolution at a time: uint8 (B, 3, H, W), or (B, F, 3, H, W)."""
        if not self._files:
            yield from self._array.split(size)
            return
        batch: list[torch.Tensor] = []
        for file in self._files:
            sample = read_sample(file)
            if batch and (len(batch) == size or sample.shape != batch[0].shape):
                yield torch.stack(batch)
                batch = []
            batch.append(sample)
        yield torch.stack(batch)


def read_sample(file: Path) -> torch.Tensor:
    """Read an image, uint8 (3, H, W), or a video, uint8 (F, 3, H, W); UnreadableMediaError for a damaged file."""
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


def read_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of an npz; ValueError if it is damaged, or holds objects, which would need pickle."""
    try:
        with numpy.load(path, allow_pickle=False) as content:
            return dict(content)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable npz file: {error}. Get it again.") from error
