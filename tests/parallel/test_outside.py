"""Tokens outside the grid on shares of the tokens, over processes on gloo, against the whole in one process."""

import pytest
import torch

from mhla_diffusers.attention import ContentTiles

from .processes import Processes
from .test_operator import errors

ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4)}
CASES = {
    "alone, before": {"outside": (6, 0)},
    "alone, after": {"outside": (0, 6), "far": True},
    "alone, all": ALL | {"outside": (4, 2)},
    "tiles": {"outside": (2, 4), "tiles": (2, 3, 2)},
    "tiles, all": ALL | {"outside": (6, 4), "tiles": (2, 3, 2), "far": True, "means": True},
    "content": ALL | {"outside": (0, 8), "exact": ContentTiles((2, 3, 2), 0.25), "far": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", [(1, 2)])
def test_two_processes_equal_one(two: Processes, degrees: tuple[int, int], case: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found in two.run(errors, degrees, False, (4, 5, 6), (3, 2, 2), CASES[case], dtype):
            assert max(found.values()) < limit, found
