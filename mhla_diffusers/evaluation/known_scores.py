"""Scores of a sample set that lie in its folder, measured before or by others."""

from pathlib import Path

import torch

from ..files import read_json

SCORE_FILES = ("scores.json", "vbench.json", "geneval.json")
"""Files in a set's folder whose numbers are taken into a comparison: name → number, or list of numbers.

A list is of the same things in the same order in every set, for example the loss of every held-out sample; its mean is
the score, and differences between sets are paired.
"""


def known_scores(folder: Path) -> dict[str, torch.Tensor]:
    """Every score: name → float64 (n,), one value where the file has a single number.

    Raises:
        ValueError: a damaged file, or one that does not map names to numbers.
    """
    scores: dict[str, torch.Tensor] = {}
    for name in SCORE_FILES:
        file = folder / name
        if not file.is_file():
            continue
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError(f"{file} must map names to numbers.")
        named = {"geneval": content["overall"]} if "overall" in content else content
        scores |= {key: _numbers(value, key, file) for key, value in named.items() if not isinstance(value, str)}
    return scores


def _numbers(value: object, name: str, file: Path) -> torch.Tensor:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, int | float) for one in values):
        raise ValueError(f"{file}: {name} must be a number or a list of numbers.")
    return torch.tensor(values, dtype=torch.float64)
