"""Token grids, and the two ways in which they are cut into blocks.

Tokens lie in raster order on a *grid*: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.

*MHLA blocks* (paper, Sec. 4.1): every axis is cut into runs of consecutive tokens, and a block is the product of one
run per axis; they are numbered in raster order too. An axis of ``n`` tokens in ``b`` blocks gets ``n % b`` blocks of
``n // b + 1`` tokens followed by blocks of ``n // b`` tokens, so that nothing is ever cropped or padded.

*Uniform blocks*, in which sparse attention reads the tokens: they stand along a Hilbert curve generalised to any box,
and are cut evenly into blocks of ``block_size`` rows, so that a block is compact whatever the grid is; the rows that
the last one lacks are padding. Extra tokens (text) follow in blocks of their own. A *row* is a place in this order, a
*position* one in the sequence.
"""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any

import torch

Shape = tuple[int, ...]
Extra = tuple[int, int]
"""How many tokens stand before, and how many after those of the grid in the sequence."""
_Edge = tuple[int, int]
"""Stride in raster order, and signed length."""
_Box = tuple[int, _Edge, _Edge, _Edge]
"""Place of its first token, and its edges; the curve leaves it at the far end of the first."""

_AXIS_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


def check_blocks(blocks: Sequence[int], name: str = "blocks") -> Shape:
    """Return ``blocks`` as a tuple; a ValueError with ``name`` unless they are 1 to 3 positive integers."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise ValueError(f"{name}={blocks!r} must be a list of counts, one per axis, for example (4, 4) or (7, 3, 5).")
    # an integer of any kind, such as NumPy's, as Python's own; anything else as it is
    counts = tuple(int(x) if hasattr(x, "__index__") and not isinstance(x, bool) else x for x in blocks)
    if len(counts) not in _AXIS_NAMES:
        raise ValueError(
            f"{name}={counts} has {len(counts)} axes; allowed are 1 (length), "
            "2 (height, width) or 3 (frames, height, width)."
        )
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={counts} must hold positive integers, got {count!r}.")
    return counts


def check_layout(
    grid: Sequence[int], blocks: Sequence[int], name: str = "blocks", is_causal: bool = False
) -> tuple[Shape, Shape]:
    """Return ``grid`` and ``blocks`` as tuples; a ValueError with ``name`` if one cannot cut the other.

    ``is_causal``: whether they are those of a causal call, whose blocks are never clamped.
    """
    is_list = isinstance(grid, Sequence) and not isinstance(grid, str)
    if not is_list or any(isinstance(x, float) or x < 1 for x in grid):
        raise ValueError(
            f"grid={grid!r} must be a list of positive integers, tokens per axis, for example (16, 16) or (21, 30, 52)."
        )
    grid, blocks = tuple(grid), check_blocks(blocks, name)
    if len(grid) != len(blocks):
        raise ValueError(
            f"{name}={blocks} has {len(blocks)} axes but the token grid {grid} has {len(grid)}; "
            "give one count per axis of the grid."
        )
    for axis, tokens, count in zip(_AXIS_NAMES[len(grid)], grid, blocks, strict=True):
        if tokens < count:
            hint = ", or clamp_blocks=True in the patch" if name == "blocks" and not is_causal else ""
            raise ValueError(
                f"The {axis} axis of the token grid has {tokens} tokens, too few for {count} {name} "
                f"(grid={grid}, {name}={blocks}); use at most {tokens} on that axis{hint}."
            )
    return grid, blocks


def fit_blocks(blocks: Sequence[float], grid: Sequence[int]) -> Shape:
    """Return block counts near these that suit a grid of N tokens: at most one per token of an axis, and about √(2 N).

    Beyond √(2 N) blocks mixing M² pairs of them costs more than making and reading the KV states, and the cost is no
    longer linear.
    """
    shrink = min(1.0, (math.sqrt(2 * math.prod(grid)) / math.prod(blocks)) ** (1 / len(grid)))
    return tuple(min(size, max(1, round(shrink * count))) for size, count in zip(grid, blocks, strict=True))


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


@lru_cache(maxsize=64)
def layout_of(grid: Shape, block_size: int, extra: int = 0, device: str = "cpu") -> Layout:
    """The tables for a token grid and extra tokens behind it, on a device."""
    count = math.prod(grid)
    # kept for calls that take gradients, and made on the CPU whatever the default device is
    with torch.inference_mode(False), torch.device("cpu"):
        parts = hilbert_curve(grid), count + torch.arange(extra)
        order = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % block_size), value=-1) for part in parts])
        exists = order >= 0
        rows = torch.empty(count + extra, dtype=torch.int64)
        rows[order[exists]] = exists.nonzero().flatten()
        order, valid, rows = (
            x.to(torch.int32).to(device) for x in (order, exists.view(-1, block_size).sum(dim=1), rows)
        )
        return Layout(block_size, block_count(grid, block_size), order, valid, rows)


def block_count(grid: Sequence[int], block_size: int) -> int:
    """T, blocks of the grid."""
    return -(-math.prod(list(grid)) // block_size)


@lru_cache(maxsize=16)
def hilbert_curve(grid: Shape) -> torch.Tensor:
    """The tokens of a grid along a generalised Hilbert curve: int64 (N,) places in raster order.

    A box is cut into two to five boxes, each entered beside the place at which the one before is left, until one is a
    line; the construction is J. Červený's generalised Hilbert curve for boxes of any size.
    """
    sizes = (1,) * (3 - len(grid)) + tuple(grid)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    first, second, third = sorted(zip(strides, sizes, strict=True), key=lambda edge: -edge[1])
    places: list[int] = []
    boxes: list[_Box] = [(0, first, second, third)]
    while boxes:
        start, a, b, c = boxes.pop()
        lengths = [abs(edge[1]) for edge in (a, b, c)]
        if sorted(lengths)[1] == 1:
            stride, length = (a, b, c)[lengths.index(max(lengths))]
            step = stride if length > 0 else -stride
            places.extend(range(start, start + step * abs(length), step))
        else:
            boxes.extend(reversed(_cut(start, a, b, c)))
    with torch.inference_mode(False):
        return torch.tensor(places, device="cpu")


def _cut(start: int, a: _Edge, b: _Edge, c: _Edge) -> list[_Box]:
    """The boxes that a box is cut into, in the order of the curve."""
    (near_a, far_a), (near_b, far_b), (near_c, far_c) = (_halves(edge) for edge in (a, b, c))
    w, h, d = (abs(edge[1]) for edge in (a, b, c))
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
    stride, length = edge
    sign, half = (1 if length > 0 else -1), abs(length) // 2
    half += half % 2 if abs(length) > 2 else 0
    return (stride, sign * half), (stride, length - sign * half)


def _reach(edge: _Edge) -> int:
    return edge[0] * edge[1]  # from the first place of an edge to behind its last


def _last(edge: _Edge) -> int:
    """From the first place of an edge to its last."""
    stride, length = edge
    return stride * (length - (1 if length > 0 else -1))


def _back(edge: _Edge) -> _Edge:
    return edge[0], -edge[1]


@lru_cache(maxsize=128)
def block_table(
    grid: Shape, blocks: Shape, block_size: int, device: torch.device, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables of a run of tokens block by block; kept, since copying them to a device at every call would wait for it.

    Args:
        grid: token grid.
        blocks: MHLA blocks per axis, of which those of :func:`blocks_of_range` are in the table; () for uniform ones.
        block_size: rows of a uniform block; 0 for MHLA blocks, which have as many as the longest here.
        device: that holds the tables.
        first: place of the first token; 0 for uniform blocks.
        count: how many they are; in uniform blocks those beyond the grid are extra tokens.

    Returns:
        The token in every row, counted from the first, int64 (blocks, rows), any where there is none; the row of every
        token, int64 (count,); and the rows without a token, int64.
    """
    # kept for calls that take gradients, and made on the CPU whatever the default device is
    with torch.inference_mode(False), torch.device("cpu"):
        if block_size:
            order = layout_of(grid, block_size, count - math.prod(grid)).order.long().view(-1, block_size)
            exists, tokens = order >= 0, order.clamp_min(0)
        else:
            run = blocks_of_range(grid, blocks, first, count)
            members, starts = tokens_by_block(grid, blocks, first, count)
            starts = starts[run.start : run.stop + 1]
            sizes, starts = starts.diff()[:, None], starts[:-1, None]
            within = torch.arange(int(sizes.max())).expand(len(sizes), -1)
            exists = within < sizes
            # shorter blocks are filled up with one of their own tokens, or any
            tokens = members[(starts + within.minimum(sizes - 1).clamp_min(0)).clamp_max(count - 1)]
        rows = torch.empty(count, dtype=torch.int64)
        rows[tokens[exists]] = exists.flatten().nonzero().flatten()
        return tokens.to(device), rows.to(device), (~exists).flatten().nonzero().flatten().to(device)


def _longest(grid: Shape, blocks: Shape, first: int, count: int) -> int:
    """Most tokens of a run that lie in one block, counted in Python, as shapes are known where no tensor is."""
    ends = [list(accumulate(block_lengths(size, number))) for size, number in zip(grid, blocks, strict=True)]
    sizes: dict[tuple[int, ...], int] = {}
    for line in range(first // grid[-1], -(-(first + count) // grid[-1])):
        rest, block = line, list[int]()
        for size, axis_ends in zip(reversed(grid[:-1]), reversed(ends[:-1]), strict=True):
            rest, place = divmod(rest, size)
            block.append(bisect(axis_ends, place))
        start, stop = max(first - line * grid[-1], 0), min(first + count - line * grid[-1], grid[-1])
        for last, (begin, end) in enumerate(pairwise([0, *ends[-1]])):
            inside = max(0, min(end, stop) - max(begin, start))
            sizes[*block, last] = sizes.get((*block, last), 0) + inside
    return max(sizes.values(), default=0)


# torch.compile runs it while it traces a graph, and does not trace it
vars(_longest)["_dynamo_marked_constant"] = True


def block_rows(grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int, count: int) -> tuple[int, int]:
    """How many blocks :func:`to_blocks` returns of a run of N = ``count`` tokens, and their length."""
    if block_size:
        of_grid = block_count(grid, block_size)
        return of_grid + (count - math.prod(list(grid)) + block_size - 1) // block_size, block_size
    grid, blocks = tuple(map(int, grid)), tuple(map(int, blocks))
    own = blocks_of_range(grid, blocks, int(first), int(count))
    if count == math.prod(grid):
        return own.stop - own.start, max(block_sizes(grid, blocks))
    return own.stop - own.start, _longest(grid, blocks, int(first), int(count))


_PLACE = "SymInt[] grid, SymInt[] blocks, SymInt block_size, SymInt first"


@torch.library.custom_op(
    "mhla_diffusers::to_blocks", mutates_args=(), schema=f"(Tensor x, {_PLACE}, bool zeros) -> Tensor"
)
def to_blocks(
    x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int, zeros: bool
) -> torch.Tensor:
    """Tokens in the order of their blocks. An operator, so that torch.compile does not trace what reads the tables.

    Takes (B, N, ...), a run of the grid's tokens in raster order from ``first`` on; of uniform blocks all of them, with
    extra tokens behind. Grid, blocks and block size are those of :func:`block_table`. Without ``zeros``, rows that a
    block lacks are any token once more, and what uses them must give them no gradient.

    Returns:
        (B, b, L, ...): the b blocks of the table, L tokens long as the longest.
    """
    tokens, _, padding = block_table(tuple(grid), tuple(blocks), block_size, x.device, first, x.shape[1])
    rows = x.index_select(1, tokens.flatten())
    if zeros and len(padding):
        rows.index_fill_(1, padding, 0)
    return rows.unflatten(1, tokens.shape)


@torch.library.custom_op(
    "mhla_diffusers::from_blocks", mutates_args=(), schema=f"(Tensor rows, {_PLACE}, SymInt count) -> Tensor"
)
def from_blocks(
    rows: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int, count: int
) -> torch.Tensor:
    """The inverse of :func:`to_blocks`: (B, b, L, ...) to (B, N, ...) for N = ``count``."""
    _, places, _ = block_table(tuple(grid), tuple(blocks), block_size, rows.device, first, count)
    return rows.flatten(1, 2).index_select(1, places)


@to_blocks.register_fake
def _to_blocks_shape(
    x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], block_size: int, first: int, zeros: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], *block_rows(grid, blocks, block_size, first, x.shape[1]), *x.shape[2:])


@from_blocks.register_fake
def _from_blocks_shape(rows: torch.Tensor, *place: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], place[-1], *rows.shape[3:])


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensor, *place, _ = inputs
    ctx.place, ctx.tokens = place, tensor.shape[1]


def _to_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return from_blocks(gradient.contiguous(), *ctx.place, ctx.tokens), *(None,) * 5


def _from_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return to_blocks(gradient.contiguous(), *ctx.place, True), *(None,) * 5


to_blocks.register_autograd(_to_blocks_gradient, setup_context=_save_place)
from_blocks.register_autograd(_from_blocks_gradient, setup_context=_save_place)


def in_blocks(x: torch.Tensor, grid: Sequence[int], block_size: int) -> torch.Tensor:
    """(B, N + n, H, C), n extra tokens last, in uniform blocks: (B, H, T + E, L, C), 0 in rows without a token."""
    return to_blocks(x, grid, [], block_size, 0, True).permute(0, 3, 1, 2, 4).contiguous()


def in_order(x: torch.Tensor, grid: Sequence[int], block_size: int) -> torch.Tensor:
    """The inverse of :func:`in_blocks` for blocks of the grid's tokens alone: (B, H, T, L, C) to (B, N, H, C)."""
    return from_blocks(x.permute(0, 2, 3, 1, 4), grid, [], block_size, 0, math.prod(list(grid)))
