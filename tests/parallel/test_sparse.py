"""Block lists on shares of the tokens, over processes on gloo, against the whole in one process."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusers.attention import ContentRule, mhla_attention
from mhla_diffusers.attention.layout import layout_of

from .processes import Processes
from .test_operator import HEAD_DIM, HEADS, errors, lists_of, parallel, random_mask

GRID, SIZE = (3, 5, 6), 8
"""Half of the tokens, or a quarter, ends within a block, and a share holds tokens of many."""
ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4), "linear": True, "pooled": True, "lists": SIZE}
CASES = {
    "alone": {"lists": SIZE},
    "linear": {"lists": SIZE, "linear": True, "axes": (4, 4, 4)},
    "pooled": {"lists": SIZE, "pooled": True, "axes": (4, 4, 4), "rope": "before"},
    "all": ALL,
    "lists of every sample": ALL | {"samples": 2},
    "single tokens": ALL | {"lists": 1},
    "one block": ALL | {"lists": 128},
    "content": ALL | {"lists": None, "sparse": ContentRule(SIZE, 0.25)},
    "fitted": ALL | {"lists": None, "pooled": False, "sparse": ContentRule(SIZE, 0.25, fit_pooled_bias=True)},
    "everything": ALL | {"lists": None, "sparse": ContentRule(SIZE, 1.0)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_two_processes_equal_one(two: Processes, degrees: tuple[int, int], case: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found in two.run(errors, degrees, False, GRID, (3, 2, 2), CASES[case], dtype):
            assert max(found.values()) < limit, found


@pytest.mark.parametrize("case", ["all", "content", "fitted"])
@pytest.mark.parametrize("degrees", [(4, 1), (2, 2)])
def test_four_processes_equal_one(four: Processes, degrees: tuple[int, int], case: str) -> None:
    for found in four.run(errors, degrees, False, (3, 4, 7), (2, 3, 2), CASES[case], torch.float64):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("case", ["alone", "lists of every sample", "content"])
@pytest.mark.parametrize(("degrees", "grid"), [((4, 1), (5, 3, 7)), ((1, 4), (5, 3, 7)), ((4, 1), (2, 3, 2))])
def test_shares_may_differ(four: Processes, degrees: tuple[int, int], grid: tuple[int, ...], case: str) -> None:
    for found in four.run(errors, degrees, True, grid, (2, 2, 2), CASES[case], torch.float64):
        assert max(found.values()) < 1e-12, found


class _Rows(TorchDispatchMode):
    """The shape of what every all-to-all is given, and how many rows it is told to send to every process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Size, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops._c10d_functional.all_to_all_single.default:
            self.found.append((args[0].shape, list(args[2])))
        return function(*args, **(kwargs or {}))


def rows_sent(ring: int) -> tuple[list[tuple[torch.Size, list[int]]], list[int]]:
    """What the all-to-alls of a process are given, and the rows that each of the others needs of it, one by one."""
    place, tokens, mask = parallel(ring, 1, anything=True), math.prod(GRID), random_mask(GRID, SIZE, 1, 0.05)
    first, count = place.own_share(tokens)
    query = torch.randn(2, count, HEADS, HEAD_DIM, requires_grad=True)
    lists = lists_of(mask, SIZE, slice(None))
    with _Rows() as rows:
        output = mhla_attention(query, query, query, torch.ones(1, 1), GRID, (1, 1, 1), sparse=lists, parallel=place)
        output.sum().backward()
    block_of, needed = (layout_of(GRID, SIZE).rows // SIZE).tolist(), []
    for rank, (begin, length) in enumerate(place.shares(tokens)):
        asking = set(block_of[begin : begin + length])
        pairs = itertools.product(range(HEADS), range(first, first + count))
        due = [any(mask[0, head, block, block_of[token]] for block in asking) for head, token in pairs]
        needed.append(sum(due) if rank != place.ring.rank else 0)
    return rows.found, needed


@pytest.mark.parametrize("ring", [2, 4])
def test_nothing_is_sent_but_what_lists_hold(two: Processes, four: Processes, ring: int) -> None:
    for found, needed in (two if ring == 2 else four).run(rows_sent, ring):
        (forward, sent), (backward, _) = found
        assert sent == needed
        assert forward == (sum(needed), 2, 2 * HEAD_DIM), "keys and values of both samples"
        assert backward[1:] == forward[1:]
        assert 0 < sum(needed) < (ring - 1) * math.prod(GRID) // ring * HEADS, "less than all to everyone"
