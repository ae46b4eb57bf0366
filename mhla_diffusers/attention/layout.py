"""Token grids, and the two ways to cut them into blocks.

Tokens lie in raster order on a *grid*: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.

*MHLA blocks* (paper, Sec. 4.1): every axis is cut into runs of consecutive tokens, and a block is the product of one
run per axis; they are numbered in raster order too. An axis of ``n`` tokens in ``b`` blocks gets ``n % b`` blocks of
``n // b + 1`` tokens followed by blocks of ``n // b`` tokens, so that nothing is ever cropped or padded.

*Uniform blocks*, in which sparse attention reads the tokens: they stand along a Hilbert curve generalised to any box,
and are cut evenly into blocks of ``block_size`` rows, so that a block is compact on any grid; the rows that
the last one lacks are padding. Extra tokens (text) follow in blocks of their own. A *row* is a place in this order, a
*position* one in the sequence.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import index, itemgetter

import torch

NAMESPACE = __name__.partition(".")[0]
"""Namespace of custom operators: the package, so that a copy of it under another name registers its own."""
Shape = tuple[int, ...]
Extra = tuple[int, int]
"""How many tokens stand before, and how many after those of the grid in the sequence."""
_Edge = tuple[int, int]
"""Step from a token to the next, in raster order and negative where it leads back; and tokens."""
_Box = tuple[int, _Edge, _Edge, _Edge]
"""Place of its first token, and its edges; the curve leaves it at the far end of the first."""

_AXES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


def check_grid(grid: Sequence[int], name: str = "grid") -> Shape:
    """Return a token grid or block counts, of any integers such as NumPy's, as a tuple of Python ints.

    Raises:
        ValueError: they are not 1 to 3 positive integers; the message has the name.
    """
    try:
        given = grid.tolist() if hasattr(grid, "tolist") else grid
        # torch.compile's symbols stay symbols
        sizes = tuple(size if isinstance(size, torch.SymInt) else index(size) for size in given)
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or any(size is True or size < 1 for size in sizes):
        raise ValueError(
            f"{name}={grid!r} must be 1 to 3 positive integers: (length,), (height, width) or (frames, height, width), "
            "such as (16, 16) or (7, 3, 5)."
        )
    return sizes  # type: ignore[return-value]


def check_layout(grid: Sequence[int], blocks: Sequence[int]) -> tuple[Shape, Shape]:
    """Return ``grid`` and ``blocks`` as tuples; a ValueError if the blocks cannot cut the grid."""
    grid, blocks = check_grid(grid), check_grid(blocks, "blocks")
    if len(grid) != len(blocks):
        raise ValueError(
            f"blocks={blocks} has {len(blocks)} axes but the token grid {grid} has {len(grid)}; "
            "give one count per axis of the grid."
        )
    for axis, tokens, count in zip(_AXES[len(grid)], grid, blocks, strict=True):
        if tokens < count:
            raise ValueError(
                f"The {axis} axis of the token grid has {tokens} tokens, too few for {count} blocks "
                f"(grid={grid}, blocks={blocks}); use at most {tokens} on that axis, or an MHLA patch with "
                "clamp_blocks=True."
            )
    return grid, blocks


def fit_blocks(blocks: Sequence[int], grid: Sequence[int]) -> Shape:
    """Return block counts near these that suit a grid of N tokens: at most one per token of an axis, and about √(2 N).

    Beyond √(2 N) blocks mixing M² pairs of them costs more than making and reading the KV states, and the cost is no
    longer linear.
    """
    counts = [min(count, size) for count, size in zip(blocks, grid, strict=True)]
    shrink = min(1.0, (math.sqrt(2 * math.prod(grid)) / math.prod(counts)) ** (1 / len(grid)))
    return tuple(max(1, round(shrink * count)) for count in counts)


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
    """The blocks that a run of tokens may lie in, by number: whole rows of the first axis' blocks."""
    behind, starts = math.prod(blocks[1:]), frame_block_starts(grid, blocks)
    start, stop = (sum(begin <= place for begin in starts) for place in (first, max(first, first + count - 1)))
    return slice((start - 1) * behind, stop * behind)


def block_index(grid: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Block of every token: int64 (N,), tokens in raster order. ``b(t)`` of the paper's Eq. 5."""
    index = torch.zeros(1, dtype=torch.int64)
    for tokens, count in zip(grid, blocks, strict=True):
        axis = torch.repeat_interleave(torch.tensor(block_lengths(tokens, count)))
        index = (index[:, None] * count + axis[None, :]).flatten()
    return index


def tokens_by_block(
    grid: Sequence[int], blocks: Sequence[int], first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """N = ``count`` tokens from ``first`` on, sorted by block: int64 (N,), counted from the first; and where each block
    begins, (M + 1,).
    """
    index = block_index(grid, blocks)[first : first + count]
    sizes = torch.bincount(index, minlength=math.prod(blocks))
    return index.argsort(stable=True), torch.nn.functional.pad(sizes.cumsum(dim=0), (1, 0))


@dataclass(frozen=True)
class Layout:
    """Tables of one order, on one device. R = T * block_size rows, N positions."""

    block_size: int
    grid_blocks: int
    """Blocks of the grid's tokens, the first of all T."""
    order: torch.Tensor
    """int32 (R,): the position of every row, -1 of padding."""
    valid: torch.Tensor
    """int32 (T,): how many rows of a block hold a token; they come first."""
    rows: torch.Tensor
    """int32 (N,): the row of every position."""

    @property
    def blocks(self) -> int:
        """T, blocks of the grid and of the extra tokens."""
        return len(self.valid)


@contextmanager
def kept_tensors() -> Iterator[None]:
    """Create tensors on the CPU and outside inference mode, so that later calls can reuse them."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield


@lru_cache(maxsize=64)
def layout_of(grid: Shape, block_size: int, extra: int = 0, device: torch.device | str = "cpu") -> Layout:
    """The tables for a token grid and extra tokens behind it, on a device."""
    count = math.prod(grid)
    with kept_tensors():
        parts = hilbert_curve(grid), count + torch.arange(extra)
        order = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % block_size), value=-1) for part in parts])
        exists = order >= 0
        rows = torch.empty(count + extra, dtype=torch.int64)
        rows[order[exists]] = exists.nonzero().flatten()
        order, valid, rows = (
            x.to(torch.int32).to(device) for x in (order, exists.view(-1, block_size).sum(dim=1), rows)
        )
        return Layout(block_size, block_count(grid, block_size), order, valid, rows)


def block_count(grid: Sequence[int], block_size: int, extra: int = 0) -> int:
    """T, blocks of the grid and of extra tokens behind it."""
    return sum((count + block_size - 1) // block_size for count in (math.prod(list(grid)), extra))


@lru_cache(maxsize=16)
def hilbert_curve(grid: Shape) -> torch.Tensor:
    """The tokens of a grid along a generalised Hilbert curve: int64 (N,) places in raster order.

    A box is cut into two to five boxes, each entered beside the place at which the one before is left, until one is a
    line; the construction is J. Červený's generalised Hilbert curve for boxes of any size.
    """
    sizes = (1,) * (3 - len(grid)) + tuple(grid)
    steps = (sizes[1] * sizes[2], sizes[2], 1)
    first, second, third = sorted(zip(steps, sizes, strict=True), key=itemgetter(1), reverse=True)
    places: list[int] = []
    boxes: list[_Box] = [(0, first, second, third)]
    while boxes:
        start, *edges = boxes.pop()
        step, length = max(edges, key=itemgetter(1))
        if sorted(tokens for _, tokens in edges)[1] == 1:
            places.extend(range(start, start + step * length, step))
        else:
            boxes.extend(reversed(_cut(start, *edges)))
    with kept_tensors():
        return torch.tensor(places)


def _cut(start: int, a: _Edge, b: _Edge, c: _Edge) -> list[_Box]:
    """The boxes that a box is cut into, in the order of the curve."""
    (near_a, far_a), (near_b, far_b), (near_c, far_c) = (_halves(edge) for edge in (a, b, c))
    (_, w), (_, h), (_, d) = a, b, c
    end_a, end_c = _last(a), _last(c)
    if 2 * w > 3 * h and 2 * w > 3 * d:
        return [(start, near_a, b, c), (start + _reach(near_a), far_a, b, c)]
    if 3 * h > 4 * d:  # c is too short to be cut
        return [
            (start, near_b, c, near_a),
            (start + _reach(near_b), a, far_b, c),
            (start + end_a + _last(near_b), _back(near_b), c, _back(far_a)),
        ]
    if 3 * d > 4 * h:
        return [
            (start, near_c, near_a, b),
            (start + _reach(near_c), a, b, far_c),
            (start + end_a + _last(near_c), _back(near_c), _back(far_a), b),
        ]
    return [
        (start, near_b, near_c, near_a),
        (start + _reach(near_b), c, near_a, far_b),
        (start + _last(near_b) + end_c, a, _back(near_b), _back(far_c)),
        (start + end_a + _reach(near_b) + end_c, _back(c), _back(far_a), far_b),
        (start + end_a + _last(near_b), _back(near_b), near_c, _back(far_a)),
    ]


def _halves(edge: _Edge) -> tuple[_Edge, _Edge]:
    """Cut in the middle, the first part even if it can be: the curve needs it to arrive at the right corner."""
    step, tokens = edge
    half = tokens // 2
    half += half % 2 if tokens > 2 else 0
    return (step, half), (step, tokens - half)


def _reach(edge: _Edge) -> int:
    return edge[0] * edge[1]  # from the first place of an edge to behind its last


def _last(edge: _Edge) -> int:
    return edge[0] * (edge[1] - 1)  # from the first place of an edge to its last


def _back(edge: _Edge) -> _Edge:
    return -edge[0], edge[1]
