"""What processes send each other: sums, and rows to whom they are due. Both are differentiable.

Every process computes the loss of its own tokens' outputs, so that what all their backward passes give, added up, is
the gradient; the gradient of something that was sent is therefore what its receivers send back, added up.

Groups go by their names, which PyTorch's functional collectives take and torch.compile keeps in a graph.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..derivatives import is_forward_mode
from ..layout import Shape
from .place import Group, Parallel, Share

_OPS = torch.ops._c10d_functional


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, group: str) -> torch.Tensor:
        return _arrived(_OPS.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _arrived(_OPS.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


class _SumInForwardMode(_Sum):
    """A class of its own, since torch.compile traces none with a ``jvp``."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return _arrived(_OPS.all_reduce(tangent.contiguous(), "sum", ctx.group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
        return _arrived(_OPS.all_to_all_single(rows.contiguous(), list(received), list(sent), group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.sent, ctx.received, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lengths = list(ctx.sent), list(ctx.received)
        return _arrived(_OPS.all_to_all_single(gradient.contiguous(), *lengths, ctx.group)), None, None, None


class _ExchangeInForwardMode(_Exchange):
    """Likewise."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        lengths = list(ctx.received), list(ctx.sent)
        return _arrived(_OPS.all_to_all_single(tangent.contiguous(), *lengths, ctx.group))


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """What a collective was started for, once it is there.

    Raises:
        RuntimeError: it does not come, since another process has ended or does not answer.
    """
    if torch.compiler.is_compiling():
        return _OPS.wait_tensor(x)
    try:
        return _OPS.wait_tensor(x)
    except RuntimeError as error:
        raise RuntimeError(
            "Another process of the context-parallel group has ended or does not answer, so this one ends too. The "
            "reason is in the output of the process that ended first; a process that is only slow needs a longer "
            "timeout in torch.distributed.init_process_group."
        ) from error


def summed(x: torch.Tensor, group: str | None) -> torch.Tensor:
    """Add a tensor up over processes; a group of None is this process alone."""
    if group is None:
        return x
    function = _SumInForwardMode if is_forward_mode() else _Sum
    found: torch.Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def exchanged(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str | None) -> torch.Tensor:
    """Rows (Σ sent, ...) to whom they are due, and those received (Σ received, ...), each in the order of processes."""
    function = _ExchangeInForwardMode if is_forward_mode() else _Exchange
    found: torch.Tensor = function.apply(rows, tuple(sent), tuple(received), group)  # type: ignore[no-untyped-call]
    return found


def gathered(rows: torch.Tensor, counts: Sequence[int], group: str | None) -> torch.Tensor:
    """Return the rows of all processes, (Σ counts, ...), given this one's, (own count, ...)."""
    if rows.dtype == torch.bool:  # not every backend can send bool
        return gathered(rows.byte(), counts, group).bool()
    return exchanged(rows.repeat(len(counts), *(1,) * (rows.ndim - 1)), (len(rows),) * len(counts), counts, group)


def counts_of(count: int, group: Group, even: bool, device: torch.device) -> list[int]:
    """Return the counts of all processes of a group, given this one's; nothing is sent where all are ``even``."""
    if even:
        return [count] * group.size
    return [int(found) for found in gathered(torch.tensor([count], device=device), [1] * group.size, group.name)]


def rows_around(x: torch.Tensor, grid: Shape, reach: int, parallel: Parallel) -> tuple[torch.Tensor, slice]:
    """Own tokens (B, own tokens, C) and those at most ``reach`` away along every axis, as a convolution needs them.

    Returns:
        (B, rows, *rest of the grid, C), whole rows of the grid's first axis, in which tokens that are no neighbours of
        own ones may be 0; and where the own tokens stand in it, read in raster order.
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
