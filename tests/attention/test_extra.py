"""Extra tokens: the eager backend against the float64 reference and softmax attention; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, Call, mhla_attention, reference_attention, reference_weights

from .problems import make_problem
from .test_sparse import TOLERANCE, check
from .test_sparse import make as make_with_lists

PARTS = ["alone", "listed", "pooled", "linear", "pooled and linear"]
SIDES = [(3, 0), (0, 5), (2, 4), (0, 1), (20, 30)]
"""The last are more than a block holds."""
LAYOUTS = [((12,), 3), ((7, 9), 8), ((5, 7, 3), 16), ((4, 3), 16)]


def make(grid, size, extra, parts="pooled and linear", **options):
    """A problem with extra tokens, "alone" without lists, λ and β."""
    if parts == "alone":
        return make_problem(grid, tuple(min(2, size) for size in grid), extra=extra, **options)
    return make_with_lists(grid, size, pooled="pooled" in parts, linear="linear" in parts, extra=extra, **options)


def attend(problem, **changes):
    return mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks, **problem.options | changes)


@pytest.mark.parametrize(("grid", "size"), LAYOUTS)
@pytest.mark.parametrize("parts", PARTS)
def test_parts_on_even_and_ragged_blocks(grid, size, parts):
    for extra in ((2, 3), (0, 14)):
        check(make(grid, size, extra, parts))


@pytest.mark.parametrize("extra", SIDES)
@pytest.mark.parametrize("parts", ["alone", "pooled and linear"])
def test_before_and_after(extra, parts):
    check(make((5, 6), 6, extra, parts, rotary=True, mask=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("extra", ["rotary", "mask", "norm", "gate", "per_head", "linear_branch"])
def test_extras(dtype, extra):
    parts = "alone" if extra == "linear_branch" else "pooled and linear"
    check(make((5, 7, 3), 16, (2, 3), parts, **{extra: True}), dtype)


def test_rope_of_every_sample():
    problem = make((5, 7), 8, (3, 4), rotary=True)
    problem.options["rotary"] = tuple(torch.cat([x, x.flip(1)]) for x in problem.options["rotary"])
    check(problem)


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    extra = draw(st.sampled_from([(1, 0), (0, 1), (2, 3), (0, 11), (40, 1)]))
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask", "norm", "gate", "per_head")}
    parts = draw(st.sampled_from(PARTS))
    # listed blocks and extra tokens may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= parts != "listed"
    more = {} if parts == "alone" else {"density": draw(st.sampled_from([0.0, 0.2, 0.8]))}
    return make(grid, draw(st.integers(1, 12)), extra, parts, seed=draw(st.integers(0, 99)), **flags, **more)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    check(problem, torch.float64)


@pytest.mark.parametrize("parts", PARTS)
def test_extra_queries_attend_as_softmax_attention_does(parts):
    """Whatever the others attend to; norm and gate are not theirs."""
    problem = make((5, 6), 6, (3, 4), parts, norm=True, gate=True)
    query, key, value = (problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    found = attend(problem)
    for place in (slice(0, 3), slice(33, 37)):
        torch.testing.assert_close(found[:, place], expected[:, place], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", ["alone", "pooled and linear"])
def test_where_in_the_sequence_they_stand_changes_nothing_else(parts):
    problem = make((5, 6), 6, (3, 4), parts, rotary=True, mask=True)
    found = attend(problem)
    order = [*range(3, 33), *range(3), *range(33, 37)]
    moved = {name: x[:, order] if x.ndim == 4 else x for name, x in problem.tensors.items()}
    tables = tuple(x[:, order] for x in problem.options["rotary"])
    options = {"extra": (0, 7), "rotary": tables, "key_mask": problem.options["key_mask"][:, order]}
    again = mhla_attention(**moved, grid=(5, 6), blocks=problem.blocks, **problem.options | options)
    assert torch.equal(again, found[:, order])


@pytest.mark.parametrize("parts", ["alone", "pooled and linear"])
def test_masked_tokens_are_as_good_as_absent(parts):
    """As padded text is; its own outputs are finite, and nobody's input."""
    problem = make((5, 6), 6, (2, 9), parts)
    keep = torch.ones(2, 41, dtype=torch.bool)
    keep[:, 36:] = False
    padded = attend(problem, key_mask=keep)
    shorter = {name: x[:, :36] if x.ndim == 4 else x for name, x in problem.tensors.items()}
    found = mhla_attention(**shorter, grid=(5, 6), blocks=problem.blocks, **problem.options | {"extra": (2, 4)})
    torch.testing.assert_close(padded[:, :36], found, rtol=1e-5, atol=1e-6)
    assert padded.isfinite().all()


def test_lists_of_every_sample():
    problem = make((7, 5), 8, (2, 3))
    mask = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    problem.options["sparse"] = BlockLists.from_mask(8, mask)
    check(problem)


def test_the_linear_branch_alone_remains_where_all_else_is_masked():
    problem = make((5, 6), 6, (2, 4), "alone", linear_branch=True)
    keep = torch.ones(2, 36, dtype=torch.bool)
    keep[0, [0, 1, *range(32, 36)]] = False
    problem.options["key_mask"] = keep
    check(problem)
    query, key, value, mixing, _ = problem.tensors.values()
    on_grid = (x[:1, 2:32] for x in (query, key, value))
    alone = mhla_attention(*on_grid, mixing, (5, 6), problem.blocks)
    torch.testing.assert_close(attend(problem)[:1, 2:32], alone, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite_and_weights_sum_to_one():
    problem = make((7, 9), 8, (3, 4))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    found = mhla_attention(**tensors, grid=(7, 9), blocks=problem.blocks, **problem.options)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", ["alone", "pooled and linear"])
def test_reference_weights_are_of_the_sequence(parts):
    problem = make((5, 6), 6, (3, 4), parts, mask=True)
    call = Call(**problem.tensors, grid=problem.grid, blocks=problem.blocks, **problem.options)
    weights, value = reference_weights(call), problem.tensors["value"].double()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 37, dtype=torch.float64))
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, value), reference_attention(call))
    assert not weights.transpose(0, 1)[:, ~problem.options["key_mask"][:, None, :].expand(-1, 37, -1)].gt(1e-9).any()


@pytest.mark.parametrize("parts", ["alone", "pooled and linear"])
def test_compile_in_one_graph(parts):
    """For one length of text, and for another, which makes a graph for all."""

    def attend_to(tensors, lists, options):
        sparse = BlockLists(4, *lists) if lists else None
        return mhla_attention(**tensors, grid=(4, 6), blocks=(2, 2), sparse=sparse, **options) * 2

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for after in (3, 5, 6):
        problem = make((4, 6), 4, (0, after), parts, mask=True)
        lists, options = problem.options.pop("sparse", None), problem.options
        given = problem.tensors, (lists.keys, lists.pairs) if lists else (), options
        torch.testing.assert_close(compiled(*given), attend_to(*given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": (3,)}, r"extra=\(3,\)"),
        ({"extra": 7}, "extra=7"),
        ({"extra": (-1, 8)}, r"extra=\(-1, 8\)"),
        ({"extra": (3.0, 4)}, r"extra=\(3.0, 4\)"),
        ({"extra": (3, 5)}, r"3 .* 24 of the grid \(4, 6\) \+ 5 .* 32, .* N=31"),
        ({"extra": (0, 0)}, r"24 tokens, but query has N=31"),
        ({"normalize": False}, "normalize=True"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"output_gate": torch.ones(2, 31, 2, 8)}, r"output_gate .*\(2, 24, 2, 8\), got \(2, 31, 2, 8\)"),
        ({"key_mask": torch.ones(2, 24)}, r"key_mask .*\(2, 31\), got \(2, 24\)"),
        ({"rotary": (torch.ones(1, 24, 1, 8),) * 2}, r"2, 31, 1, 8\), got \(1, 24, 1, 8\)"),
        ({"pooled_bias": torch.zeros(2)}, "pooled_bias .*sparse"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        attend(make((4, 6), 4, (3, 4), "alone"), **change)
