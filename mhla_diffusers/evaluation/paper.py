"""Rows of the paper's tables, to stand beside one's own."""

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
