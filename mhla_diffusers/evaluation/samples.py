"""Sets of samples: which files they hold, and whether they are complete."""

import random
from pathlib import Path

from ..errors import check_choice
from ..generation.record import SAMPLE_LIST, Sample, read_sample_list
from ..settings import PositiveInteger, check_value


def class_samples(count: int, labels: int, order: str = "balanced", seed: int = 0) -> list[Sample]:
    """List class-conditional images ``000000.png`` …: 50 000 of 1000 classes for ImageNet.

    The order "balanced" cycles through the classes; "random" draws them.
    """
    for name, number in (("count", count), ("labels", labels)):
        check_value(name, number, PositiveInteger)
    check_choice("order", order, ("balanced", "random"))
    chance = random.Random(seed)
    chosen = [number % labels if order == "balanced" else chance.randrange(labels) for number in range(count)]
    return [Sample(f"{number:06d}.png", str(label)) for number, label in enumerate(chosen)]


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
