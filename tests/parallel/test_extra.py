"""Extra tokens on shares of the tokens, over processes on gloo, against the whole in one process."""

import pytest
import torch

from mhla_diffusers.attention import ContentRule

from .processes import Processes
from .test_operator import errors
from .test_sparse import GRID, SIZE

ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4)}
CASES = {
    "alone, before": {"extra": (6, 0)},
    "alone, after": {"extra": (0, 6), "linear": True},
    "alone, all": ALL | {"extra": (4, 2)},
    "alone, more than fill a block": {"extra": (0, 140)},
    "lists": {"extra": (2, 4), "lists": SIZE},
    "lists, all": ALL | {"extra": (6, 4), "lists": SIZE, "linear": True, "pooled": True},
    "content": ALL | {"extra": (0, 8), "sparse": ContentRule(SIZE, 0.25), "linear": True},
    "fitted": ALL | {"extra": (2, 6), "sparse": ContentRule(8, 0.25, fit_pooled_bias=True), "linear": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_two_processes_equal_one(two: Processes, degrees: tuple[int, int], case: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found in two.run(errors, degrees, False, GRID, (3, 2, 2), CASES[case], dtype):
            assert max(found.values()) < limit, found


@pytest.mark.parametrize("case", ["alone, all", "lists, all"])
@pytest.mark.parametrize("degrees", [(4, 1), (2, 2)])
def test_four_processes_equal_one(four: Processes, degrees: tuple[int, int], case: str) -> None:
    settings = CASES[case] | {"extra": (8, 4)}
    for found in four.run(errors, degrees, False, (3, 4, 7), (2, 3, 2), settings, torch.float64):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("extra", [(5, 0), (0, 7), (4, 6)])
@pytest.mark.parametrize("degrees", [(4, 1), (1, 4)])
def test_shares_may_differ(four: Processes, degrees: tuple[int, int], extra: tuple[int, int]) -> None:
    settings = CASES["lists, all"] | {"extra": extra}
    for found in four.run(errors, degrees, True, (5, 3, 7), (2, 2, 2), settings, torch.float64):
        assert max(found.values()) < 1e-12, found
