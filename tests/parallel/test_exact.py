"""Exact tiles on shares of the tokens, over processes on gloo, against the whole in one process."""

import pytest
import torch

from mhla_diffusers.attention import ContentTiles

from .processes import Processes
from .test_operator import errors

ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4), "far": True, "means": True, "tiles": (2, 3, 2)}
CASES = {
    "alone": {"tiles": (2, 3, 2)},
    "far": {"tiles": (2, 3, 2), "far": True, "axes": (4, 4, 4)},
    "means": {"tiles": (2, 3, 2), "means": True, "axes": (4, 4, 4), "rope": "before"},
    "all": ALL,
    "lists of every sample": ALL | {"samples": 2},
    "single tokens": ALL | {"tiles": (4, 5, 6)},
    "content": ALL | {"tiles": None, "exact": ContentTiles((2, 3, 2), 0.25)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", [(1, 2)])
def test_two_processes_equal_one(two: Processes, degrees: tuple[int, int], case: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found in two.run(errors, degrees, False, (4, 5, 6), (3, 2, 2), CASES[case], dtype):
            assert max(found.values()) < limit, found
