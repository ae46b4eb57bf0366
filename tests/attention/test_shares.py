"""The eager backend over shares of the tokens against the float64 reference of all: output and every gradient."""

import pytest
import torch
from hypothesis import given, settings

from mhla_diffusers.attention import MHLACall, eager
from mhla_diffusers.attention.layout import block_index

from .problems import errors_of, make_problem
from .shares import CUTS, cut_problems, in_shares, shares_of
from .test_linear import TOLERANCE


def check(problem, lengths, dtype):
    for name, error in errors_of(problem, dtype, in_shares(eager, lengths)).items():
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(("grid", "blocks", "lengths"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cuts(grid, blocks, lengths, dtype):
    check(make_problem(grid, blocks, rotary=True), lengths, dtype)


@pytest.mark.parametrize("rope", ["after", "before"])
@pytest.mark.parametrize("normalize", [True, False])
def test_everything_at_once(normalize, rope):
    options = {"mask": True, "norm": True, "gate": True, "per_head": True, "normalize": normalize, "rope": rope}
    check(make_problem((5, 7, 3), (2, 3, 2), rotary=True, **options), (2, 46, 55, 2), torch.float64)


@settings(max_examples=30, deadline=None)
@given(cut_problems())
def test_drawn_problems(drawn):
    problem, lengths = drawn
    # float64, so that an ill-conditioned draw (an output norm over a nearly zero output) needs no loose bound
    for name, error in errors_of(problem, torch.float64, in_shares(eager, lengths)).items():
        assert error <= 1e-9, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(("grid", "blocks", "lengths"), CUTS)
def test_blocks_of_which_a_share_has_nothing_have_no_states(grid, blocks, lengths):
    problem = make_problem(grid, blocks)
    index = block_index(grid, blocks)
    for share in shares_of(MHLACall(**problem.tensors, grid=grid, blocks=blocks), lengths):
        there = torch.zeros(len(problem.tensors["mixing"]), dtype=torch.bool)
        there[index[share.first : share.first + share.query.shape[1]]] = True
        assert torch.equal(eager.states(share).ne(0).any(dim=-1).any(dim=-1)[0, 0], there)
