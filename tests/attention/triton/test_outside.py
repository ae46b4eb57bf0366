"""Extra tokens in the Triton kernels, against the float64 reference: output and every gradient."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mhla_diffusers.attention.tiles import lists_with_extra
from mhla_diffusers.attention.triton.exact_lists import ExactCall, bitmap, lists_of_queries

from mhla_diffusers.attention import BlockLists, mhla_attention
from mhla_diffusers.attention.triton import exact

from ..problems import errors_against_reference
from ..test_exact import TOLERANCE
from ..test_outside import make
from .test_exact import check, on_device, per_sample
from .test_kernels import DEVICE, EVERYTHING, HALF_TO_EAGER

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("parts", ["alone", "exact", "means", "far", "means and far"])
def test_parts(parts):
    check(make((5, 7), (2, 3), (2, 3), parts, batch=1))


@pytest.mark.parametrize("extra", [(3, 0), (0, 1), (6, 8)])  # tiles hold at most 9 tokens
def test_before_and_after(extra):
    check(make((5, 7), (2, 3), extra, batch=1, rotary=True))


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [("alone", torch.bfloat16), ("means and far", torch.bfloat16), ("means and far", torch.float32)],
    ids=str,
)
def test_everything_at_once(parts, dtype):
    check(make((5, 7), (2, 2), (2, 3), parts, head_dim=32, **EVERYTHING), dtype)


def test_rope_of_axes_before_the_feature_map():
    check(make((3, 5, 4), (2, 2, 2), (2, 3), rotary_axes=(4, 2, 2), rope="before", batch=1))


def test_lists_of_every_sample():
    problem = make((7, 5), (3, 2), (2, 3))
    problem.options["exact"] = per_sample((3, 2))
    check(problem)


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 2))
    counts = tuple(draw(st.lists(st.integers(1, 2), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 3)) for count in counts)
    flags = {name: draw(st.booleans()) for name in EVERYTHING}
    parts = draw(st.sampled_from(["alone", "exact", "means and far"]))
    # exact tiles and extra tokens may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= parts != "exact"
    extra = draw(st.sampled_from([(1, 0), (2, 3), (0, 11)]))
    return make(grid, counts, extra, parts, seed=draw(st.integers(0, 99)), batch=1, **flags)


# The eager backend's error is the measure where float32 itself passes the bound, as in test_exact.
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    problem = on_device(problem)
    eager = errors_against_reference(problem, torch.float32, "eager")
    for name, error in errors_against_reference(problem, torch.float32, "triton").items():
        allowed = max(TOLERANCE[torch.float32], HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("parts", ["alone", "exact", "means"])
def test_masked_samples_attend_to_nothing_without_nan(parts):
    problem = on_device(make((6, 4), (3, 2), (2, 3), parts))
    problem.options["key_mask"] = torch.zeros(2, 29, dtype=torch.bool, device=DEVICE)
    found = problem.run(mhla_attention, backend="triton")
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][:, [0, 1, 26, 27, 28]].any()


def test_compile_in_one_graph_forward_and_backward():
    problem = on_device(make((4, 6), (2, 2), (2, 3), "alone", batch=1, rotary=True, mask=True))

    def attend(**arguments):
        return mhla_attention(**arguments, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, found = problem.run(attend), problem.run(compiled)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_lists_from_the_keys_side():
    tiles, empty = per_sample((3, 2)), torch.empty(2, 35 + 14, 2, 8)
    offsets, keys = lists_with_extra(tiles, 2)
    call = ExactCall(empty, empty, empty, None, None, offsets, keys, (7, 5), (3, 2), 14)
    expected = torch.ones(2, 2, 8, 8, dtype=torch.bool)
    expected[:, :, :6, :6] = tiles.mask()
    lists = lists_of_queries(call)
    assert torch.equal(BlockLists((8,), 2, lists.offsets, lists.tiles).mask(), expected.mT)
    assert torch.equal(bitmap(call).view(2, 2, 8, 8).bool(), expected)


def test_opcheck():
    problem = on_device(make((6,), (3,), (0, 3), batch=1, mask=True))
    q, k, v, bias = (problem.tensors[x].requires_grad_() for x in ("query", "key", "value", "pooled_bias"))
    lists = lists_with_extra(problem.options["exact"], 2)
    mask = problem.options["key_mask"].float()
    torch.library.opcheck(exact.exact_tiles, (q, k, v, bias, mask, *lists, (6,), (3,), 3))
