"""A folder of generated samples and the record of how they were made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .evaluation.images import IMAGE_SUFFIXES, VIDEO_SUFFIX
from .evaluation.results import read_json, write_json

RECORD_NAME = "generation.json"
"""File beside what was generated that says how."""


def check_writable(folder: Path) -> None:
    """Make a folder and make sure that it can be written.

    Raises:
        OSError: if it cannot, with the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"Cannot write to the output folder {folder}: {error.strerror}. Choose another one.") from error


def record_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """Keep beside the files what they were made with, so that nothing made otherwise is taken for them later.

    Raises:
        ValueError: the folder holds files that were made with other choices.
    """
    file = folder / RECORD_NAME
    # without samples it is what a run has left that failed, and speaks of nothing
    if not file.exists() or first_sample(folder) is None:
        write_json(choices, file)
        return
    recorded = read_json(file)
    before = {name: recorded.get(name) for name in choices}
    changed = [f"{name}={before[name]!r}, now {now!r}" for name, now in choices.items() if before[name] != now]
    if changed:
        raise ValueError(f"{folder} holds files made otherwise ({'; '.join(changed)}). Choose another output folder.")


def first_sample(folder: Path) -> Path | None:
    """Any image or video in a folder or those within it, or None if there is none."""
    samples = (file for file in folder.rglob("*") if file.suffix.lower() in (*IMAGE_SUFFIXES, VIDEO_SUFFIX))
    # a file that is being written has a dot before its name
    return next((file for file in samples if not file.name.startswith(".")), None)
