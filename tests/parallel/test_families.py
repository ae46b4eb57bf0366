"""Every family whose transformer diffusers can split over processes equals itself on one process."""

import pytest

from .processes import Processes
from .transformers import NAMES, errors

PLAIN = {"exact": "none", "exact_tiles": None}
ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_two_processes_equal_one(two: Processes, name: str, degrees: tuple[int, int]) -> None:
    for found in two.run(errors, name, degrees, PLAIN):
        assert max(found.values()) < ROUNDING, found
