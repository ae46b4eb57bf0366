"""Extra tokens: the eager backend against the float64 reference and softmax attention; what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, mhla_attention, reference_attention, reference_weights
from mhla_diffusers.attention.tile_scores import tiles_by_content
from mhla_diffusers.attention.tiles import lists_with_extra, mask_of_lists, tokens_of_tiles

from .problems import call_of, errors_against_reference, make_problem
from .test_exact import SUMS, TOLERANCE, random_tiles
from .test_exact import make as make_with_tiles

PARTS = ["alone", "exact", "means", "far", "means and far"]
SIDES = [(3, 0), (0, 5), (2, 4), (0, 1), (20, 30)]
"""The last are more than a tile, of LAYOUTS at most 12 tokens, holds."""
LAYOUTS = [((12,), (4,)), ((7, 9), (3, 4)), ((5, 7, 3), (2, 3, 2)), ((4, 3), (1, 1))]


def make(grid, counts, extra, parts="means and far", **options):
    """A problem with extra tokens, "alone" without exact tiles, λ and β."""
    if parts == "alone":
        return make_problem(grid, tuple(min(2, size) for size in grid), extra=extra, **options)
    return make_with_tiles(grid, counts, means="means" in parts, far="far" in parts, extra=extra, **options)


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        if dtype.itemsize > 2 or name not in SUMS:
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def attend(problem, **changes):
    return mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks, **problem.options | changes)


@pytest.mark.parametrize(("grid", "counts"), LAYOUTS)
@pytest.mark.parametrize("parts", PARTS)
def test_parts_on_even_and_ragged_tiles(grid, counts, parts):
    for extra in ((2, 3), (0, 14)):
        check(make(grid, counts, extra, parts))


@pytest.mark.parametrize("extra", SIDES)
@pytest.mark.parametrize("parts", ["alone", "means and far"])
def test_before_and_after(extra, parts):
    check(make((5, 6), (2, 3), extra, parts, rotary=True, mask=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("extra", ["rotary", "mask", "norm", "gate", "per_head", "linear_branch"])
def test_extras(dtype, extra):
    parts = "alone" if extra == "linear_branch" else "means and far"
    check(make((5, 7, 3), (2, 3, 2), (2, 3), parts, **{extra: True}), dtype)


@pytest.mark.parametrize("rope", ["after", "before"])
@pytest.mark.parametrize(("grid", "axes"), [((5, 7), (6, 2)), ((3, 5, 4), (4, 2, 2))])
def test_rope_of_axes(grid, axes, rope):
    check(make(grid, (2,) * len(grid), (3, 4), rotary_axes=axes, rope=rope))


def test_rope_of_every_sample():
    problem = make((5, 7), (2, 2), (3, 4), rotary=True)
    problem.options["rotary"] = tuple(torch.cat([x, x.flip(1)]) for x in problem.options["rotary"])
    check(problem)


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 4)) for count in counts)
    extra = draw(st.sampled_from([(1, 0), (0, 1), (2, 3), (0, 11), (40, 1)]))
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask", "norm", "gate", "per_head")}
    parts = draw(st.sampled_from(PARTS))
    # exact tiles and extra tokens may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= parts != "exact"
    more = {} if parts == "alone" else {"share": draw(st.floats(0, 1))}
    return make(grid, counts, extra, parts, seed=draw(st.integers(0, 99)), **flags, **more)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    check(problem, torch.float64)


@pytest.mark.parametrize("masked", [False, True])
def test_all_tiles_exact_is_softmax_attention_over_all_tokens(masked):
    problem = make((5, 6), (2, 3), (3, 4), "exact", share=1.1, mask=masked)
    query, key, value = (problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
    mask = problem.options["key_mask"][:, None, None] if masked else None
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(attend(problem), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", PARTS)
def test_queries_outside_the_grid_attend_as_softmax_attention_does(parts):
    """Whatever the others attend to; norm and gate are not theirs."""
    problem = make((5, 6), (2, 3), (3, 4), parts, norm=True, gate=True)
    query, key, value = (problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    found = attend(problem)
    for place in (slice(0, 3), slice(33, 37)):
        torch.testing.assert_close(found[:, place], expected[:, place], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", ["alone", "means and far"])
def test_where_in_the_sequence_they_stand_changes_nothing_else(parts):
    problem = make((5, 6), (2, 3), (3, 4), parts, rotary=True, mask=True)
    found = attend(problem)
    order = [*range(3, 33), *range(3), *range(33, 37)]
    moved = {name: x[:, order] if x.ndim == 4 else x for name, x in problem.tensors.items()}
    tables = tuple(x[:, order] for x in problem.options["rotary"])
    options = {"extra": (0, 7), "rotary": tables, "key_mask": problem.options["key_mask"][:, order]}
    again = mhla_attention(**moved, grid=(5, 6), blocks=problem.blocks, **problem.options | options)
    assert torch.equal(again, found[:, order])


@pytest.mark.parametrize("parts", ["alone", "means and far"])
def test_masked_tokens_are_as_good_as_absent(parts):
    """As padded text is; its own outputs are finite, and nobody's input."""
    problem = make((5, 6), (2, 3), (2, 9), parts)
    keep = torch.ones(2, 41, dtype=torch.bool)
    keep[:, 36:] = False
    padded = attend(problem, key_mask=keep)
    shorter = {name: x[:, :36] if x.ndim == 4 else x for name, x in problem.tensors.items()}
    found = mhla_attention(**shorter, grid=(5, 6), blocks=problem.blocks, **problem.options | {"extra": (2, 4)})
    torch.testing.assert_close(padded[:, :36], found, rtol=1e-5, atol=1e-6)
    assert padded.isfinite().all()


def test_lists_of_every_sample_chosen_by_content():
    problem = make((7, 5), (3, 2), (2, 3))
    query, key = (problem.tensors[name][:, 2:37] for name in ("query", "key"))
    problem.options["exact"] = tiles_by_content(query, key, None, (7, 5), (3, 2), 0.3)
    assert problem.options["exact"].samples == 2
    check(problem)


def test_the_linear_branch_alone_remains_where_all_else_is_masked():
    problem = make((5, 6), (2, 3), (2, 4), "alone", linear_branch=True)
    keep = torch.ones(2, 36, dtype=torch.bool)
    keep[0, [0, 1, *range(32, 36)]] = False
    problem.options["key_mask"] = keep
    check(problem)
    query, key, value, mixing, _ = problem.tensors.values()
    on_grid = (x[:1, 2:32] for x in (query, key, value))
    alone = mhla_attention(*on_grid, mixing, (5, 6), problem.blocks)
    torch.testing.assert_close(attend(problem)[:1, 2:32], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", PARTS)
def test_masked_samples_attend_to_nothing_without_nan(parts):
    problem = make((6, 4), (3, 2), (2, 3), parts)
    problem.options["key_mask"] = torch.zeros(2, 29, dtype=torch.bool)
    found = problem.run(mhla_attention)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][:, [0, 1, 26, 27, 28]].any()


def test_large_logits_stay_finite_and_weights_sum_to_one():
    problem = make((7, 9), (3, 4), (3, 4))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    found = mhla_attention(**tensors, grid=(7, 9), blocks=problem.blocks, **problem.options)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", ["alone", "means and far"])
def test_reference_weights_are_of_the_sequence(parts):
    problem = make((5, 6), (2, 3), (3, 4), parts, mask=True)
    call = call_of(**problem.tensors, grid=problem.grid, blocks=problem.blocks, **problem.options)
    weights, value = reference_weights(call), problem.tensors["value"].double()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 37, dtype=torch.float64))
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, value), reference_attention(call))
    assert not weights.transpose(0, 1)[:, ~problem.options["key_mask"][:, None, :].expand(-1, 37, -1)].gt(1e-9).any()


@pytest.mark.parametrize("samples", [1, 2])
def test_lists_with_tokens_outside(samples):
    mask = torch.stack([random_tiles((2, 3), heads=3, seed=seed).mask()[0] for seed in range(samples)])
    mask[:, 1] = False
    tiles = BlockLists.from_mask((2, 3), mask)
    offsets, keys = lists_with_extra(tiles, 2)
    expected = torch.ones(samples, 3, 8, 8, dtype=torch.bool)
    expected[:, :, :6, :6] = mask
    assert len(keys) == expected.sum()
    assert torch.equal(mask_of_lists(offsets, keys, 8).view_as(expected), expected)
    rows = [keys[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
    assert all(bool((row.diff() > 0).all()) for row in rows), "ascending"


def test_lists_wait_for_no_device():
    """Reading a value on the meta device is an error."""
    tiles = random_tiles((2, 3))
    on_meta = BlockLists(tiles.counts, tiles.heads, tiles.offsets.to("meta"), tiles.keys.to("meta"))
    found, expected = lists_with_extra(on_meta, 2), lists_with_extra(tiles, 2)
    assert [x.shape for x in found] == [x.shape for x in expected]


@pytest.mark.parametrize("extra", [1, 4, 5, 12, 13])
def test_every_token_stands_in_one_tile(extra):
    """Tiles of at most 4 tokens."""
    tokens, exists = tokens_of_tiles((3, 5), (2, 3), extra)
    assert tokens.shape == (6 + math.ceil(extra / 4), 4)
    assert sorted(tokens[exists].tolist()) == list(range(15 + extra))


@pytest.mark.parametrize("parts", ["alone", "means and far"])
def test_compile_in_one_graph(parts):
    """For one length of text, and for another, which makes a graph for all."""

    def attend_to(tensors, lists, options):
        exact = BlockLists((2, 2), 2, *lists) if lists else None
        return mhla_attention(**tensors, grid=(4, 6), blocks=(2, 2), sparse=exact, **options) * 2

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for after in (3, 5, 6):
        problem = make((4, 6), (2, 2), (0, after), parts, mask=True)
        tiles, options = problem.options.pop("exact", None), problem.options
        given = problem.tensors, (tiles.offsets, tiles.keys) if tiles else (), options
        torch.testing.assert_close(compiled(*given), attend_to(*given))


def test_autocast_does_not_lower_the_accumulation():
    problem = make((5, 6), (2, 3), (3, 4), rotary=True)
    plain = attend(problem)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(problem), plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": (3,)}, r"extra=\(3,\) must be two counts, how many tokens stand before and after"),
        ({"extra": 7}, "extra=7 must be two counts"),
        ({"extra": (-1, 8)}, r"extra=\(-1, 8\) must be two counts"),
        ({"extra": (3.0, 4)}, r"extra=\(3.0, 4\) must be two counts"),
        ({"extra": (3, 5)}, r"3 tokens before the grid \+ 24 of the grid \(4, 6\) \+ 5 after it are 32, .* N=31"),
        ({"extra": (0, 0)}, r"\(4, 6\) holds 24 tokens, but query has N=31; .*extra=\(before, after\)"),
        ({"normalize": False}, "Extra tokens share one denominator.*normalize=True"),
        ({"eps": 0.0}, "eps=0.0 lets a query of the relu feature map have no far field"),
        ({"output_gate": torch.ones(2, 31, 2, 8)}, r"output_gate must have shape \(2, 24, 2, 8\), got \(2, 31, 2, 8\)"),
        ({"key_mask": torch.ones(2, 24)}, r"key_mask must have shape \(2, 31\), got \(2, 24\)"),
        (
            {"rotary": (torch.ones(1, 24, 1, 8),) * 2},
            r"rotary tables must be \(1 or 2, 31, 1, 8\), got \(1, 24, 1, 8\)",
        ),
        ({"pooled_bias": torch.zeros(2)}, "pooled_bias weighs .*give exact"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        attend(make((4, 6), (2, 2), (3, 4), "alone"), **change)


def test_empty_tensors_give_empty_tensors():
    x = torch.empty(0, 31, 2, 8)
    assert mhla_attention(x, x, x, torch.rand(3, 3), (24,), (3,), extra=(3, 4)).shape == x.shape
