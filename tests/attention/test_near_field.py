"""Softmax attention inside a block, MHLA across blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.blocks import block_index
from mhla_diffusers.attention.reference import reference_weights

from .problems import (
    GRIDS,
    call_of,
    errors_against_reference,
    make_problem,
    reference,
    relative_error,
    softmax_attention,
)

# float32 sums of exponentials; what is seen is below 1e-6
FLOAT32_TOLERANCE = 5e-6
# the softmax over the block rounds its output once, the sum with the far field once more
HALF_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.mark.parametrize(("grid", "blocks"), GRIDS)
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"rotary": True, "rope": "before", "feature_map": "elu+1"}])
def test_float32_agrees_with_the_reference(grid, blocks, options):
    errors = errors_against_reference(make_problem(grid, blocks, near_field=True, **options), torch.float32, "eager")
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotary", [False, True])
def test_half_precision_output(dtype, rotary):
    problem = make_problem((6, 8, 5), (2, 2, 2), head_dim=32, rotary=rotary, near_field=True)
    error = errors_against_reference(problem, dtype, "eager")["output"]
    assert error <= HALF_TOLERANCE[dtype]


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 4)) for count in blocks)
    flags = ("rotary", "mask", "norm", "gate", "per_head")
    return make_problem(
        grid,
        blocks,
        head_dim=2 * draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 2**16)),
        near_field=True,
        feature_map=draw(st.sampled_from(["relu", "elu+1", "softmax"])),
        **{name: draw(st.booleans()) for name in flags},
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_drawn_problems_in_float64(problem):
    found = problem.run(mhla_attention, torch.float64, backend="eager")
    expected = problem.run(reference, torch.float64)
    for name, tensor in found.items():
        assert relative_error(tensor, expected[name]) <= 1e-9, name


@pytest.mark.parametrize("rotary", [False, True])
def test_one_block_is_softmax_attention(rotary):
    problem = make_problem((4, 5, 3), (1, 1, 1), near_field=True, rotary=rotary, head_dim=16)
    found = problem.run(mhla_attention, torch.float64)

    expected = problem.run(softmax_attention, torch.float64)
    for name in ("output", "query", "key", "value"):
        assert relative_error(found[name], expected[name]) <= 1e-12


def test_small_far_field_weight_is_attention_within_blocks():
    problem = make_problem((8, 6), (2, 3), near_field=True)
    tensors = problem.tensors | {"far_field_weight": torch.full((2,), 1e-30)}
    found = mhla_attention(**tensors, grid=problem.grid, blocks=problem.blocks)

    def in_blocks(x):
        return x.view(2, 2, 4, 3, 2, 2, 8).permute(0, 5, 1, 3, 2, 4, 6).reshape(2, 2, 6, 8, 8)

    q, k, v = (in_blocks(problem.tensors[name]) for name in ("query", "key", "value"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert relative_error(in_blocks(found), expected) <= 1e-6


def test_blocks_that_mix_nothing_are_attention_within_blocks_and_learn():
    """The identity as mixing matrix: the far field is 0 / 0."""
    query, key, value = (torch.randn(1, 24, 2, 16) for _ in range(3))
    mixing = torch.eye(6, requires_grad=True)
    output = mhla_attention(query, key, value, mixing, (4, 6), (2, 3), far_field_weight=torch.ones(2))
    index = block_index((4, 6), (2, 3))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    same_block = index[:, None] == index[None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, same_block).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)  # rounding of float32
    (gradient,) = torch.autograd.grad(output.square().sum(), mixing)
    assert gradient.isfinite().all()
    assert gradient[0, 1] != 0


def test_weights_sum_to_one():
    problem = make_problem((5, 7), (2, 3), near_field=True)
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    output = mhla_attention(**tensors, grid=problem.grid, blocks=problem.blocks)
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0, atol=2e-6)
    weights = reference_weights(call_of(**problem.tensors, grid=problem.grid, blocks=problem.blocks))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1], dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-3, 30.0, 200.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_and_small_logits_are_safe(scale, sign):
    problem = make_problem((6, 6), (2, 2), near_field=True)
    tensors = dict(problem.tensors)
    tensors["query"] = scale * tensors["query"].abs()
    tensors["key"] = sign * tensors["key"].abs()
    found = mhla_attention(**tensors, grid=problem.grid, blocks=problem.blocks)
    expected = reference(**tensors, grid=problem.grid, blocks=problem.blocks)
    assert found.isfinite().all()
    # a logit of some hundreds has a rounding error of 1e-5 in float32, which the exponential passes on
    assert relative_error(found, expected) <= 1e-4


def test_memory_stays_linear():
    """Peak of the largest single tensor: no N x N weights, only blocks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    problem = make_problem((32, 32), (8, 8), batch=1, near_field=True, head_dim=8)
    with Largest() as largest:
        mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks)
    padded = 1024 * 2 * 16 * (17 / 16)
    assert largest.elements <= padded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize": False}, "needs normalize=True"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"far_field_weight": torch.ones(3)}, r"shape \(2,\), got \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    problem = make_problem((4, 4), (2, 2), near_field=True)
    arguments = {**problem.tensors, **change}
    with pytest.raises(ValueError, match=message):
        mhla_attention(**arguments, grid=problem.grid, blocks=problem.blocks)


def test_more_blocks_than_one_token_each():
    """Every token is its own near field: the far field does the rest."""
    problem = make_problem((3, 4), (3, 4), near_field=True)
    assert math.prod(problem.blocks) == problem.tensors["query"].shape[1]
    errors = errors_against_reference(problem, torch.float32, "eager")
    assert max(errors.values()) <= FLOAT32_TOLERANCE
