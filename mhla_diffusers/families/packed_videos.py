"""Packed videos: their token grid, from the numbers or the coordinates of every token that transformers take."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .family import Sample
from .styles import PackedFamily, VideoFamily, read_once, takes_picture

SIZE = ("num_frames", "height", "width")
"""Arguments of a transformer's forward that hold the token grid."""


class PackedVideoFamily(PackedFamily, VideoFamily):
    """The transformer takes tokens of packed latents, and their grid as numbers."""

    dispatches_attention = True

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """The numbers that the pipelines pass.

        Raises:
            ValueError: not all of them are given.
        """
        grid = tuple(arguments[name] for name in SIZE if arguments.get(name) is not None)
        if len(grid) != len(SIZE):
            raise ValueError(
                f"{len(grid)} of num_frames, height and width are given: MHLA needs all three, the size of the "
                "latents, as the pipelines pass them."
            )
        return grid

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With the grid, and a time for every token where frames have times of their own."""
        timestep = self.times_of_tokens(transformer, latents, timestep)
        size = dict(zip(SIZE, self.token_grid(transformer, latents), strict=True))
        return {**size, **super().forward_arguments(transformer, latents, timestep, conditioning)}

    def keeps_first_frame(self, pipe: Any, config: Any) -> bool:
        """Of pipelines for image-to-video, which have the transformer of text-to-video."""
        return takes_picture(pipe)


def grid_of_coordinates(coordinates: torch.Tensor) -> tuple[int, ...]:
    """Token grid of coordinates (B, 3, N): time, height and width of every token.

    The grid begins at the first token of time 0. Tokens before it are conditioning frames, at later times.

    Raises:
        ValueError: the coordinates are no grid.
    """
    return compiled_for(_grid_of_coordinates(coordinates), coordinates[0])


@read_once
def _grid_of_coordinates(coordinates: torch.Tensor) -> tuple[int, ...]:
    places = coordinates[0].cpu()
    at_zero = (places[0] == 0).nonzero()
    grid = grid_of_places(places[:, int(at_zero[0]) if len(at_zero) else places.shape[1] :])
    if grid is None:
        raise ValueError(
            f"video_coords of {places.shape[1]} tokens are not a token grid: from the first token of time 0 on "
            "they must be whole frames in raster order, as LTXConditionPipeline gives them."
        )
    return grid


def grid_of_places(places: torch.Tensor) -> tuple[int, ...] | None:
    """Token grid of a video's tokens in raster order; None if they are no grid.

    Args:
        places: (3, N), time, row and column of every token.
    """
    width = _rising(places[2])
    height = _rising(places[1, ::width])
    grid = places.shape[1] // (height * width), height, width
    return grid if 0 < places.shape[1] == math.prod(grid) and bool(_lie_on(grid, places)) else None


def compiled_for(grid: tuple[int, ...], places: torch.Tensor) -> tuple[int, ...]:
    """The grid; a compiled graph, which holds it, checks that the last of places (3, N) lie on it."""
    if torch.compiler.is_compiling():
        torch._assert_async(_lie_on(grid, places), "compiled for another token grid")
    return grid


def _lie_on(grid: tuple[int, ...], places: torch.Tensor) -> torch.Tensor:
    """Whether the last tokens of places (3, N) are whole frames of a grid in raster order: bool ()."""
    time, row, column = places[:, places.shape[1] - math.prod(grid) :].unflatten(1, grid)
    rising = (row.diff(dim=1) > 0).all() & (column.diff(dim=2) > 0).all()
    return rising & (time == time[:, :1, :1]).all() & (row == row[:1, :, :1]).all() & (column == column[:1, :1]).all()


def _rising(values: torch.Tensor) -> int:
    """Length of the strictly increasing run at the start; at least 1."""
    falls = (values.diff() <= 0).nonzero()
    return int(falls[0]) + 1 if len(falls) else max(1, len(values))
