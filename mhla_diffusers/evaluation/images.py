"""Sets of images or videos: a complete sample set, or any folder of files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..files import IMAGE_SUFFIXES, visible_files
from ..generation.pixels import UnreadableMediaError, opened_video, read_picture, shown_pixels, shown_shape
from ..generation.record import RECORD_FILE, Record, read_record

VIDEO_SUFFIX = ".mp4"


def require_samples(folder: Path) -> Record:
    """Read the record of a complete set; FileNotFoundError if it, or a sample, is missing."""
    record = read_record(folder)
    if record is None:
        raise FileNotFoundError(
            f"{folder} has no {RECORD_FILE}; generate the set with mhla eval samples or mhla generate."
        )
    missing = [sample.file for sample in record.samples if not (folder / sample.file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(record.samples)} samples, for example {missing[0]}; repeat "
            "the command that makes the set, which resumes where it stopped."
        )
    return record


def files_of(folder: Path) -> list[Path]:
    """Return the samples that a folder's ``samples.json`` lists; without one its images, or else its MP4s, by path."""
    if (folder / RECORD_FILE).is_file():
        return [folder / sample.file for sample in require_samples(folder).samples]
    shown = visible_files(folder).values()
    images = [file for file in shown if file.suffix.lower() in IMAGE_SUFFIXES]
    found = images or [file for file in shown if file.suffix.lower() == VIDEO_SUFFIX]
    if not found:
        raise FileNotFoundError(
            f"There are no images in {folder}; give a folder of {', '.join(IMAGE_SUFFIXES)} or {VIDEO_SUFFIX} files."
        )
    return found


def batches_of(files: Sequence[Path], size: int) -> Iterator[torch.Tensor]:
    """Yield at most ``size`` images of one resolution at a time: uint8 (B, 3, H, W), or (B, F, 3, H, W)."""
    batch: list[torch.Tensor] = []
    for file in files:
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
