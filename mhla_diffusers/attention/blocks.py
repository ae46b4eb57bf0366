"""Token grids and token blocks.

Tokens lie in raster order on a *grid*: ``(length,)``, ``(height, width)`` or
``(frames, height, width)``. Every axis is cut into runs of consecutive tokens, and the
product of one run per axis is a *token block* (paper, Sec. 4.1). Blocks are numbered in
raster order too.

An axis of ``n`` tokens in ``b`` blocks gets ``n % b`` blocks of ``n // b + 1`` tokens followed
by blocks of ``n // b`` tokens, so that nothing is ever cropped or padded.
"""

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""Of the token grid, one slice per axis."""

_AXIS_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


class Region(NamedTuple):
    """A box of the token grid in which all token blocks, or the parts of one row of blocks, have the same shape."""

    tokens: tuple[slice, ...]
    """One slice per axis of the token grid."""
    blocks: tuple[slice, ...]
    """One slice per axis of the block grid."""
    block_shape: Shape
    """Tokens per block, or per part of a block, along each axis."""


def axis_names(dimensions: int) -> tuple[str, ...]:
    """Names of the axes of a grid with 1, 2 or 3 dimensions, as error messages use them."""
    return _AXIS_NAMES[dimensions]


def check_blocks(blocks: Sequence[int], name: str = "blocks") -> Shape:
    """Return ``blocks`` as a tuple after checking it alone.

    Raises:
        ValueError: if there are not 1 to 3 counts, or one of them is no positive integer; with ``name``.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise ValueError(f"{name}={blocks!r} must be a list of counts, one per axis, for example (4, 4) or (7, 3, 5).")
    counts = tuple(map(_as_integer, blocks))
    if len(counts) not in _AXIS_NAMES:
        raise ValueError(
            f"{name}={counts} has {len(counts)} axes; allowed are 1 (length), "
            "2 (height, width) or 3 (frames, height, width)."
        )
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={counts} must hold positive integers, got {count!r}.")
    return counts


def _as_integer(count: Any) -> Any:
    """An integer of any kind, such as NumPy's, as Python's own; anything else as it is."""
    try:
        return count if isinstance(count, bool) else operator.index(count)
    except TypeError:
        return count


def check_layout(
    grid: Sequence[int], blocks: Sequence[int], name: str = "blocks", is_causal: bool = False
) -> tuple[Shape, Shape]:
    """Return ``grid`` and ``blocks`` as tuples after checking that one can cut the other.

    Args:
        grid: tokens on each axis.
        blocks: counts on each axis.
        name: of the counts, for errors.
        is_causal: whether they are those of a causal call, whose blocks are never clamped, for errors.

    Raises:
        ValueError: if the number of axes differs, or an axis has fewer tokens than blocks; with ``name``.
    """
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise ValueError(f"grid={grid!r} must be a list of tokens, one per axis, for example (16, 16) or (21, 30, 52).")
    grid, blocks = tuple(grid), check_blocks(blocks, name)
    if len(grid) != len(blocks):
        raise ValueError(
            f"{name}={blocks} has {len(blocks)} axes but the token grid {grid} has {len(grid)}; "
            "give one count per axis of the grid."
        )
    for axis, tokens, count in zip(axis_names(len(grid)), grid, blocks, strict=True):
        if tokens < count:
            hint = ", or clamp_blocks=True in the patch" if name == "blocks" and not is_causal else ""
            raise ValueError(
                f"The {axis} axis of the token grid has {tokens} tokens, too few for {count} {name} "
                f"(grid={grid}, {name}={blocks}); use at most {tokens} on that axis{hint}."
            )
    return grid, blocks


def block_lengths(tokens: int, blocks: int) -> list[int]:
    """Tokens in each of the ``blocks`` blocks of an axis of ``tokens`` tokens."""
    shortest, longer = divmod(tokens, blocks)
    return [shortest + 1] * longer + [shortest] * (blocks - longer)


def block_sizes(grid: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Tokens in each of the M blocks, in raster order of the block grid."""
    lengths = [block_lengths(n, b) for n, b in zip(grid, blocks, strict=True)]
    return [math.prod(shape) for shape in product(*lengths)]


def frame_block_starts(grid: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Places of the first token of every block of the first axis, in raster order, and behind them that of the end."""
    row = math.prod(grid[1:])
    return [0, *accumulate(length * row for length in block_lengths(grid[0], blocks[0]))]


def blocks_of_range(grid: Sequence[int], blocks: Sequence[int], first: int, count: int) -> slice:
    """The blocks, by number, that a run of tokens may lie in: whole rows of the first axis' blocks.

    Args:
        grid: token grid.
        blocks: block count per axis.
        first: place of the run's first token, in raster order.
        count: its length.
    """
    row, behind = math.prod(grid[1:]), math.prod(blocks[1:])
    shortest, longer = divmod(grid[0], blocks[0])
    places = first // row, max(first, first + count - 1) // row
    behind_longer = [place - longer * (shortest + 1) for place in places]
    start, stop = (
        place // (shortest + 1) if rest < 0 else longer + rest // shortest
        for place, rest in zip(places, behind_longer, strict=True)
    )
    return slice(start * behind, (stop + 1) * behind)


def smallest_and_largest(grid: Sequence[int], blocks: Sequence[int]) -> tuple[int, int]:
    """Fewest and most tokens of a block."""
    sizes = block_sizes(grid, blocks)
    return min(sizes), max(sizes)


def block_index(grid: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Block of every token: int64 (N,), tokens in raster order. ``b(t)`` of the paper's Eq. 5."""
    index = torch.zeros(1, dtype=torch.int64)
    for tokens, count in zip(grid, blocks, strict=True):
        axis = torch.repeat_interleave(torch.tensor(block_lengths(tokens, count)))
        index = (index[:, None] * count + axis[None, :]).flatten()
    return index


def boxes_of_range(grid: Sequence[int], first: int, count: int) -> list[Box]:
    """The boxes that a run of tokens, in raster order, fills one after the other; at most five of three axes.

    Args:
        grid: token grid.
        first: place of the run's first token.
        count: its length.
    """
    row = math.prod(grid[1:])
    if len(grid) == 1 or count == 0:
        return [(slice(first, first + count), *(slice(0, size) for size in grid[1:]))] if count else []
    start, stop = -(-first // row), (first + count) // row
    if start > stop or first + count < start * row:  # within one row of the first axis
        return _in_row(grid, stop, first - stop * row, count)
    boxes = _in_row(grid, start - 1, first - (start - 1) * row, start * row - first)
    if stop > start:
        boxes.append((slice(start, stop), *(slice(0, size) for size in grid[1:])))
    return boxes + _in_row(grid, stop, 0, first + count - stop * row)


def _in_row(grid: Sequence[int], row: int, first: int, count: int) -> list[Box]:
    return [(slice(row, row + 1), *box) for box in boxes_of_range(grid[1:], first, count)]


def regular_regions(
    grid: Sequence[int],
    blocks: Sequence[int],
    max_rows: int | None = None,
    max_length: int | None = None,
    box: Box | None = None,
) -> list[Region]:
    """Cut the grid into boxes whose blocks all have one shape.

    A grid that its block counts divide is one region; another has at most ``2 ** axes``.

    Args:
        grid: token grid.
        blocks: block count per axis.
        max_rows: cut further, so that no region has more blocks than this along the first axis.
        max_length: cut blocks too, so that no region of one row of blocks is longer along the first axis.
        box: cut this box of the grid alone, whose tokens the regions then count from its corner; blocks at its border
            may be there in part.
    """
    runs_per_axis = []
    for axis, (tokens, count) in enumerate(zip(grid, blocks, strict=True)):
        shortest, longer = divmod(tokens, count)
        step = max_rows if max_rows is not None and axis == 0 else count
        runs = []
        for first, last, length in ((0, longer, shortest + 1), (longer, count, shortest)):
            offset = min(first, longer)
            for start in range(first, last, step):
                stop = min(start + step, last)
                runs.append((slice(start * length + offset, stop * length + offset), slice(start, stop), length))
        if box is not None:
            runs = [part for run in runs for part in _within(*run, box[axis])]
        if axis == 0 and max_length is not None:
            runs = [part for run in runs for part in _cut_run(*run, max_length)]
        runs_per_axis.append(runs)
    return [Region(*(tuple(part) for part in zip(*runs, strict=True))) for runs in product(*runs_per_axis)]


def _within(tokens: slice, blocks: slice, length: int, box: slice) -> list[tuple[slice, slice, int]]:
    """What a box, from whose start places are counted, holds of a run: part of a block, whole blocks, part of one."""
    start, stop = max(tokens.start, box.start), min(tokens.stop, box.stop)
    cuts = {start, stop} if start < stop else set()
    for at in (start, stop) if cuts else ():
        inside = (at - tokens.start) // length * length + tokens.start
        cuts |= {cut for cut in (inside, inside + length) if start < cut < stop}
    parts = []
    for a, b in pairwise(sorted(cuts)):
        index = blocks.start + (a - tokens.start) // length
        whole = (b - a) // length
        parts.append((slice(a - box.start, b - box.start), slice(index, index + max(1, whole)), min(b - a, length)))
    return parts


def _cut_run(tokens: slice, blocks: slice, length: int, max_length: int) -> list[tuple[slice, slice, int]]:
    """The parts of a run of one block that is too long."""
    if blocks.stop - blocks.start > 1 or length <= max_length:
        return [(tokens, blocks, length)]
    starts = range(tokens.start, tokens.stop, max_length)
    parts = [slice(start, min(start + max_length, tokens.stop)) for start in starts]
    return [(part, blocks, part.stop - part.start) for part in parts]


def to_blocks(x: torch.Tensor, region: Region, dtype: torch.dtype) -> torch.Tensor:
    """Gather one region's tokens block by block.

    Args:
        x: (B, *grid, H, D), tokens on their grid.
        region: one of :func:`regular_regions`.
        dtype: type of the result.

    Returns:
        (B, H, *block counts, tokens per block, D): always a new contiguous tensor, which the caller may overwrite.
    """
    axes = len(region.block_shape)
    box = x[(slice(None), *region.tokens)]
    for axis, length in enumerate(region.block_shape):
        box = box.unflatten(1 + 2 * axis, (-1, length))
    block_axes = range(1, 1 + 2 * axes, 2)
    token_axes = range(2, 2 + 2 * axes, 2)
    box = box.permute(0, -2, *block_axes, *token_axes, -1)
    gathered = torch.empty(box.shape, dtype=dtype, device=x.device).copy_(box)
    return gathered.flatten(2 + axes, 1 + 2 * axes)


def from_blocks(y: torch.Tensor, region: Region) -> torch.Tensor:
    """Put one region's tokens back on the grid: the inverse of :func:`to_blocks`.

    Args:
        y: (B, H, *block counts, tokens per block, D).
        region: the region that the tokens came from.

    Returns:
        (B, *tokens of the region, H, D).
    """
    axes = len(region.block_shape)
    y = y.unflatten(2 + axes, region.block_shape)
    pairs = [axis for pair in zip(range(2, 2 + axes), range(2 + axes, 2 + 2 * axes), strict=True) for axis in pair]
    y = y.permute(0, *pairs, 1, -1)
    for axis in range(axes):
        y = y.flatten(1 + axis, 2 + axis)
    return y


def join_tokens(pieces: list[torch.Tensor], regions: list[Region], first_axis: int) -> torch.Tensor:
    """Concatenate one piece per region, whose token axes begin at ``first_axis``, to the whole grid."""
    return _join(pieces, [region.tokens for region in regions], first_axis)


def join_blocks(pieces: list[torch.Tensor], regions: list[Region], blocks: Shape, first_axis: int) -> torch.Tensor:
    """Concatenate sums over blocks, one piece per region, whose block axes begin at ``first_axis``.

    Sums over parts of the same blocks are added; blocks of which no region holds a part are 0.
    """
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    places = {}
    for piece, region in zip(pieces, regions, strict=True):
        start = tuple(axis.start for axis in region.blocks)
        sums[start] = sums[start] + piece if start in sums else piece
        places[start] = region.blocks
    joined = _join(list(sums.values()), list(places.values()), first_axis)
    missing = [
        (min(place[axis].start for place in places.values()), count - max(p[axis].stop for p in places.values()))
        for axis, count in enumerate(blocks)
    ]
    if not any(map(any, missing)):
        return joined
    behind = joined.ndim - first_axis - len(blocks)
    return torch.nn.functional.pad(joined, (0, 0) * behind + tuple(n for pair in reversed(missing) for n in pair))


def _join(pieces: list[torch.Tensor], places: list[tuple[slice, ...]], first_axis: int) -> torch.Tensor:
    for axis in reversed(range(len(places[0]))):
        runs = len({place[axis].start for place in places})
        if runs > 1:
            groups = range(0, len(pieces), runs)
            pieces = [torch.cat(pieces[i : i + runs], dim=first_axis + axis) for i in groups]
    return pieces[0]
