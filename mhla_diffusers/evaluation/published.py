"""Scores that are not measured here: those in the folder of a set, by others or before, and those of the paper."""

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


PaperRows = dict[str, dict[str, float]]


def _adm(fid: float, inception_score: float, sfid: float, precision: float, recall: float) -> dict[str, float]:
    return {
        "fid": fid,
        "inception_score": inception_score,
        "sfid": sfid,
        "precision": precision,
        "recall": recall,
    }


_DIT: PaperRows = {
    "paper: DiT-XL/2, softmax": _adm(9.62, 121.50, 6.85, 0.67, 0.67),
    "paper: DiT-XL/2, MHLA": _adm(8.34, 121.27, 5.52, 0.69, 0.65),
    "paper: DiT-XL/2 guided, softmax": _adm(2.27, 278.24, 4.60, 0.83, 0.57),
    "paper: DiT-XL/2 guided, MHLA": _adm(2.54, 252.07, 4.67, 0.83, 0.56),
}
_SANA: PaperRows = {
    "paper: SANA": {"fid": 6.10, "clip_score": 28.15, "geneval": 0.64},
    "paper: SANA-MHLA": {"fid": 5.90, "clip_score": 28.26, "geneval": 0.68},
}
_WAN: PaperRows = {
    "paper: Wan-FA": {"quality": 85.23, "semantic": 75.65, "total": 83.31},
    "paper: Wan-LA": {"quality": 69.96, "semantic": 11.38, "total": 58.24},
    "paper: Wan-MHLA": {"quality": 84.26, "semantic": 76.16, "total": 82.62},
    "paper: Wan-MHLA-H": {"quality": 84.87, "semantic": 79.59, "total": 83.82},
}
_MODELS = {"dit-xl-2-256": _DIT, "sana": _SANA, "wan2.1-t2v-1.3b": _WAN}
"""Part of a Hub id → the rows of Tab. 9, 4 and 5."""


def paper_rows(model: str | None) -> PaperRows:
    """The paper's rows for a model, by its Hub id or folder; none for models that the paper does not have."""
    name = (model or "").lower()
    return next((rows for part, rows in _MODELS.items() if part in name), {})
