"""MHLA's tensors of one transformer brought to other block counts."""

import math
from collections.abc import Mapping

import torch

from ..attention import extend_mixing, resize_mixing
from ..attention.mixing import causal_mixing
from ..config import MHLAConfig, check


def resized(tensors: Mapping[str, torch.Tensor], before: MHLAConfig, after: MHLAConfig) -> dict[str, torch.Tensor]:
    """The tensors that a patch with other settings has.

    Mixing matrices are interpolated over block positions. Those of causal patches go on along the first axis as
    :func:`extend_mixing` tells, or end earlier there, since a block stands for as many tokens as before.

    Args:
        tensors: name → tensor, for example ``blocks.0.attn1.mhla.mixing``; others are left as they are.
        before: settings that they belong to.
        after: settings that they shall fit.

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
