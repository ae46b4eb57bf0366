"""The near field's Triton kernels against the float64 reference and PyTorch's softmax attention.

The interpreter takes about a second for every four blocks of a head, so the problems are small.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.near_field import without_own_block
from mhla_diffusers.attention.triton.near_field import operators
from mhla_diffusers.attention.triton.operators import flat

from ..problems import call_of, errors_against_reference, make_problem, reference, relative_error, softmax_attention
from .test_kernels import (
    DEVICE,
    EVERYTHING,
    FLOAT32_TOLERANCE,
    HALF_TO_EAGER,
    channels_not_last,
    check,
    fused_projection,
    on_device,
)

ONE_HEAD = {"batch": 1, "heads": 1, "near_field": True}


@pytest.mark.parametrize(
    ("grid", "blocks", "options"),
    [
        ((17,), (5,), {"rotary": True}),
        ((7, 9), (2, 2), {"rotary": True, "rope": "before", "feature_map": "elu+1"}),
        ((5, 4, 3), (1, 2, 1), {"feature_map": "softmax", "rotary": True}),
        ((2, 3), (2, 3), {}),  # every token is a block
        ((45,), (2,), {"mask": True, "head_dim": 72}),  # several tiles, the last one partly empty
    ],
)
def test_float32_agrees_with_the_reference(grid, blocks, options):
    check(make_problem(grid, blocks, **ONE_HEAD, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_everything_at_once(dtype):
    check(make_problem((5, 7), (2, 1), batch=2, head_dim=32, near_field=True, **EVERYTHING), dtype)


def test_several_tiles_in_bfloat16():
    problem = make_problem((5, 30), (1, 2), **ONE_HEAD, head_dim=32, rotary=True)
    # λ of one head has one number for a gradient, and whether the eager backend rounds that well is luck
    check(problem, torch.bfloat16, leave_out=["far_field_weight"])


@pytest.mark.parametrize("head_dim", [5, 256])
def test_head_dims(head_dim):
    check(make_problem((5, 4), (1, 2), **ONE_HEAD, head_dim=head_dim))


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(1, 2), min_size=axes, max_size=axes).filter(lambda b: math.prod(b) <= 4)))
    return make_problem(
        tuple(count + draw(st.integers(0, 4)) for count in blocks),
        blocks,
        heads=draw(st.integers(1, 2)),
        batch=1,
        head_dim=2 * draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**16)),
        near_field=True,
        rope=draw(st.sampled_from(["after", "before"])),
        feature_map=draw(st.sampled_from(["relu", "elu+1", "softmax"])),
        **{name: draw(st.booleans()) for name in EVERYTHING},
    )


# Where the bound of float32 or of one rounding is passed, the eager backend's error is the measure; see test_kernels.
@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_drawn_problems(problem, dtype):
    problem = on_device(problem)
    found = errors_against_reference(problem, dtype, "triton")
    eager = errors_against_reference(problem, dtype, "eager")
    for name, error in found.items():
        one_rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        allowed = max(FLOAT32_TOLERANCE, one_rounding, HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("rotary", [False, True])
def test_one_block_is_softmax_attention(rotary):
    problem = on_device(make_problem((4, 5, 2), (1, 1, 1), **ONE_HEAD, rotary=rotary, head_dim=16))
    found = problem.run(mhla_attention, backend="triton")

    expected = problem.run(softmax_attention, torch.float64)
    for name, tensor in found.items():
        assert relative_error(tensor, expected[name]) <= FLOAT32_TOLERANCE, name


@pytest.mark.parametrize(("scale", "sign"), [(200.0, 1), (200.0, -1), (1e-3, 1)])
def test_large_and_small_logits_are_safe(scale, sign):
    problem = make_problem((6, 4), (2, 1), **ONE_HEAD)
    problem.tensors["query"] = scale * problem.tensors["query"].abs()
    problem.tensors["key"] = sign * problem.tensors["key"].abs()
    problem = on_device(problem)
    found = problem.run(mhla_attention, backend="triton")
    expected = problem.run(reference, torch.float64)
    for name, tensor in found.items():
        # a logit of 1000 has a rounding error of 6e-5 in float32, which the exponential passes on
        assert relative_error(tensor, expected[name]) <= 3e-4, name


@pytest.mark.parametrize("mixing", [torch.eye(2), torch.tensor([[0.3, 0.7], [0.0, 0.5]])])
def test_a_block_that_sees_no_other(mixing):
    """Where a row of the mixing matrix is zero off the diagonal, what is left is attention within the block."""
    problem = make_problem((8,), (2,), **ONE_HEAD)
    problem.tensors["mixing"] = mixing
    check(problem)


@pytest.mark.parametrize("kept", ["own", "other"])
def test_a_masked_block(kept):
    """A query may have no key in its own block, or none in the others."""
    problem = make_problem((8,), (2,), **ONE_HEAD)
    problem.options["key_mask"] = torch.tensor([[True] * 4 + [False] * 4])
    problem = on_device(problem)
    found, expected = (
        attend(**problem.tensors, grid=(8,), blocks=(2,), **problem.options, **more)
        for attend, more in ((mhla_attention, {"backend": "triton"}), (reference, {}))
    )
    rows = slice(0, 4) if kept == "own" else slice(4, 8)
    assert relative_error(found[:, rows], expected[:, rows]) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("strided", [fused_projection, channels_not_last])
def test_strides(strided):
    torch.manual_seed(0)
    tensors = [x.to(DEVICE) for x in strided(1, 12, 2, 8)]
    mixing, weight = torch.rand(2, 2, device=DEVICE), torch.ones(2, device=DEVICE)

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in tensors]
        output = mhla_attention(*leaves, mixing, (4, 3), (2, 1), far_field_weight=weight, backend="triton")
        output.square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)


def test_nan_is_not_hidden():
    """In a key of one block it reaches every query: those of other blocks through the summary."""
    tensors = on_device(make_problem((12,), (2,), **ONE_HEAD)).tensors
    tensors["key"][0, 7, 0, 3] = float("nan")
    assert mhla_attention(**tensors, grid=(12,), blocks=(2,), backend="triton").isnan().all()


def test_no_attention_of_pytorch_is_used(monkeypatch):
    """Which would gather the blocks first."""
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    tensors = on_device(make_problem((4,), (2,), **ONE_HEAD)).tensors
    assert mhla_attention(**tensors, grid=(4,), blocks=(2,), backend="triton").isfinite().all()
    with pytest.raises(AttributeError, match="scaled_dot_product_attention"):
        mhla_attention(**tensors, grid=(4,), blocks=(2,), backend="eager")


def test_a_far_field_weight_on_another_device_is_refused():
    tensors = on_device(make_problem((4,), (2,), **ONE_HEAD)).tensors
    tensors["far_field_weight"] = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="far_field_weight is on meta"):
        mhla_attention(**tensors, grid=(4,), blocks=(2,), backend="triton")


def operator_arguments(blocks, everything):
    problem = on_device(make_problem((6,), blocks, **ONE_HEAD, rotary=everything, mask=everything))
    tensors = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    tensors["mixing"] = without_own_block(tensors["mixing"]).detach().requires_grad_()
    call = call_of(**tensors, grid=problem.grid, blocks=problem.blocks, **problem.options)
    return flat(dataclasses.replace(call, key_mask=call.key_mask.float() if everything else None))


@pytest.mark.parametrize(("blocks", "everything"), [((2,), True), ((1,), False)])
def test_opcheck(blocks, everything):
    arguments = operator_arguments(blocks, everything)
    torch.library.opcheck(operators.near_field_attention, arguments)
    arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    output, *saved = operators.near_field_attention(*arguments)
    torch.library.opcheck(
        operators.near_field_attention_backward, (torch.randn_like(output), output, *saved, *arguments)
    )


def test_compile_in_one_graph():
    def attend(query, key, value, mixing, weight):
        return mhla_attention(query, key, value, mixing, (6,), (2,), far_field_weight=weight, backend="triton") * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    tensors = on_device(make_problem((6,), (2,), **ONE_HEAD)).tensors
    results = []
    for function in (attend, compiled):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors.values()]
        output = function(*leaves)
        output.square().sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)
