"""GenEval: prompts, metadata for its evaluator, and the score from its results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import check_unique, read_json_lines, write_text
from ..generation.record import Sample

GENEVAL_SAMPLES = 4
"""Pictures per prompt."""
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""The six tasks, in the order of GenEval's tables."""


def geneval_samples(entries: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """List four pictures per entry of ``evaluation_metadata.jsonl``, as GenEval reads them."""
    return [
        Sample(f"{place:05d}/samples/{number:04d}.png", entry["prompt"])
        for place, entry in enumerate(entries)
        for number in range(GENEVAL_SAMPLES)
    ]


def write_geneval_metadata(entries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write ``{prompt number}/metadata.jsonl``, which GenEval's evaluator reads beside the samples."""
    for place, entry in enumerate(entries):
        write_text(json.dumps(entry) + "\n", folder / f"{place:05d}" / "metadata.jsonl")


def geneval_score(results: str | Path) -> dict[str, float]:
    """Return the fraction of correct images per tag, and their mean as ``overall``.

    ``results`` is the ``results.jsonl`` of GenEval's ``evaluate_images.py``: a line per picture with tag and correct.
    """
    right: dict[str, list[bool]] = {tag: [] for tag in TAGS}
    entries = read_json_lines(Path(results))
    for entry in entries:
        right[entry["tag"]].append(entry["correct"])
    check_unique([str(entry["filename"]) for entry in entries if "filename" in entry], f"{results}: the picture")
    missing = [tag for tag in TAGS if not right[tag]]
    if missing:
        raise ValueError(f"{results} has no images of {', '.join(missing)}; the score is the mean of all six tags.")
    scores = {tag: sum(values) / len(values) for tag, values in right.items()}
    return {**scores, "overall": sum(scores.values()) / len(TAGS)}
