"""The neighbours that a convolution over the token grid needs of the tokens of other processes."""

import math

import torch

from ..blocks import Shape
from .collectives import exchanged
from .place import Parallel, Share


def rows_around(x: torch.Tensor, grid: Shape, reach: int, parallel: Parallel) -> tuple[torch.Tensor, slice]:
    """Own tokens and those around them, on whole rows of the grid's first axis.

    Args:
        x: (B, own tokens, C).
        grid: token grid, of which x holds a share.
        reach: how far neighbours are away, along every axis.
        parallel: the processes.

    Returns:
        (B, rows, *rest of the grid, C), in which tokens that are no neighbours of own ones may be 0, and where the own
        tokens stand in it, read in raster order.
    """
    tokens, row = math.prod(grid), math.prod(grid[1:])
    shares = parallel.shares(tokens)
    own = shares[parallel.whole.rank]
    margin = reach * sum(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))
    wanted = [_widened(share, margin, tokens) for share in shares]
    here = wanted[parallel.whole.rank]
    due = [_common(own, there) for there in wanted]
    due[parallel.whole.rank] = (own[0], 0)
    rows = torch.cat([x[:, first - own[0] : first - own[0] + count] for first, count in due], dim=1).movedim(1, 0)
    lengths = [_common(share, here)[1] for share in shares]
    lengths[parallel.whole.rank] = 0
    found = exchanged(rows, [count for _, count in due], lengths, parallel.whole.name).movedim(0, 1)
    before = own[0] - here[0]
    begin, end = here[0] // row * row, -(-sum(here) // row) * row
    around = torch.cat([found[:, :before], x, found[:, before:]], dim=1)
    around = torch.nn.functional.pad(around, (0, 0, here[0] - begin, end - sum(here)))
    return around.unflatten(1, (-1, *grid[1:])), slice(own[0] - begin, sum(own) - begin)


def _widened(share: Share, margin: int, tokens: int) -> Share:
    first, stop = max(0, share[0] - margin), min(tokens, sum(share) + margin)
    return first, stop - first


def _common(a: Share, b: Share) -> Share:
    first = max(a[0], b[0])
    return first, max(0, min(sum(a), sum(b)) - first)
