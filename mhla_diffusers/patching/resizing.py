"""MHLA's tensors of one transformer brought to other block counts, tile counts or another exact share."""

from collections.abc import Mapping

import torch

from ..attention import resize_mixing
from ..attention.tile_scores import budget_of, resize_scores, spend
from ..config import MHLAConfig
from .tile_choice import TileChoice


def resized(
    tensors: Mapping[str, torch.Tensor], before: MHLAConfig, after: MHLAConfig, heads: int
) -> dict[str, torch.Tensor]:
    """The tensors that a patch with other settings has.

    Mixing matrices are interpolated over block positions. Of calibrated tiles the scores are interpolated and the tiles
    chosen anew.

    Args:
        tensors: name → tensor, for example ``blocks.0.attn1.mhla.mixing``; others are left as they are.
        before: settings that they belong to.
        after: settings that they shall fit.
        heads: H.
    """
    part = dict(tensors)
    if before.blocks != after.blocks:
        for key in part:
            if key.endswith(".mhla.mixing"):
                part[key] = resize_mixing(part[key], before.blocks, after.blocks)
    is_calibrated = before.exact == after.exact == "calibrated"
    # at a share of 1 lists are not read, so that those of another share wait there for it
    if is_calibrated and (before.tiles != after.tiles or before.share != after.share != 1):
        part |= _chosen_anew(part, before, after, heads)
    return part


def _chosen_anew(
    part: dict[str, torch.Tensor], before: MHLAConfig, after: MHLAConfig, heads: int
) -> dict[str, torch.Tensor]:
    """Calibrated tiles for another share or other tile counts, from the scores that were saved, if there are any."""
    marker = ".mhla.exact.is_exact"
    names = [key.removesuffix(marker) for key in part if key.endswith(marker)]
    choices, scores, masks = {}, {}, {}
    for name in names:
        kept = TileChoice(before, heads)
        kept.load_state_dict({key: part[f"{name}.mhla.exact.{key}"] for key in kept.state_dict()})
        choices[name] = TileChoice(after, heads)
        if kept.is_exact.any():  # else nothing was measured, and the new choice is as fresh as the old one
            scores[name] = resize_scores(kept.all_scores(), before.tiles, after.tiles)
            masks[name] = kept.mask
    if before.tiles == after.tiles and masks and _holds(list(masks.values()), after.share):
        return {}
    if scores:
        for name, mask in zip(scores, spend(list(scores.values()), after.share), strict=True):
            choices[name].keep_scores(scores[name])
            choices[name].choose(mask)
    return {
        f"{name}.mhla.exact.{key}": tensor
        for name, choice in choices.items()
        for key, tensor in choice.state_dict().items()
    }


def _holds(masks: list[torch.Tensor], share: float) -> bool:
    """Whether lists are already as long as a share asks, as those are that have waited for the dial to come back."""
    return sum(int(mask.sum()) for mask in masks) == budget_of([mask.shape for mask in masks], share)
