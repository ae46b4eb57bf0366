"""Sparse attention: what it tends to, the lists, β and γ that a call finds, and PyTorch's kernel for CPUs."""

import math
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.attention import (
    SparseCall,
    attend,
    reference_attention,
    reference_weights,
    sparse_attention,
    with_lists,
)
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.rope import rotated
from mhla_diffusers.attention.sparse import BIASES, MOST_STATE_WEIGHT, fitting_rows, key_block_of_tokens

from .problems import attend_sparse, call_of, lists_of, make_sparse_problem
from .test_reference import check

BY_BACKEND = [("eager", torch.float64), pytest.param("triton", torch.float32, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("backend", "dtype"), BY_BACKEND)
def test_a_stretch_without_a_key_has_no_state(backend, dtype):
    """All keys of a stretch are masked; those of the others take part as before."""
    grid = (5, 7, 15)
    problem = make_sparse_problem(grid, 32, key_size=16, density=0.1, batch=1, heads=1, head_dim=16)
    mask = torch.ones(1, math.prod(grid))
    mask[:, layout_of(grid, 16).order[:256].long()] = 0
    problem.options["key_mask"] = mask
    check(problem, dtype, backend)


@pytest.mark.parametrize("options", [{}, {"mask": True, "rotary": True}, {"extra": (2, 3)}, {"far": "means"}], ids=str)
def test_what_a_call_finds_is_what_the_reference_attends_with(options):
    """Lists, β and γ of the call: output and gradients, which treat them as constants."""
    problem = make_sparse_problem((7, 9, 4), 16, key_size=4, density=0.2, constants=False, **options)
    tensors = {name: x.double() for name, x in problem.tensors.items()}
    found = replace(with_lists(call_of(**tensors, **problem.settings)), query=None, key=None, value=None)
    assert (found.state_weight is None) == (problem.options.get("far") == "means")
    problem.tensors = tensors

    def attend(**arguments):
        return reference_attention(replace(found, **{name: arguments[name] for name in tensors}))

    expected, own = problem.run(attend), problem.run(sparse_attention)
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sparse", ["lists", "rule"])
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"mask": True}, {"extra": (2, 3)}], ids=str)
def test_all_pairs_listed_is_softmax_attention(options, sparse):
    """Whatever β and γ are: nothing is left to them."""
    problem = make_sparse_problem(
        (5, 6), 4, density=1.1 if sparse == "lists" else 1.0, constants=sparse == "lists", **options
    )
    rotary, mask = problem.options.get("rotary"), problem.options.get("key_mask")
    query, key, value = (problem.tensors[name] for name in ("query", "key", "value"))
    if rotary is not None:
        query, key = (rotated(x, rotary) for x in (query, key))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=None if mask is None else mask[:, None, None]
    )
    torch.testing.assert_close(problem.attend(), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_a_rule_that_lists_everything_on_this_grid_is_softmax_attention():
    """Whatever its density: of one block, a list of at least one holds all."""
    problem = make_sparse_problem((4, 5), 64, constants=False)
    assert torch.equal(problem.attend(), problem.attend(density=1.0))


@pytest.mark.parametrize(
    ("values_differ", "orders"), [(True, {"means": 1, "second-order": 2}), (False, {"means": 2, "second-order": 3})]
)
def test_the_error_falls_with_the_distance_of_keys_from_their_mean(values_differ, orders):
    """The power is one higher for second order than for means, with two blocks of keys.

    If values differ within a block, its output is wrong; otherwise only its weight is. All queries are equal, so the
    mean query is exact; keys differ along one channel only, so they have no covariance.
    """
    make = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 1, 8, generator=make, dtype=torch.float64).expand(1, 16, 1, 8)
    centre, mean_value = torch.randn(2, 1, 2, 1, 1, 8, generator=make, dtype=torch.float64)
    apart, differences = torch.randn(2, 1, 2, 8, 1, 8, generator=make, dtype=torch.float64)
    apart[..., 1:] = 0
    value = (mean_value + differences * values_differ).flatten(1, 2)
    none = lists_of(torch.zeros(1, 2, 2), 8)
    one, errors = torch.ones(1, dtype=torch.float64), {far: [] for far in orders}
    for distance in (0.02, 0.01):
        key = (centre + distance * apart).flatten(1, 2)
        softmax = sparse_attention(query, key, value, (16,), density=1.0)
        for far, found in errors.items():
            weights = {"pooled_bias": 0 * one} | ({"state_weight": one} if far == "second-order" else {})
            tensors = {"query": query, "key": key, "value": value}
            output = attend(SparseCall(**tensors, grid=(16,), sparse=none, far=far, **weights))
            found.append(float((output - softmax).norm()))
    for far, order in orders.items():
        assert errors[far][0] / errors[far][1] == pytest.approx(2**order, rel=0.1)


GRID = (3, 5, 7)


def content_call(size, *, extra=0, mask=False, **rule):
    """A call that chooses its lists, in float64, of 2 samples and 2 heads of 8."""
    problem = make_sparse_problem(GRID, size, rotary=True, mask=mask, extra=(0, extra), constants=False)
    tensors = {name: x.double() for name, x in problem.tensors.items()} | {
        "query": 2 * problem.tensors["query"].double()
    }
    given = {name: problem.options[name] for name in ("rotary", "key_mask", "extra") if name in problem.options}
    if mask:
        given["key_mask"][0, layout_of(GRID, 8).order[:8].long()] = False
    return SparseCall(**tensors, grid=GRID, sparse=ContentRule(size, 0.3, **rule), **given)


@pytest.mark.parametrize("far", ["second-order", "means"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("size", "rule"), [(8, {"order": "curve"}), (8, {}), (8, {"key_block_size": 2})], ids=str)
def test_the_blocks_are_those_that_what_is_pooled_stands_for_worst(mask, size, rule, far):
    call = replace(content_call(size, mask=mask, **rule), far=far)
    lists, tokens = with_lists(call).sparse, math.prod(GRID)
    key_blocks = -(-tokens // call.sparse.key_block_size)
    query, key = (rotated(x, call.rotary).transpose(1, 2) for x in (call.query / 8**0.5, call.key))
    member = layout_of(GRID, size).rows.long() // size == torch.arange(-(-tokens // size))[:, None]
    mean_query = member.double() @ query / member.sum(dim=1, keepdim=True)
    weight = torch.ones(2, 1, tokens) if call.key_mask is None else call.key_mask[:, None].double()
    members = key_block_of_tokens(call, call.sparse).expand(2, 2, -1)
    weight = weight[:, :, None] * (members[:, :, None] == torch.arange(key_blocks)[:, None]).double()
    total = weight.sum(dim=-1, keepdim=True)
    mean = weight @ key / total
    variance = ((key[:, :, None] - mean[:, :, :, None]).square() * weight[..., None]).sum(dim=3) / total
    variance = mean_query.square() @ variance.mT
    scores = mean_query @ mean.mT + 0.5 * variance.log()
    if far == "second-order":
        limit = 2 * total.mT.clamp_min(2).log()
        scores += (limit * (limit + variance)).sqrt() - limit + variance.log()
    best = scores.nan_to_num(-math.inf).topk(round(0.3 * key_blocks), dim=-1).indices
    assert torch.equal(lists.keys, best.sort(dim=-1).values)


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": 5}], ids=["plain", "mask", "text"])
def test_the_fitted_weights_are_the_best(options):
    """By brute force: every β, with γ from 0 to 1.5 in steps, on the queries that they are fitted on."""
    call = content_call(8, key_block_size=4, **options)
    order = layout_of(GRID, 8).order
    some = order[order >= 0].long()[fitting_rows(math.prod(GRID), order.device)]
    softmax = reference_attention(replace(call, sparse=ContentRule(8, 1.0)))
    found = with_lists(call)

    def error(bias, weight):
        output = reference_attention(replace(found, pooled_bias=bias, state_weight=weight))
        return (output - softmax)[:, some].square().sum(dim=(1, 3))

    least = error(found.pooled_bias, found.state_weight)
    ones = torch.ones(2, 2, dtype=torch.float64)
    for bias in torch.linspace(*BIASES)[::3]:
        for weight in torch.linspace(0, MOST_STATE_WEIGHT, 7):
            assert (error(float(bias) * ones, float(weight) * ones) >= least - 1e-12).all()
    assert set(found.pooled_bias.flatten().tolist()) <= set(torch.linspace(*BIASES, dtype=torch.float64).tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": (2, 3)}], ids=str)
def test_without_gradients_a_cpu_has_a_kernel_of_its_own(options, density, dtype):
    problem = make_sparse_problem((7, 9, 4), 32, key_size=8, density=density, **options)
    tensors = {name: x.to(dtype) for name, x in problem.tensors.items()}
    with_gradients = attend_sparse(**{name: x.requires_grad_() for name, x in tensors.items()}, **problem.settings)
    with_gradients = with_gradients.detach()
    with torch.no_grad():
        found = attend_sparse(**tensors, **problem.settings)
    # sums of some 250 products in another order
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps * float(with_gradients.abs().max())}
    torch.testing.assert_close(found, with_gradients, **tolerance)


def test_reference_weights_are_of_the_sequence():
    problem = make_sparse_problem((5, 6), 6, key_size=2, extra=(3, 4), mask=True)
    call, value = call_of(**problem.tensors, **problem.settings), problem.tensors["value"].double()
    weights, expected = reference_weights(call), reference_attention(call)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 37, dtype=torch.float64))
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, value), expected)
    masked = ~problem.options["key_mask"][:, None, :].expand(-1, 37, -1)
    assert not weights.transpose(0, 1)[:, masked].abs().gt(1e-9).any()
