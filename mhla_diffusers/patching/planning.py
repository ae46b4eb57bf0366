"""Token grids and block counts of sizes in pixels, before anything runs."""

import logging
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from torch import nn

from ..families import Clip, Family, get_family
from ..reporting import times
from .finding import find_transformers

logger = logging.getLogger(__name__)


def grids_of_size(
    pipe: Any, height: int | None, width: int | None, num_frames: int | None
) -> Mapping[str, tuple[int, ...]]:
    """Component name of every transformer of a pipeline, or of a vision model → its token grid at a size in pixels.

    Raises:
        ValueError: a transformer alone, which does not know the strides of an autoencoder; half a size, or one of no
            whole numbers; frames of an image; sides that differ where the model takes squares only; or a size without
            a token.
    """
    for side, value in (("height", height), ("width", width), ("num_frames", num_frames)):
        _check_whole(side, value)
    transformers = find_transformers(pipe)
    if isinstance(pipe, nn.Module) and get_family(pipe).kind != "vision":
        raise ValueError(
            "A size in pixels needs the pipeline, whose autoencoder makes the latents of it. Of a transformer alone "
            "describe() takes the token grid, grid=(frames, height, width) or (height, width)."
        )
    if height is None or width is None:
        raise ValueError(f"height={height} and width={width} belong together; give both, in pixels.")
    return {
        name: _grid(pipe, transformer, height, width, num_frames, get_family(transformer))
        for name, transformer in transformers.items()
    }


def _check_whole(name: str, value: Any) -> None:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_whole and value > 0):
        unit = "frames" if name == "num_frames" else "pixels"
        raise ValueError(f"{name}={value!r} must be a whole number of {unit}, at least 1.")


def _grid(
    pipe: Any, transformer: Any, height: int, width: int, num_frames: int | None, family: Family
) -> tuple[int, ...]:
    if num_frames is not None and not family.makes_videos:
        raise ValueError(f"num_frames={num_frames} was given, but {type(transformer).__name__} makes images.")
    if family.squares_only and height != width:
        raise ValueError(f"{type(transformer).__name__} takes squares only; got height={height}, width={width}.")
    frames = num_frames if num_frames is not None else family.default_clip.frames
    grid = family.grid_of_clip(pipe, transformer, Clip(frames, family.default_clip.fps, ((height, width),)))
    if not all(grid):
        raise ValueError(f"height={height}, width={width} is too small: its token grid is {grid}.")
    return grid


def suggest_blocks(pipe: Any, height: int, width: int, num_frames: int | None = None) -> tuple[int, ...]:
    """Block counts for a size in pixels.

    Blocks as long along every axis as those of the family's default at its default size, since how far a block reaches
    is what its KV state has to hold: three latent frames and ten tokens each way for Wan. But no more than about √(2 N)
    blocks of N tokens, where mixing M² pairs of blocks costs as much as making and reading the KV states; beyond it
    the cost would no longer be linear. Start from it, and look at a layer's attention or the loss for more. A warning
    says where a size is too small for more than one block, with which MHLA is plain linear attention.

    Args:
        pipe: pipeline, or vision model of transformers, patched or not; of several transformers the first counts.
        height: in pixels.
        width: in pixels.
        num_frames: of a video; None for the family's default.

    Returns:
        For example (7, 3, 5), for ``apply_mhla(pipe, blocks=…)``.

    Raises:
        ValueError: what :func:`describe` raises for a size.
    """
    name, grid = next(iter(grids_of_size(pipe, height, width, num_frames).items()))
    transformer = find_transformers(pipe)[name]
    family = get_family(transformer)
    usual = family.grid_of_clip(pipe, transformer, family.default_clip)
    wanted = [
        size * count / max(size_then, 1)
        for size, count, size_then in zip(grid, family.default_config.blocks_on(usual), usual, strict=True)
    ]
    shrink = min(1.0, (math.sqrt(2 * math.prod(grid)) / math.prod(wanted)) ** (1 / len(grid)))
    blocks = tuple(min(size, max(1, round(shrink * count))) for size, count in zip(grid, wanted, strict=True))
    if math.prod(blocks) == 1:
        logger.warning(
            "height=%s, width=%s has a token grid of %s, too small for more than one block: MHLA is plain linear "
            "attention there. Softmax attention of %s tokens costs little; leave the model as it is, or ask for a "
            "larger size.",
            height,
            width,
            times(grid),
            math.prod(grid),
        )
    return blocks
