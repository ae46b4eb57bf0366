"""Patches that were saved before all blocks of the sparse branch were uniform: format versions 1 and 2."""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import DEFAULT_BLOCK_SIZE

_TENSORS = {".mhla.far_field_log_weight": ".mhla.linear_log_weight", ".mhla.mean_bias": ".mhla.pooled_bias"}
"""Ends of names: then, now."""


def new_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of today's :class:`MHLAConfig` that say the same as those of an old patch, or what comes closest.

    Lists that were chosen by content have uniform blocks now, as long as the patch says, or of 64 tokens where it had
    boxes of the grid; β stays the parameter that it was with boxes.

    Raises:
        ValueError: lists of boxes that were calibrated, or that held the own box alone.
    """
    settings = dict(settings)
    sparse = "own" if settings.pop("near_field", "none") == "softmax" else settings.pop("exact", "none")
    if sparse == "calibrated" or (sparse == "own" and settings.get("causal") is None):
        raise ValueError(
            f"its lists of boxes, exact={sparse!r}, are not supported any more. Lists are chosen by content now, from "
            f"uniform blocks: apply_mhla(model, blocks={tuple(settings.get('blocks', ()))}, sparse='content'), which "
            "needs no training; or adapt such a patch anew."
        )
    settings.pop("exact_tiles", None)
    block_size, density = settings.pop("block_size", None), settings.pop("exact_share", None)
    pooled, fit = settings.pop("tile_means", True), settings.pop("fit_mean_bias", None)
    settings |= {"sparse": sparse, "pooled": pooled}
    if sparse == "content":
        learned = False if pooled and block_size is None else fit
        settings |= {
            "density": density,
            "block_size": block_size or DEFAULT_BLOCK_SIZE,
            "fit_pooled_bias": learned,
        }
    return settings


def note_of(settings: Mapping[str, Any]) -> str | None:
    """What to tell of an old patch that opens as something else than it was trained with; None if nothing."""
    if settings.get("exact") != "content" or settings.get("block_size") is not None:
        return None
    return (
        "this patch was trained with boxes of the token grid, and opens with uniform blocks, which it was not "
        f"trained with: of {DEFAULT_BLOCK_SIZE} tokens, or of as many as load_mhla(..., block_size=...) is told; "
        "calibrate_sparse(model, run) fits λ and β to them, and adapting it brings the rest."
    )


def new_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an old patch by the names that they have now."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in _TENSORS.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed
