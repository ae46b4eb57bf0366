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
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any

import torch

Shape = tuple[int, ...]

_AXIS_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


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


def tokens_by_block(
    grid: Sequence[int], blocks: Sequence[int], first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run of tokens sorted by block: int64 (N,), counted from its first, and where each block begins, (M + 1,).

    Args:
        grid: token grid.
        blocks: block count per axis.
        first: place on the grid of the run's first token.
        count: N, how many they are.
    """
    index = block_index(grid, blocks)[first : first + count]
    sizes = torch.bincount(index, minlength=math.prod(blocks))
    return index.argsort(stable=True), torch.nn.functional.pad(sizes.cumsum(dim=0), (1, 0))


@lru_cache(maxsize=64)
def _order(
    grid: Shape, blocks: Shape, first: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order of some tokens by block, on a device.

    Args:
        grid: token grid.
        blocks: block count per axis.
        first: place on the grid of the first of the tokens.
        count: N, how many they are.
        device: for the tables.

    Returns:
        int64 (b * L,), which token stands in a row, b the blocks of :func:`blocks_of_range` and L the most tokens that
        one of them has here, shorter ones filled up with one of their own; int64, the rows so filled; and int64 (N,),
        in which row a token stands.
    """
    # kept for calls that take gradients, and made on the CPU whatever the default device is
    with torch.inference_mode(False), torch.device("cpu"):
        own = blocks_of_range(grid, blocks, first, count)
        tokens, starts = tokens_by_block(grid, blocks, first, count)
        starts = starts[own.start : own.stop + 1]
        sizes, starts = starts.diff(), starts[:-1]
        length, block = int(sizes.max()), torch.repeat_interleave(sizes)
        within = torch.arange(length).expand(len(sizes), -1)
        # of a block without a token any will do
        filled = tokens[(starts[:, None] + within.minimum(sizes[:, None] - 1).clamp_min(0)).clamp_max(count - 1)]
        rows = torch.empty_like(tokens)
        rows[tokens] = block * length + torch.arange(count) - starts[block]
        padding = (within >= sizes[:, None]).flatten().nonzero().flatten()
        return filled.flatten().to(device), padding.to(device), rows.to(device)


def block_rows(grid: Sequence[int], blocks: Sequence[int], first: int, count: int) -> tuple[int, int]:
    """The b and L of :func:`to_blocks`: how many blocks a run of N = ``count`` tokens may lie in, and the longest."""
    grid, blocks = tuple(map(int, grid)), tuple(map(int, blocks))
    own = blocks_of_range(grid, blocks, int(first), int(count))
    if count == math.prod(grid):
        return own.stop - own.start, smallest_and_largest(grid, blocks)[1]
    return own.stop - own.start, _longest(grid, blocks, int(first), int(count))


def _longest(grid: Shape, blocks: Shape, first: int, count: int) -> int:
    """Most tokens of a run that lie in one block."""
    return _counted_longest(grid, blocks, first, count)


# torch.compile runs it while it traces a graph, and does not trace it
vars(_longest)["_dynamo_marked_constant"] = True


@lru_cache(maxsize=256)
def _counted_longest(grid: Shape, blocks: Shape, first: int, count: int) -> int:
    """The same, counted in Python, as shapes are known where no tensor is."""
    row, ends = grid[-1], list(accumulate(block_lengths(grid[-1], blocks[-1])))
    sizes: dict[tuple[int, ...], int] = {}
    for line in range(first // row, -(-(first + count) // row)):
        block: tuple[int, ...] = ()
        rest = line
        for size, number in zip(reversed(grid[:-1]), reversed(blocks[:-1]), strict=True):
            rest, place = divmod(rest, size)
            block = (*block, bisect(list(accumulate(block_lengths(size, number))), place))
        start, stop = max(first - line * row, 0), min(first + count - line * row, row)
        for last, (begin, end) in enumerate(pairwise([0, *ends])):
            inside = min(end, stop) - max(begin, start)
            if inside > 0:
                sizes[*block, last] = sizes.get((*block, last), 0) + inside
    return max(sizes.values(), default=0)


_PLACE = "SymInt[] grid, SymInt[] blocks, SymInt first"


@torch.library.custom_op(
    "mhla_diffusers::to_blocks", mutates_args=(), schema=f"(Tensor x, {_PLACE}, bool zeros) -> Tensor"
)
def to_blocks(x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], first: int, zeros: bool) -> torch.Tensor:
    """Tokens in the order of their blocks. An operator, so that torch.compile does not trace what reads the tables.

    Args:
        x: (B, N, ...), a run of the grid's tokens in raster order.
        grid: token grid.
        blocks: block count per axis.
        first: place on the grid of the first token.
        zeros: whether rows that a block lacks are 0; else they are one of its tokens once more, and what uses them must
            give them no gradient.

    Returns:
        (B, b, L, ...): the b blocks that :func:`blocks_of_range` gives, L tokens long as the longest.
    """
    order, padding, _ = _order(tuple(grid), tuple(blocks), first, x.shape[1], x.device)
    rows = x.index_select(1, order)
    if zeros and len(padding):
        rows.index_fill_(1, padding, 0)
    return rows.unflatten(1, block_rows(grid, blocks, first, x.shape[1]))


@torch.library.custom_op(
    "mhla_diffusers::from_blocks", mutates_args=(), schema=f"(Tensor rows, {_PLACE}, SymInt count) -> Tensor"
)
def from_blocks(rows: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], first: int, count: int) -> torch.Tensor:
    """The inverse of :func:`to_blocks`: (B, b, L, ...) to (B, N, ...) for N = ``count``."""
    _, _, places = _order(tuple(grid), tuple(blocks), first, count, rows.device)
    return rows.flatten(1, 2).index_select(1, places)


@to_blocks.register_fake
def _to_blocks_shape(
    x: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], first: int, zeros: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], *block_rows(grid, blocks, first, x.shape[1]), *x.shape[2:])


@from_blocks.register_fake
def _from_blocks_shape(
    rows: torch.Tensor, grid: Sequence[int], blocks: Sequence[int], first: int, count: int
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], count, *rows.shape[3:])


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensor, *place = inputs
    ctx.place, ctx.tokens = place, tensor.shape[1]


def _to_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grid, blocks, first, _ = ctx.place
    return from_blocks(gradient.contiguous(), grid, blocks, first, ctx.tokens), None, None, None, None


def _from_blocks_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grid, blocks, first, _ = ctx.place
    return to_blocks(gradient.contiguous(), grid, blocks, first, True), None, None, None, None


to_blocks.register_autograd(_to_blocks_gradient, setup_context=_save_place)
from_blocks.register_autograd(_from_blocks_gradient, setup_context=_save_place)
