"""Pictures whose class is the sum of two handwritten digits, so that a model must find both, wherever they are."""

import random
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from ...tiny.digits import Split, load_digits

SUMS = 19
"""Classes: 0 to 18."""
SIZES = (20, 28)
"""The smallest and largest height and width of a digit in a picture of 64 pixels; they grow with the picture."""

Sample = dict[str, torch.Tensor]
"""``pixel_values``, (3, H, W) in [-1, 1], and ``labels``, int64 ()."""


@dataclass(frozen=True)
class Placed:
    """A digit in a picture: which one, and the square that it fills, in pixels."""

    label: int
    top: int
    left: int
    size: int

    def overlaps(self, other: "Placed") -> bool:
        """Whether two squares share a pixel."""
        return all(
            start < other_start + other.size and other_start < start + self.size
            for start, other_start in ((self.top, other.top), (self.left, other.left))
        )


class SumsOfDigits(Dataset[Sample]):
    """Pictures that are composed as they are asked for, each from the seed and its index.

    Args:
        split: of the digits; no digit is in both.
        count: of pictures.
        size: of a picture in pixels, at least 56, where two digits of the largest size fit side by side.
        seed: the same seed gives the same pictures.

    Raises:
        ValueError: unknown split, or a size that is too small.
        ImportError: scikit-learn is missing.
    """

    def __init__(self, split: Split, count: int, size: int, seed: int) -> None:
        self.digits = load_digits(split)
        self.split, self.count, self.size, self.seed = split, count, size, seed
        if size < 2 * SIZES[1]:
            raise ValueError(f"size={size} is too small for two digits side by side; give at least {2 * SIZES[1]}.")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """One sample.

        Raises:
            IndexError: beyond the last one.
        """
        if not 0 <= index < self.count:
            raise IndexError(index)
        chance = self._chance(index)
        places = _places(self.size, chance)
        picture = torch.zeros(self.size, self.size)
        for one in places:
            digit = self.digits.pick(one.label, chance)[None, None]
            drawn = torch.nn.functional.interpolate(digit, size=(one.size, one.size), mode="bilinear")
            picture[one.top : one.top + one.size, one.left : one.left + one.size] = drawn[0, 0]
        label = torch.tensor(sum(one.label for one in places))
        return {"pixel_values": (2 * picture - 1).expand(3, -1, -1), "labels": label}

    def places(self, index: int) -> tuple[Placed, Placed]:
        """What one picture shows, and where."""
        return _places(self.size, self._chance(index))

    def _chance(self, index: int) -> random.Random:
        return random.Random(f"{self.split} {self.seed} {index}")


def _places(size: int, chance: random.Random) -> tuple[Placed, Placed]:
    """Two digits that do not overlap."""
    while True:
        first, second = (_place(size, chance) for _ in range(2))
        if not first.overlaps(second):
            return first, second


def _place(size: int, chance: random.Random) -> Placed:
    own = chance.randint(*SIZES)
    return Placed(chance.randrange(10), chance.randint(0, size - own), chance.randint(0, size - own), own)
