"""The exact tiles' Triton kernels against the float64 reference: output, log of the sum of weights, every gradient.

The interpreter takes about a second for every few tiles of a head, so the problems are small.
"""

import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mhla_diffusers.attention.exact import exact_attention
from mhla_diffusers.attention.triton.exact import triton_exact_attention
from mhla_diffusers.attention.triton.exact_lists import ExactCall, bitmap, lists_of_queries

from mhla_diffusers.attention import BlockLists, Call, mhla_attention
from mhla_diffusers.attention.triton import backend, exact

from ..problems import Problem, call_of, errors_against_reference, make_problem, relative_error
from ..test_exact import LAYOUTS, SUMS, TOLERANCE, make, random_tiles
from .test_kernels import (
    DEVICE,
    EVERYTHING,
    HALF_TO_EAGER,
    channels_not_last,
    every_other_token_and_not_aligned,
    expanded,
    fused_projection,
)

pytestmark = pytest.mark.gpu


def on_device(problem):
    def move(x):
        if isinstance(x, BlockLists):
            return dataclasses.replace(x, offsets=x.offsets.to(DEVICE), keys=x.keys.to(DEVICE))
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return x.to(DEVICE) if isinstance(x, torch.Tensor) else x

    tensors, options = ({name: move(x) for name, x in d.items()} for d in (problem.tensors, problem.options))
    return Problem(tensors, problem.grid, problem.blocks, options)


def check(problem, dtype=torch.float32):
    """Held to the eager backend's bounds, in half precision to HALF_TO_EAGER of them, as all kernels are.

    The kernels multiply in the type of the input, as softmax attention on tensor cores does: they round queries and
    keys after RoPE, means, weights and gradients of logits, where the eager backend rounds what it returns alone.
    """
    allowed = TOLERANCE[dtype] * (1 if dtype == torch.float32 else HALF_TO_EAGER)
    for name, error in errors_against_reference(on_device(problem), dtype, "triton").items():
        if dtype == torch.float32 or name not in SUMS:
            assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(("grid", "counts"), LAYOUTS)
@pytest.mark.parametrize("parts", ["exact", "means and far"])
def test_even_and_ragged_tiles(grid, counts, parts):
    check(make(grid, counts, means="means" in parts, far="far" in parts, batch=1))


@pytest.mark.parametrize("parts", ["exact", "means", "far"])
def test_parts(parts):
    check(make((5, 7), (2, 3), means="means" in parts, far="far" in parts))


@pytest.mark.parametrize("extra", EVERYTHING)
def test_extras(extra):
    check(make((5, 7), (2, 2), batch=1 + (extra == "mask"), **{extra: True}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_everything_at_once(dtype):
    check(make((5, 7), (2, 2), head_dim=32, **EVERYTHING), dtype)


@pytest.mark.parametrize("head_dim", [1, 5, 72, 256])
def test_head_dims(head_dim):
    check(make((9,), (3,), head_dim=head_dim, rotary=head_dim % 2 == 0, batch=1))


@pytest.mark.parametrize("head_dim", [40, 72])
def test_padded_head_dims_in_bfloat16(head_dim):
    check(make((5, 6), (2, 2), head_dim=head_dim, rotary=True), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_75_tokens(dtype):
    """Wan's tiles of 3 x 5 x 5 tokens and D = 128: several programs for a tile, the last one mostly empty."""
    check(make((6, 5, 10), (2, 1, 2), head_dim=128, share=0.4, batch=1, rotary=True), dtype)


@pytest.mark.parametrize(("grid", "axes"), [((5, 7), (6, 2)), ((3, 5, 4), (4, 2, 2))])
def test_rope_of_axes(grid, axes):
    check(make(grid, (2,) * len(grid), rotary_axes=axes, batch=1))


def test_rope_of_every_sample():
    problem = make((5, 7), (2, 2), rotary=True)
    cos, sin = problem.options["rotary"]
    problem.options["rotary"] = tuple(torch.cat([x, x.flip(1)]) for x in (cos, sin))
    check(problem)


def per_sample(counts, heads=2, samples=2):
    lists = [random_tiles(counts, heads=heads, seed=seed).mask() for seed in range(samples)]
    return BlockLists.from_mask(counts, torch.cat(lists))


@pytest.mark.parametrize("means", [False, True])
def test_lists_of_every_sample(means):
    problem = make((7, 5), (3, 2), means=means)
    problem.options["exact"] = per_sample((3, 2))
    check(problem)


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_none_and_all_exact(share):
    check(make((5, 6), (2, 3), share=share, mask=True))


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(1, 2), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 3)) for count in counts)
    flags = {name: draw(st.booleans()) for name in (*EVERYTHING, "means", "far")}
    # exact tiles alone may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= flags["means"]
    head_dim = 2 * draw(st.integers(1, 20))
    share, seed = draw(st.floats(0, 1)), draw(st.integers(0, 99))
    return make(grid, counts, share=share, seed=seed, head_dim=head_dim, batch=1, **flags)


# A drawn output norm may stand over a nearly zero output, where float32 itself passes the bound: the eager backend's
# error is the measure there, as in test_kernels.
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    problem = on_device(problem)
    eager = errors_against_reference(problem, torch.float32, "eager")
    for name, error in errors_against_reference(problem, torch.float32, "triton").items():
        allowed = max(TOLERANCE[torch.float32], HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def both_outputs(problem, attend, dtype, direction):
    """Output, log of the sum of weights and the gradients of a sum over both."""
    tensors = {name: x.detach().to(dtype).clone().requires_grad_() for name, x in problem.tensors.items()}
    options = {name: x for name, x in problem.options.items() if name != "exact"}
    call = call_of(**tensors, grid=problem.grid, blocks=problem.blocks, **options)
    output, log_sum = attend(call, problem.options["exact"])
    which = {"output": (output,), "log sum": (log_sum,), "both": (output, log_sum)}[direction]
    sum((x.double() * torch.linspace(-1, 1, x.numel(), device=DEVICE).view_as(x)).sum() for x in which).backward()
    return [output.detach(), log_sum.detach(), *(tensors[x].grad for x in ("query", "key", "value", "pooled_bias"))]


@pytest.mark.parametrize("direction", ["output", "log sum", "both"])
def test_gradients_through_output_and_log_sum(direction):
    problem = on_device(make((7, 5), (3, 2), far=False, rotary=True, mask=True))
    found = both_outputs(problem, triton_exact_attention, torch.float32, direction)
    expected = both_outputs(problem, exact_attention, torch.float64, direction)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert found[1].shape == (2, 35, 2, 1)
    for tensor, truth in zip(found, expected, strict=True):
        if tensor is None:  # the value has no part in the log sum
            assert truth is None or not truth.any()
            continue
        truth = torch.zeros_like(tensor) if truth is None else truth
        assert relative_error(tensor, truth) <= TOLERANCE[torch.float32]


def test_a_query_that_attends_to_nothing():
    tensors = on_device(make_problem((8,), (2,))).tensors
    tiles = on_device(Problem({}, (8,), (2,), {"sparse": BlockLists.from_mask((2,), torch.zeros(2, 2, 2))})).options
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, log_sum = triton_exact_attention(Call(**leaves, grid=(8,), blocks=(2,)), tiles["exact"])
    (output.sum() + log_sum.sum()).backward()
    assert not output.any() and (log_sum == torch.finfo(torch.float32).min).all()
    assert not any(leaves[name].grad.any() for name in ("query", "key", "value"))


def test_masked_samples_attend_to_nothing_without_nan():
    problem = on_device(make((6, 4), (3, 2), mask=True))
    problem.options["key_mask"] = torch.zeros(2, 24, dtype=torch.bool, device=DEVICE)
    assert all(x.isfinite().all() for x in problem.run(mhla_attention, backend="triton").values())


def test_weights_of_the_key_mask_count():
    """A mask may hold weights: the number of tokens of a mean is their sum."""
    problem = make((6, 4), (3, 2))
    problem.options["key_mask"] = torch.rand(2, 24, generator=torch.Generator().manual_seed(0))
    check(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_stay_finite(dtype):
    problem = on_device(make((7, 9), (3, 2)))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    found = mhla_attention(**tensors, grid=(7, 9), blocks=problem.blocks, **problem.options, backend="triton")
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)


def test_the_same_bits_twice():
    problem = on_device(make((7, 5), (3, 2), rotary=True, batch=1))
    call = functools.partial(mhla_attention, backend="triton")
    first, second = problem.run(call, torch.bfloat16), problem.run(call, torch.bfloat16)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("strided", [fused_projection, channels_not_last, expanded, every_other_token_and_not_aligned])
def test_strides(strided):
    torch.manual_seed(0)
    query, key, value = (x.to(DEVICE) for x in strided(2, 24, 2, 8))
    problem = on_device(make((4, 6), (2, 1)))

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (query, key, value)]
        others = {name: x for name, x in problem.tensors.items() if name not in ("query", "key", "value")}
        output = mhla_attention(*leaves, **others, grid=(4, 6), blocks=(2, 2), **problem.options, backend="triton")
        output.sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)


def test_nan_is_not_hidden():
    """In a key it reaches every query, those that do not meet its tile through the mean."""
    problem = on_device(make((8,), (2,), far=False, batch=1))
    problem.tensors["key"][0, 6, 0, 3] = float("nan")
    found = mhla_attention(**problem.tensors, grid=(8,), blocks=(2,), **problem.options, backend="triton")
    assert found[0, :, 0].isnan().all() and not found[0, :, 1].isnan().any()


def test_lists_from_the_keys_side():
    tiles, empty = per_sample((3, 2)), torch.empty(2, 35, 2, 8)
    call = ExactCall(empty, empty, empty, None, None, tiles.offsets, tiles.keys, (7, 5), (3, 2))
    lists = lists_of_queries(call)
    assert torch.equal(BlockLists((3, 2), 2, lists.offsets, lists.tiles).mask(), tiles.mask().mT)
    assert torch.equal(bitmap(call).view(2, 2, 6, 6).bool(), tiles.mask())


def operator_arguments(everything):
    problem = on_device(make((6,), (3,), batch=1, mask=everything))
    q, k, v, bias = (problem.tensors[x].requires_grad_() for x in ("query", "key", "value", "pooled_bias"))
    tiles, mask = problem.options["exact"], problem.options.get("key_mask")
    more = (bias, mask.float()) if everything else (None, None)
    return q, k, v, *more, tiles.offsets, tiles.keys, (6,), (3,), 0


@pytest.mark.parametrize("everything", [False, True])
def test_opcheck(everything):
    arguments = operator_arguments(everything)
    torch.library.opcheck(exact.exact_tiles, arguments)
    arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    output, log_sum = exact.exact_tiles(*arguments)
    gradients = torch.randn_like(output), torch.randn_like(log_sum) if everything else None
    torch.library.opcheck(exact.exact_tiles_backward, (*gradients, output, log_sum, *arguments))


@pytest.mark.parametrize("axes", [None, (0, 4, 4)])
def test_opcheck_of_rope(axes):
    x = torch.randn(2, 12, 1, 8, device=DEVICE, requires_grad=True)
    table = torch.randn(1, 8 if axes else 12, 1, 8, device=DEVICE)
    torch.library.opcheck(exact.rotate, (x, table, (3, 4), axes, False))


def test_gradients_of_gradients_are_refused():
    arguments = operator_arguments(True)
    output, _ = exact.exact_tiles(*arguments)
    (gradient,) = torch.autograd.grad(output.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="eager"):
        gradient.sum().backward()


@pytest.mark.parametrize("parts", ["exact", "means and far"])
def test_compile_in_one_graph(parts):
    problem = on_device(make((4, 6), (2, 2), means="means" in parts, far="far" in parts, batch=1))

    def attend(tensors, offsets, keys):
        tiles = BlockLists((2, 2), 2, offsets, keys)
        return mhla_attention(**tensors, grid=(4, 6), blocks=(2, 2), sparse=tiles, backend="triton") * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    tiles, results = problem.options["exact"], []
    for function in (attend, compiled):
        leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
        output = function(leaves, tiles.offsets, tiles.keys)
        output.square().sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)])
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)


def test_normaliser_and_its_gradient():
    """MHLA's kernels give the normaliser too, which the merge differentiates."""
    problem = on_device(make_problem((5, 7), (2, 2), rotary=True, mask=True))

    def run(attend, dtype):
        leaves = {name: x.detach().to(dtype).clone().requires_grad_() for name, x in problem.tensors.items()}
        call = call_of(**leaves, grid=problem.grid, blocks=problem.blocks, **problem.options)
        call = dataclasses.replace(call, key_mask=call.key_mask.float())
        output, normaliser = attend(call)
        (output.double().square().sum() + normaliser.double().log().sum()).backward()
        return [output.detach(), normaliser.detach(), *(leaf.grad for leaf in leaves.values())]

    def with_normaliser(call):
        return backend.BESIDE_EXACT.read(call, backend.BESIDE_EXACT.summaries(call))

    from mhla_diffusers.attention.linear import linear_attention

    found, expected = run(with_normaliser, torch.float32), run(linear_attention, torch.float64)
    assert found[1].shape == (2, 35, 2, 1)
    for tensor, truth in zip(found, expected, strict=True):
        assert relative_error(tensor, truth) <= TOLERANCE[torch.float32]
