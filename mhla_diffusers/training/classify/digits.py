"""Pictures whose class is the sum of two handwritten digits, so that a model must find both, wherever they are."""

import random
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from ...tiny.digits import Split, load_digits

SUMS = 19
"""Classes: 0 to 18."""
STEP = 8
"""Digits lie at multiples of it, in pixels: with patches of that size a model learns in minutes."""
SIZE = 16
"""Height and width of a digit in pixels, two steps, so that a patch shows a quarter of one."""

Sample = dict[str, torch.Tensor]
"""``pixel_values``, (3, H, W) in [-1, 1], and ``labels``, int64 ()."""


@dataclass(frozen=True)
class Placed:
    """A digit in a picture: which one, and where its square begins, in pixels."""

    label: int
    top: int
    left: int

    def overlaps(self, other: "Placed") -> bool:
        """Whether two squares share a pixel."""
        return abs(self.top - other.top) < SIZE and abs(self.left - other.left) < SIZE


class SumsOfDigits(Dataset[Sample]):
    """Pictures that are composed as they are asked for, each from the seed and its index.

    Args:
        split: of the digits; no digit is in both.
        count: of pictures.
        size: of a picture in pixels, at least 48, where two digits fit wherever the first one lies.
        seed: the same seed gives the same pictures.

    Raises:
        ValueError: unknown split, or a size that is too small.
        ImportError: scikit-learn is missing.
    """

    def __init__(self, split: Split, count: int, size: int, seed: int) -> None:
        self.digits = load_digits(split)
        self.split, self.count, self.size, self.seed = split, count, size, seed
        if size < 3 * SIZE:
            raise ValueError(f"size={size} is too small for two digits at any places; give at least {3 * SIZE}.")

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
            drawn = torch.nn.functional.interpolate(digit, size=(SIZE, SIZE), mode="bilinear")
            picture[one.top : one.top + SIZE, one.left : one.left + SIZE] = drawn[0, 0]
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
    top, left = (chance.randrange(0, size - SIZE + 1, STEP) for _ in range(2))
    return Placed(chance.randrange(10), top, left)
