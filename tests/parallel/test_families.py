"""Every family whose transformer diffusers can split over processes equals itself on one process."""

import pytest

from .processes import Processes
from .transformers import FEATURES, NAMES, errors

ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""
OF_LAMBDA = 5e-5
"""The same of λ's gradient, one number per head: a sum over all tokens of terms of both signs, most of which cancel. On
one process float32 is 4e-5 from float64 there (Qwen-Image, first layer), and 2e-6 in all other gradients."""


def within(found: dict[str, float]) -> bool:
    """Whether output and gradients equal those of one process, up to rounding."""
    return all(x < (OF_LAMBDA if name.endswith("linear_log_weight") else ROUNDING) for name, x in found.items())


@pytest.mark.parametrize("name", ["wan", "chronoedit", "ltx"])
def test_a_ring_of_two_equals_one(two: Processes, name: str) -> None:
    for found in two.run(errors, name, (2, 1), FEATURES):
        assert within(found), found


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one_by_heads(two: Processes, name: str) -> None:
    # diffusers' own cross-attention of LTX, whose text is split as well, has no backward pass by heads
    for found in two.run(errors, name, (1, 2), FEATURES, gradients_too=name != "ltx"):
        assert within(found), found


@pytest.mark.parametrize("name", ["wan", "chronoedit"])
def test_ring_and_heads_together(four: Processes, name: str) -> None:
    for found in four.run(errors, name, (2, 2), FEATURES):
        assert within(found), found


def test_four_processes_equal_one(four: Processes) -> None:
    for found in four.run(errors, "wan", (4, 1), FEATURES):
        assert within(found), found


@pytest.mark.parametrize("degrees", [(4, 1), (2, 2)])
def test_layers_that_stay_attend_round_diffusers_ring(four: Processes, degrees: tuple[int, int]) -> None:
    # of more than two in a ring, diffusers' own backward pass gives keys and values the gradients of others
    for found in four.run(errors, "wan", degrees, {**FEATURES, "layers": "1/2"}, gradients_too=degrees[0] == 2):
        assert within(found), found


@pytest.mark.parametrize(("name", "ring"), [("wan", True), ("wan", False), ("flux", False), ("qwenimage", False)])
def test_shares_may_differ(two: Processes, name: str, ring: bool) -> None:
    degrees, options = ((2, 1), {"ring_anything": True}) if ring else ((1, 2), {"ulysses_anything": True})
    for found in two.run(errors, name, degrees, FEATURES, ragged=True, **options):
        assert within(found), found
