"""MHLA beside extra tokens on the kernels against the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention

from ..problems import errors_against_reference
from ..test_extra import SUMS, make
from ..test_linear import TOLERANCE
from .test_kernels import EVERYTHING, HALF_TO_EAGER, TRITON, on_device

pytestmark = pytest.mark.gpu


def check(problem, dtype=torch.float32):
    """Held to the eager backend's bounds, in half precision to HALF_TO_EAGER of them, as all kernels are.

    Where float32 itself is worse, as of an output norm over a nearly zero output, to what the eager backend's is.
    """
    problem = on_device(problem)
    eager = errors_against_reference(problem, dtype, "eager")
    allowed = TOLERANCE[dtype] * (2 if dtype == torch.float32 else 2 * HALF_TO_EAGER)
    for name, found in errors_against_reference(problem, dtype, "triton").items():
        if dtype == torch.float32 or name not in SUMS:
            bound = max(allowed, HALF_TO_EAGER * eager[name])
            assert found <= bound, f"{name}: relative error {found:.2e}, allowed {bound:.2e}"


BEFORE = {"rotary": True, "rope": "before"}
PROBLEMS = {
    "plain": {"extra": (0, 17)},
    "rotary": {"rotary": True, "per_head": True},
    "rotary before": {**BEFORE, "gate": True},
    "a weight": {"linear_branch": True, "norm": True},
    "mask": {"mask": True, "batch": 2, "linear_branch": True},
    "more than a block": {**BEFORE, "extra": (70, 30)},
    "5 channels": {"head_dim": 5},
    "6 channels, rotary before": {**BEFORE, "head_dim": 6},
    "128 channels": {**BEFORE, "head_dim": 128},
}


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_against_the_reference(options):
    check(make((5, 7), **{"batch": 1, "head_dim": 16, "extra": (2, 3)} | options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_everything_at_once(dtype, rope):
    check(make((5, 7), (2, 3), head_dim=32, rope=rope, linear_branch=True, **EVERYTHING), dtype)


def test_several_blocks_of_rows():
    """Of 64 queries, which MHLA's blocks are not cut by."""
    check(make((5, 7, 3), (0, 21), batch=1, head_dim=16, mask=True, **BEFORE))


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    flags = {name: draw(st.booleans()) for name in (*EVERYTHING, "linear_branch")}
    extra, rope = draw(st.sampled_from([(1, 0), (2, 3), (0, 18)])), draw(st.sampled_from(["after", "before"]))
    head_dim, seed = 2 * draw(st.integers(1, 20)), draw(st.integers(0, 99))
    return make(grid, extra, batch=1, rope=rope, head_dim=head_dim, seed=seed, **flags)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    check(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_large_logits_stay_finite(dtype, rope):
    problem = on_device(make((7, 9), (2, 3), head_dim=16, linear_branch=True, rope=rope, rotary=rope == "before"))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    tensors = {name: x if name == "linear_weight" else x.to(dtype) for name, x in tensors.items()}
    found = TRITON(**tensors, **problem.settings)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("rope", ["before", "after"])
def test_nan_of_an_extra_token_is_not_hidden(rope):
    problem = on_device(make((5, 7), (0, 3), head_dim=16, rotary=True, rope=rope))
    problem.tensors["key"][0, 36, 0, 3] = float("nan")
    found = mhla_attention(**problem.tensors, **problem.settings, backend="triton")
    assert found[0, :, 0].isnan().any(-1).all()
    assert not found[0, :, 1].isnan().any() and not found[1].isnan().any()


def test_the_same_bits_twice():
    problem = on_device(make((5, 7), (2, 3), head_dim=16, batch=1, **BEFORE))
    first, second = problem.run(TRITON), problem.run(TRITON)
    assert all(torch.equal(first[name], second[name]) for name in first)
