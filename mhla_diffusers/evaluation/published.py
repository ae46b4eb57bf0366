"""Scores that are not measured here: files in the folder of a set, and the paper's numbers."""

from pathlib import Path

import torch

from ..files import read_json

SCORE_FILES = ("scores.json", "vbench.json", "geneval.json")
"""Files in a set's folder whose scores a comparison includes: name → number, or list of numbers.

A list has the same items in the same order in every set, for example the loss of every held-out sample. Its mean is the
score, and differences between sets are paired.
"""
PaperRows = dict[str, dict[str, float]]


def known_scores(folder: Path) -> dict[str, torch.Tensor]:
    """Every score: name → float64 (n,), with n = 1 for a single number.

    Raises:
        ValueError: a damaged file, or one that does not map names to numbers.
    """
    scores: dict[str, torch.Tensor] = {}
    for file in (folder / name for name in SCORE_FILES if (folder / name).is_file()):
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError(f"{file} must map names to numbers.")
        for name, value in ({"geneval": content["overall"]} if "overall" in content else content).items():
            values = value if isinstance(value, list) else [value]
            if isinstance(value, str):
                continue
            if not values or not all(isinstance(one, int | float) for one in values):
                raise ValueError(f"{file}: {name} must be a number or a list of numbers.")
            scores[name] = torch.tensor(values, dtype=torch.float64)
    return scores


_ADM = ("fid", "inception_score", "sfid", "precision", "recall")
_VBENCH = ("quality", "semantic", "total")
_SANA = ("fid", "clip_score", "geneval")
_PAPER: dict[str, tuple[tuple[str, ...], dict[str, tuple[float, ...]]]] = {
    "dit-xl-2-256": (
        _ADM,
        {
            "paper: DiT-XL/2, softmax": (9.62, 121.50, 6.85, 0.67, 0.67),
            "paper: DiT-XL/2, MHLA": (8.34, 121.27, 5.52, 0.69, 0.65),
            "paper: DiT-XL/2 guided, softmax": (2.27, 278.24, 4.60, 0.83, 0.57),
            "paper: DiT-XL/2 guided, MHLA": (2.54, 252.07, 4.67, 0.83, 0.56),
        },
    ),
    "sana": (_SANA, {"paper: SANA": (6.10, 28.15, 0.64), "paper: SANA-MHLA": (5.90, 28.26, 0.68)}),
    "wan2.1-t2v-1.3b": (
        _VBENCH,
        {
            "paper: Wan-FA": (85.23, 75.65, 83.31),
            "paper: Wan-LA": (69.96, 11.38, 58.24),
            "paper: Wan-MHLA": (84.26, 76.16, 82.62),
            "paper: Wan-MHLA-H": (84.87, 79.59, 83.82),
        },
    ),
}
"""Part of a Hub id → names of scores and the rows of Tab. 9, 4 and 5."""


def paper_rows(model: str | None) -> PaperRows:
    """The paper's rows for a model, by its Hub id or folder; empty for other models."""
    name = (model or "").lower()
    scores, rows = next((found for part, found in _PAPER.items() if part in name), ((), {}))
    return {row: dict(zip(scores, values, strict=True)) for row, values in rows.items()}
