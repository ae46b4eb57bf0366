"""MHLA's tensors of one transformer brought to other block counts, tile counts or another exact share."""

import math
from collections.abc import Mapping

import torch

from ..attention import extend_mixing, resize_mixing
from ..attention.mixing import causal_mixing
from ..attention.tile_scores import budget_of, resize_scores, spend
from ..config import MHLAConfig, check
from .tile_choice import TileChoice


def resized(
    tensors: Mapping[str, torch.Tensor], before: MHLAConfig, after: MHLAConfig, heads: int
) -> dict[str, torch.Tensor]:
    """The tensors that a patch with other settings has.

    Mixing matrices are interpolated over block positions. Those of causal patches go on along the first axis as
    :func:`extend_mixing` tells, or end earlier there, since a block stands for as many tokens as before. Of calibrated
    tiles the scores are interpolated and the tiles chosen anew.

    Args:
        tensors: name → tensor, for example ``blocks.0.attn1.mhla.mixing``; others are left as they are.
        before: settings that they belong to.
        after: settings that they shall fit.
        heads: H.

    Raises:
        ValueError: other blocks together with another order or another length of causal blocks, or more causal blocks
            than one that stands alone can tell of, or entries below 0 where their logarithm is taken.
    """
    part = dict(tensors)
    if after.needs_positive_mixing:
        _check_positive(part, before.blocks)
    if before.blocks != after.blocks:
        for key in part:
            if key.endswith(".mhla.mixing"):
                part[key] = _resized_mixing(part[key], before, after)
    is_calibrated = before.sparse == after.sparse == "calibrated"
    # at a share of 1 lists are not read, so that those of another share wait there for it
    if is_calibrated and (before.tiles != after.tiles or before.share != after.share != 1):
        part |= _chosen_anew(part, before, after, heads)
    return part


def _check_positive(part: Mapping[str, torch.Tensor], blocks: tuple[int, ...]) -> None:
    for key, mixing in part.items():
        # one of another size is refused where it is loaded
        fits = key.endswith(".mhla.mixing") and mixing.shape[-1] == math.prod(blocks)
        if fits and not mixing.is_meta:
            least = causal_mixing(mixing, blocks, own=True).min().item()
            check(
                least >= 0,
                f"{key} has entries down to {least:.3g}, and this causal patch takes the logarithm of what blocks "
                "weigh, which must be positive. Train with register_mixing_clip(), which keeps them in (0, 1), or "
                "choose normalize=False with output_norm=True and sparse='none'.",
            )


def _resized_mixing(mixing: torch.Tensor, before: MHLAConfig, after: MHLAConfig) -> torch.Tensor:
    """A mixing matrix for other blocks."""
    changes = [
        f"{name}={old!r} to {new!r}"
        for name, old, new in (
            ("causal", before.causal, after.causal),
            ("block_length", before.block_length, after.block_length),
        )
        if old != new and (name == "block_length" or None in (old, new))
    ]
    check(
        not changes,
        f"Blocks cannot go from {before.blocks} to {after.blocks} together with {' and '.join(changes)}: a mixing "
        "matrix would have to be interpolated and take another order at once. Change one after the other, with "
        "change_mhla().",
    )
    if after.causal is None:
        return resize_mixing(mixing, before.blocks, after.blocks)
    rows, others = after.blocks[0], after.blocks[1:]
    # places on the first axis stay what they are, so that no later one gets into what is seen
    mixing = resize_mixing(mixing, before.blocks, (before.blocks[0], *others))
    if rows > before.blocks[0]:
        return extend_mixing(mixing, (before.blocks[0], *others), rows)
    count = rows * math.prod(others)
    return causal_mixing(mixing[..., :count, :count], after.blocks, own=True)


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
