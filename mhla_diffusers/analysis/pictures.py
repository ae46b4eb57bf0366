"""Pictures of attention maps and mixing matrices."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..reporting import require_matplotlib

_COLUMNS = 4
_NEARLY_POSITIVE = 0.01
"""Negative values up to this fraction of the largest value are drawn as zero."""


def side_by_side(values: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Arrange values (N,) of a grid as one picture (height, width), with frames side by side."""
    frames = values.reshape(-1, *grid[-2:]).unbind()
    gap = torch.full((grid[-2], 1), math.nan, dtype=values.dtype)
    return torch.cat([part for frame in frames for part in (frame, gap)][:-1], dim=1)


def middle_of(grid: Sequence[int]) -> int:
    """Return the index of the token in the middle of a grid."""
    index = 0
    for count in grid:
        index = index * count + count // 2
    return index


def draw_attention_maps(rows: Mapping[str, torch.Tensor], grid: Sequence[int], token: int, file: Path) -> Path:
    """Draw how much one query token attends to every token of the grid, one map per layer; the token is marked.

    Args:
        rows: layer → (N,), the token's row of the attention matrix.
        grid: token grid.
        token: its index.
        file: where to; it is returned.
    """
    plt = require_matplotlib()
    from matplotlib.patches import Rectangle

    maps = {name: side_by_side(row.float(), grid) for name, row in rows.items()}
    wide = len(grid) == 3
    columns = 1 if wide else min(_COLUMNS, len(maps))
    bands = math.ceil(len(maps) / columns)
    size = (11.0, 1.9 * bands + 0.5) if wide else (max(4.5, 2.9 * columns), 2.6 * bands + 0.5)
    figure, axes = _panels(bands, columns, size)
    for axis, (name, picture) in zip(axes.flat, maps.items(), strict=False):
        image = axis.imshow(picture, **_colours(rows[name]))
        frame, place = divmod(token, grid[-2] * grid[-1])
        row, column = place // grid[-1], frame * (grid[-1] + 1) + place % grid[-1]
        axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="cyan", linewidth=1.5))
        axis.set_title(name, fontsize=8)
        figure.colorbar(image, ax=axis, shrink=0.8)
    title = f"Attention of token {token} over the grid {'x'.join(map(str, grid))}"
    figure.suptitle(f"{title}, frames from left to right" if wide else title, fontsize=10)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def draw_mixing_matrices(matrices: Mapping[str, torch.Tensor], file: Path) -> Path:
    """Draw the mixing matrices of all layers, name → (M, M), or (H, M, M) for the mean over heads."""
    plt = require_matplotlib()
    shared = {
        name: matrix.detach().float().cpu().reshape(-1, *matrix.shape[-2:]).mean(dim=0)
        for name, matrix in matrices.items()
    }
    colours = _colours(torch.stack(list(shared.values())))
    columns = min(_COLUMNS, len(shared))
    bands = math.ceil(len(shared) / columns)
    figure, axes = _panels(bands, columns, (max(5.0, 2.6 * columns + 1), 2.6 * bands + 0.5))
    for axis, (name, matrix) in zip(axes.flat, shared.items(), strict=False):
        axis.set_axis_on()
        image = axis.imshow(matrix, **colours)
        axis.set_title(name, fontsize=8)
        axis.set_xlabel("key block", fontsize=8)
        axis.set_ylabel("query block", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _panels(bands: int, columns: int, size: tuple[float, float]) -> Any:
    """Return a figure with rows of axes that are hidden until something is drawn."""
    figure, axes = require_matplotlib().subplots(bands, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes


def _colours(values: torch.Tensor) -> dict[str, Any]:
    """Choose a color scale from zero to the largest value; symmetric for signed values, as RoPE gives."""
    lowest, highest = float(values.min()), float(values.max())
    if lowest > -_NEARLY_POSITIVE * highest:
        return {"cmap": "magma", "vmin": 0, "vmax": highest}
    largest = max(-lowest, highest)
    return {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
