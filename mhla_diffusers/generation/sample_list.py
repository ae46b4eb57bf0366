"""The list beside generated files of what every one of them shows, by which ``mhla eval`` takes a folder for a set."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files import read_json, write_json

SAMPLE_LIST = "samples.json"
"""Name of the list: [{"file": …, "text": …}, …]."""


@dataclass(frozen=True)
class Sample:
    """One file to generate. Its noise depends on the seed of the set and on ``file`` alone."""

    file: str
    """Path inside the folder of the set."""
    text: str
    """What the model is given: a prompt, or the number of a class."""


def write_sample_list(samples: Sequence[Sample], folder: Path) -> None:
    """Write the list of a set into its folder.

    Raises:
        OSError: the folder cannot be written.
    """
    write_json([asdict(sample) for sample in samples], folder / SAMPLE_LIST)


def read_sample_list(folder: Path) -> list[Sample] | None:
    """The list of a set, or None where a folder has none.

    Raises:
        ValueError: the list is damaged.
    """
    file = folder / SAMPLE_LIST
    if not file.is_file():
        return None
    try:
        return [Sample(str(entry["file"]), str(entry["text"])) for entry in read_json(file)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no list of samples with file and text.") from error
