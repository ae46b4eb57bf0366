"""The Triton kernels over shares of the tokens against the float64 reference of all: output and every gradient."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mhla_diffusers.attention import MHLACall, eager
from mhla_diffusers.attention.triton import backend

from ..problems import errors_against_reference, errors_of, make_problem, relative_error
from ..shares import CUTS, cut_problems, in_shares, shares_of
from .test_kernels import EVERYTHING, FLOAT32_TOLERANCE, HALF_TO_EAGER, check, on_device

pytestmark = pytest.mark.gpu


def check_cut(problem, lengths, dtype=torch.float32):
    check(problem, dtype, attend=in_shares(backend, lengths))


@pytest.mark.parametrize(("grid", "blocks", "lengths"), CUTS[2::2])
def test_cuts(grid, blocks, lengths):
    check_cut(make_problem(grid, blocks, batch=1, rotary=True), lengths)


@pytest.mark.parametrize(("normalize", "rope"), [(True, "after"), (False, "before")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_at_once(dtype, normalize, rope):
    problem = make_problem((5, 4, 3), (2, 2, 1), head_dim=32, normalize=normalize, rope=rope, **EVERYTHING)
    check_cut(problem, (2, 23, 33, 2), dtype)


def test_angles_of_every_sample():
    """A share of a table of several samples is not contiguous."""
    problem = make_problem((5, 7), (2, 2), heads=1)
    angles = torch.randn(2, 35, 1, 4).repeat_interleave(2, dim=-1)
    problem.options["rotary"] = angles.cos(), angles.sin()
    check_cut(problem, (4, 20, 11))


def test_one_long_block_is_shared_out_within_a_share():
    """Several programs for each block, several tiles each, the last one partly empty."""
    check_cut(make_problem((2, 1187), (1, 2), batch=1, heads=1, head_dim=16, mask=True, gate=True), (1500, 874))


def test_normaliser_and_its_gradient():
    """Which the merge with softmax over extra tokens differentiates."""
    problem = on_device(make_problem((5, 7), (2, 2), batch=1, rotary=True, mask=True))

    def run(attend, dtype):
        leaves = {name: x.detach().to(dtype).clone().requires_grad_() for name, x in problem.tensors.items()}
        call = MHLACall(**leaves, grid=problem.grid, blocks=problem.blocks, **problem.options)
        output, normaliser = attend(dataclasses.replace(call, key_mask=call.key_mask.float()))
        (output.double().square().sum() + normaliser.double().log().sum()).backward()
        return [output.detach(), normaliser.detach(), *(leaf.grad for leaf in leaves.values())]

    def whole(call):
        return eager.read(call, eager.states(call))

    def over_shares(call):
        shares = shares_of(call, (3, 18, 14))
        states = sum(backend.states(share) for share in shares)
        found = zip(*(backend.read(share, states) for share in shares), strict=True)
        return [torch.cat(pieces, dim=1) for pieces in found]

    for tensor, truth in zip(run(over_shares, torch.float32), run(whole, torch.float64), strict=True):
        assert relative_error(tensor, truth) <= FLOAT32_TOLERANCE


# bounds as in test_kernels.test_drawn_problems
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_problems(most_blocks=6, most_channels=32))
def test_drawn_problems(drawn):
    problem, lengths = on_device(drawn[0]), drawn[1]
    found = errors_of(problem, torch.float32, in_shares(backend, lengths))
    eager = errors_against_reference(problem, torch.float32, "eager")
    for name, error in found.items():
        allowed = max(FLOAT32_TOLERANCE, HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}"


def test_states_and_their_gradient_may_have_any_strides():
    problem = on_device(make_problem((5, 7), (2, 2), batch=1))
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
    call = MHLACall(**leaves, grid=problem.grid, blocks=problem.blocks)
    states = backend.states(call)
    strided = states.mT.contiguous().mT
    assert torch.equal(backend.read(call, strided)[0], backend.read(call, states)[0])
    upstream = torch.randn_like(states)
    for gradient in (upstream, upstream.mT.contiguous().mT):
        states.backward(gradient, retain_graph=True)
    found = leaves["key"].grad.clone()
    states.backward(-2 * upstream)
    assert found.any() and not leaves["key"].grad.any()
