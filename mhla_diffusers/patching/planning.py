"""Token grids and block counts of sizes in pixels, before anything runs."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..families import Clip, Family, get_family
from .finding import find_transformers


def grids_of_size(
    pipe: Any, height: int | None, width: int | None, num_frames: int | None
) -> Mapping[str, tuple[int, ...]]:
    """Component name of every transformer of a pipeline, or of a vision model → its token grid at a size in pixels.

    Raises:
        ValueError: a transformer alone, which does not know the strides of an autoencoder; half a size; frames of an
            image; sides that differ where the model takes squares only; or a size without a token.
    """
    transformers = find_transformers(pipe)
    if isinstance(pipe, nn.Module) and get_family(pipe).kind != "vision":
        raise ValueError(
            "A size in pixels needs the pipeline, whose autoencoder makes the latents of it; "
            "for a transformer give its token grid, grid=(frames, height, width)."
        )
    if height is None or width is None:
        raise ValueError(f"height={height} and width={width} belong together; give both, in pixels.")
    return {
        name: _grid(pipe, transformer, height, width, num_frames, get_family(transformer))
        for name, transformer in transformers.items()
    }


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
    is what its summary has to hold: three latent frames and ten tokens each way for Wan. But no more than about √(2 N)
    blocks of N tokens, where mixing M² pairs of blocks costs as much as making and reading the summaries; beyond it
    the cost would no longer be linear. Start from it, and look at a layer's attention or the loss for more.

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
    return tuple(min(size, max(1, round(shrink * count))) for size, count in zip(grid, wanted, strict=True))
