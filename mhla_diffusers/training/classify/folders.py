"""Folders with one subfolder per class, such as ImageNet's: pictures as tensors, cut and flipped as in training."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ...config import check
from ...files import IMAGE_SUFFIXES
from .digits import Sample

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AREAS, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Part of a picture's area that a random crop keeps, and width by height, as DeiT has them."""
_TRIES = 10

View = Callable[[Any], torch.Tensor]
"""A picture of PIL → (3, size, size)."""


class UnreadablePictureError(ValueError):
    """A damaged picture, with its name."""


@dataclass(frozen=True)
class Normalised:
    """Pixels of PIL's pictures as a model takes them: (x / 255 - mean) / std per channel."""

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __call__(self, picture: Any) -> torch.Tensor:
        """A picture in RGB as (3, H, W)."""
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32)).movedim(-1, 0) / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels - mean) / std


@dataclass(frozen=True)
class CentreView:
    """The middle of a picture, as classifiers are judged on.

    Args:
        size: of the result in pixels.
        crop: part of the shorter side that is kept, 0.875 for 224 of 256 pixels.
        pixels: as the model takes them.

    Raises:
        ValueError: a part that is none.
    """

    size: int
    crop: float = 0.875
    pixels: Normalised = Normalised()

    def __post_init__(self) -> None:
        check(
            0 < self.crop <= 1,
            f"crop={self.crop} must be above 0 and at most 1, the part of a picture's shorter side that is kept.",
        )

    def __call__(self, picture: Any) -> torch.Tensor:
        """(3, size, size)."""
        side = self.crop * min(picture.size)
        left, top = ((length - side) / 2 for length in picture.size)
        return self.pixels(_resized(picture, self.size, (left, top, left + side, top + side)))


@dataclass(frozen=True)
class RandomView:
    """A part of a picture, of any place, size and shape within bounds, flipped every other time.

    Args:
        size: of the result in pixels.
        pixels: as the model takes them.
    """

    size: int
    pixels: Normalised = Normalised()

    def __call__(self, picture: Any) -> torch.Tensor:
        """(3, size, size)."""
        # torch's generator, which every process that reads has its own state of
        chance = random.Random(int(torch.randint(2**62, ()).item()))
        width, height = picture.size
        view = self.pixels(_resized(picture, self.size, _random_box(width, height, chance)))
        return view.flip(-1) if chance.random() < 0.5 else view


def subfolders_of(folder: Path) -> list[str]:
    """Names of the classes that a folder has, in their order.

    Raises:
        FileNotFoundError: no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}; give one with a subfolder of pictures per class.")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Raise unless a folder has a subfolder for each class, and no other.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: naming the first that differ.
    """
    others = sorted({*subfolders_of(folder)} ^ {*classes})
    check(
        not others,
        f"The subfolders of {folder} are not the classes that the model is trained to tell apart: "
        f"{', '.join(others[:5])} {'is' if len(others) == 1 else 'are'} in one of the two alone; give a folder with a "
        "subfolder for each class, by the same names.",
    )


class ImageFolder(Dataset[Sample]):
    """The pictures of a folder with one subfolder per class.

    Args:
        folder: which.
        view: makes the tensor of a picture.
        classes: names of the subfolders in the order of their labels; None for the order of the names.

    Raises:
        FileNotFoundError: no such folder, or one without pictures in subfolders.
        ValueError: the subfolders are not those of the classes.
    """

    def __init__(self, folder: Path, view: View, classes: Sequence[str] | None = None) -> None:
        self.folder, self.view = folder, view
        self.classes = subfolders_of(folder) if classes is None else list(classes)
        check_classes(folder, self.classes)
        names = [_pictures_in(folder / name) for name in self.classes]
        # arrays: every worker would copy a list of paths, since to look at an object is to count a reference in it
        self.labels: NDArray[np.int64] = np.repeat(np.arange(len(names)), [len(one) for one in names])
        self.names = np.array([name for one in names for name in one], dtype=np.bytes_)
        if not len(self.names):
            raise FileNotFoundError(
                f"{folder} has no subfolder per class with pictures ({', '.join(IMAGE_SUFFIXES)}) in it."
            )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        """One sample.

        Raises:
            UnreadablePictureError: a damaged picture.
        """
        from PIL import Image

        label = int(self.labels[index])
        file = self.folder / self.classes[label] / os.fsdecode(self.names[index])
        try:
            with Image.open(file) as opened:
                picture = opened.convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # all of them are Pillow's
            raise UnreadablePictureError(f"{file} cannot be read as a picture: {error}.") from error
        return {"pixel_values": self.view(picture), "labels": torch.tensor(label)}


def _pictures_in(folder: Path) -> list[bytes]:
    """Paths below a folder, in their order."""
    return [
        os.fsencode(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in IMAGE_SUFFIXES and file.name[0] != "."
    ]


def _resized(picture: Any, size: int, box: tuple[float, float, float, float]) -> Any:
    """The part (left, top, right, bottom) of a picture, ``size`` pixels high and wide."""
    from PIL import Image

    return picture.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _random_box(width: int, height: int, chance: random.Random) -> tuple[float, float, float, float]:
    """(left, top, right, bottom); the whole shorter side in the middle where no try fits into the picture."""
    for _ in range(_TRIES):
        area = chance.uniform(*_AREAS) * width * height
        ratio = _RATIOS[0] * (_RATIOS[1] / _RATIOS[0]) ** chance.random()
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = chance.uniform(0, width - wide), chance.uniform(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
