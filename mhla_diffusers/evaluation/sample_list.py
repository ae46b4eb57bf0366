"""What every file of a sample set shows, written beside the files."""

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


def require_samples(folder: Path) -> list[Sample]:
    """The list of a set whose files are all there.

    Raises:
        FileNotFoundError: no list, or missing files.
        ValueError: the list is damaged or empty.
    """
    samples = read_sample_list(folder)
    if samples is None:
        raise FileNotFoundError(f"{folder} has no {SAMPLE_LIST}; generate the set with mhla eval samples.")
    if not samples:
        raise ValueError(f"{folder / SAMPLE_LIST} lists no samples.")
    missing = [sample.file for sample in samples if not (folder / sample.file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(samples)} samples, for example {missing[0]}; run the command that "
            "makes the set again, which goes on where it stopped."
        )
    return samples
