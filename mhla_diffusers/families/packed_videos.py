"""Packed videos: their token grid, from the numbers or the coordinates of every token that transformers take."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .forward import Forward, Kwargs, Sample
from .training import Training, takes_picture
from .values import compiled_for, read_once

_SIZE = ("num_frames", "height", "width")
"""Kwargs of a transformer's forward that hold the token grid."""


class PackedVideoForward(Forward):
    """Forward that takes tokens of packed latents, and their grid as numbers."""

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the numbers that the pipelines pass; ValueError unless all of them are given."""
        grid = tuple(arguments[name] for name in _SIZE if arguments.get(name) is not None)
        if len(grid) != len(_SIZE):
            raise ValueError(
                f"{len(grid)} of num_frames, height and width are given: MHLA needs all three, the size of the "
                "latents, as the pipelines pass them."
            )
        return grid

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the grid, and a time for every token where frames have times of their own."""
        timestep = self.times_of_tokens(transformer, latents, timestep)
        size = dict(zip(_SIZE, self.token_grid(transformer, latents), strict=True))
        return {**size, **super().arguments(transformer, latents, timestep, conditioning)}


class PackedVideoTraining(Training):
    """Training of models whose image-to-video is the pipeline's."""

    def keeps_first_frame(self, pipe: Any, config: Any) -> bool:
        """Whether the pipeline is for image-to-video; its transformer is that of text-to-video."""
        return takes_picture(pipe)


def grid_of_coordinates(coordinates: Tensor) -> tuple[int, ...]:
    """Return the token grid of coordinates (B, 3, N): time, height and width of every token.

    The grid begins at the first token of time 0. Tokens before it are conditioning frames, at later times.

    Raises:
        ValueError: the coordinates are no grid.
    """
    grid = _read_coordinates(coordinates)
    return compiled_for(grid, lambda: lies_on(grid, coordinates[0]))


@read_once
def _read_coordinates(coordinates: Tensor) -> tuple[int, ...]:
    places = coordinates[0].cpu()
    at_zero = (places[0] == 0).nonzero()
    grid = grid_of_places(places[:, int(at_zero[0]) if len(at_zero) else places.shape[1] :])
    if grid is None:
        raise ValueError(
            f"video_coords of {places.shape[1]} tokens are not a token grid: from the first token of time 0 on "
            "they must be whole frames in raster order, as LTXConditionPipeline gives them."
        )
    return grid


def grid_of_places(places: Tensor) -> tuple[int, ...] | None:
    """Return the grid of tokens in raster order, (3, N) times, rows and columns; None if they are no grid."""
    width = _rising(places[2])
    height = _rising(places[1, ::width])
    grid = places.shape[1] // (height * width), height, width
    return grid if 0 < places.shape[1] == math.prod(grid) and bool(lies_on(grid, places)) else None


def lies_on(grid: tuple[int, ...], places: Tensor) -> Tensor:
    """Whether the last tokens of places (3, N) are whole frames of a grid in raster order: bool ()."""
    time, row, column = places[:, places.shape[1] - math.prod(grid) :].unflatten(1, grid)
    rising = (row.diff(dim=1) > 0).all() & (column.diff(dim=2) > 0).all()
    return rising & (time == time[:, :1, :1]).all() & (row == row[:1, :, :1]).all() & (column == column[:1, :1]).all()


def _rising(values: Tensor) -> int:
    """Return the length of the strictly increasing run at the start; at least 1."""
    falls = (values.diff() <= 0).nonzero()
    return int(falls[0]) + 1 if len(falls) else max(1, len(values))
