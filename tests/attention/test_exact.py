"""Exact tiles with means and far field against the float64 reference, softmax attention and FlexAttention."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import BlockLists, mhla_attention
from mhla_diffusers.attention.call import Call
from mhla_diffusers.attention.exact import exact_attention
from mhla_diffusers.attention.tile_attention import tile_attention
from mhla_diffusers.attention.tile_scores import tiles_by_content
from mhla_diffusers.attention.tiles import tokens_of_tiles

from .problems import errors_against_reference, make_problem

# as in test_eager.py
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUMS = ("linear_weight", "pooled_bias", "output_norm")
"""Their gradients are sums over all tokens of products of both signs, of which rounded halves leave too little to hold
them to the bound of one rounding; float32 and float64 do."""


def random_tiles(counts, heads=2, share=0.3, at_least_one=False, seed=0):
    tiles = math.prod(counts)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, tiles, tiles, generator=generator) < share
    if at_least_one:
        mask |= torch.eye(tiles, dtype=torch.bool)
    return BlockLists.from_mask(counts, mask)


def make(grid, counts, *, means=True, far=True, share=0.3, blocks=None, head_dim=8, seed=0, **options):
    """A problem with exact tiles: the tensors of ``make_problem`` with λ, β and lists that are empty in places."""
    blocks = blocks or tuple(min(2, size) for size in grid)
    tiles = random_tiles(counts, share=share, at_least_one=not (means or far), seed=seed)
    problem = make_problem(grid, blocks, linear_branch=far, head_dim=head_dim, seed=seed, sparse=tiles, **options)
    if means:
        problem.tensors["pooled_bias"] = 0.3 * torch.randn(2, generator=torch.Generator().manual_seed(seed))
    return problem


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        if dtype.itemsize > 2 or name not in SUMS:
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


LAYOUTS = [((12,), (4,)), ((7, 9), (3, 4)), ((5, 6), (5, 6)), ((5, 7, 3), (2, 3, 2)), ((4, 4, 6), (1, 1, 1))]


@pytest.mark.parametrize(("grid", "counts"), LAYOUTS)
@pytest.mark.parametrize("parts", ["exact", "means", "far", "means and far"])
def test_parts_on_even_and_ragged_tiles(grid, counts, parts):
    check(make(grid, counts, means="means" in parts, far="far" in parts))


@pytest.mark.parametrize(("grid", "counts"), LAYOUTS[:4])
def test_tiles_by_content_written_out(grid, counts):
    """One query tile and key tile at a time: q · k̄ + ½ log Σ q² σ², without the head dim's scale in ``query``."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, math.prod(grid), 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    tokens, exists = tokens_of_tiles(grid, counts)
    members = [some[here] for some, here in zip(tokens, exists, strict=True)]
    expected = torch.zeros(2, 3, len(members), len(members), dtype=torch.bool)
    count = max(1, round(0.25 * len(members)))
    for sample, head, row in itertools.product(range(2), range(3), range(len(members))):
        mean_query = query[sample, members[row], head].mean(dim=0) / 8**0.5
        keys = [key[sample, some, head] for some in members]
        spreads = [(mean_query.square() @ some.var(dim=0, correction=0)).clamp_min(1e-37).log() / 2 for some in keys]
        scores = torch.stack([mean_query @ some.mean(dim=0) + s for some, s in zip(keys, spreads, strict=True)])
        expected[sample, head, row, scores.topk(count).indices] = True
    assert torch.equal(tiles_by_content(query, key, None, grid, counts, 0.25).mask(), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("extra", ["rotary", "mask", "norm", "gate", "per_head"])
def test_extras(dtype, extra):
    check(make((5, 7, 3), (2, 3, 2), **{extra: True}), dtype)


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 4)) for count in counts)
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask", "norm", "gate", "per_head", "means", "far")}
    # exact tiles alone may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= flags["means"]
    return make(grid, counts, share=draw(st.floats(0, 1)), seed=draw(st.integers(0, 99)), **flags)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    check(problem, torch.float64)


@pytest.mark.parametrize("rotary", [False, True])
def test_all_tiles_exact_is_softmax_attention(rotary):
    problem = make((5, 6), (2, 3), means=False, far=False, share=1.1, rotary=rotary)
    call = Call(**problem.tensors, grid=problem.grid, blocks=problem.blocks)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (call.query, call.key, call.value))
    )
    found = mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks, sparse=problem.options["exact"])
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_log_sum_agrees_with_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    problem = make((4, 6), (2, 3), means=False, far=False)
    tiles, tokens = problem.options["exact"], tokens_of_tiles((4, 6), (2, 3))[0]
    tile_of = torch.empty(24, dtype=torch.int64)
    tile_of[tokens] = torch.arange(6)[:, None]
    mask = tiles.mask()[0]

    def is_exact(batch, head, query, key):
        return mask[head, tile_of[query], tile_of[key]]

    shapes = create_block_mask(is_exact, None, 2, 24, 24, device="cpu")
    inputs = [problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value")]
    expected, aux = flex_attention(*inputs, block_mask=shapes, return_aux=AuxRequest(lse=True))
    output, log_sum = exact_attention(Call(**problem.tensors, grid=(4, 6), blocks=(2, 2)), tiles)
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_sum.squeeze(-1), aux.lse.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_weights_sum_to_one_and_large_logits_stay_finite():
    problem = make((7, 9), (3, 4))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    for scale in (1, 300):
        scaled = tensors | {"query": scale * tensors["query"]}
        found = mhla_attention(**scaled, grid=problem.grid, blocks=problem.blocks, **problem.options)
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)


def test_autocast_lowers_neither_the_sums_nor_the_gradients():
    """Attention transfer calls backward() in the middle of a forward, where autocast is on."""
    problem = make((5, 6), (2, 3), far=False)
    plain = problem.run(mhla_attention)
    with torch.autocast("cpu", torch.bfloat16):
        cast = problem.run(mhla_attention)
    for name, expected in plain.items():
        assert torch.equal(cast[name], expected), name


@pytest.mark.parametrize(("means", "samples"), [(False, 1), (True, 1), (True, 2)])
def test_flops_are_counted_from_the_lists(means, samples):
    """Two samples, three heads, four tiles of five tokens, head dim 8; 17 of 48 pairs of tiles, or of 96."""
    mask = torch.zeros(samples, 3, 4, 4, dtype=torch.bool)
    mask.flatten()[: 17 * samples] = True
    tiles = BlockLists.from_mask((4,), mask)
    query, key, value = (torch.randn(2, 3, 4, 5, 8, requires_grad=True) for _ in range(3))
    given = (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), torch.zeros(1, 3, 4)) if means else (None,) * 3
    with FlopCounterMode(display=False) as counter:
        output, _ = tile_attention(query, key, value, torch.zeros(1, 4, 5), *given, tiles.offsets, tiles.keys)
    pairs = 2 * 17 * 5 * 5 + (2 * 3 * 4 * 5 * 4 if means else 0)
    assert counter.get_total_flops() == 2 * 2 * 8 * pairs, "two products"
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * 8 * pairs, "five products"


def test_masked_samples_attend_to_nothing_without_nan():
    problem = make((6, 4), (3, 2), mask=True)
    problem.options["key_mask"] = torch.zeros(2, 24, dtype=torch.bool)
    assert all(x.isfinite().all() for x in problem.run(mhla_attention, torch.float32).values())


def test_lists_and_masks_are_the_same_thing():
    mask = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    tiles = BlockLists.from_mask((2, 3), mask)
    assert torch.equal(tiles.mask(), mask[None])
    assert tiles.heads == 3
    assert tiles.share == pytest.approx(float(mask.float().mean()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparse": BlockLists.from_mask((9, 1), torch.ones(2, 9, 9))}, "height axis .* 4 tokens, too few for 9"),
        ({"sparse": BlockLists.from_mask((2, 2), torch.ones(3, 4, 4))}, "lists for 3 heads, but query has 2"),
        ({"sparse": BlockLists.from_mask((2, 2), torch.zeros(2, 4, 4))}, "attend to nothing; give linear_weight"),
        ({"sparse": None, "pooled_bias": torch.zeros(2)}, "pooled_bias weighs .*give exact"),
        ({"sparse": None, "linear_weight": torch.ones(2)}, "linear_weight weighs .*give exact"),
        ({"sparse": BlockLists.from_mask((2, 2), torch.ones(3, 2, 4, 4))}, "lists for 3 samples, but query has 2"),
        ({"pooled_bias": torch.zeros(3)}, r"pooled_bias must have shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    problem = make((4, 6), (2, 2), means=False, far=False)
    arguments = {**problem.tensors, "grid": problem.grid, "blocks": problem.blocks, **problem.options, **change}
    with pytest.raises(ValueError, match=words):
        mhla_attention(**arguments)


def test_lists_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"mask must be \(H, 4, 4\) or"):
        BlockLists.from_mask((2, 2), torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match=r"keys must be from 0 to 3"):
        BlockLists((2, 2), 1, torch.tensor([0, 1, 1, 1, 1]), torch.tensor([4]))
    with pytest.raises(ValueError, match="from 0 to 2, the number of pairs; they go from 0 to 1"):
        BlockLists((2, 2), 1, torch.tensor([0, 1, 1, 1, 1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="4 lists do not fit 3 heads with 4 query tiles"):
        BlockLists((2, 2), 3, torch.tensor([0, 1, 1, 1, 1]), torch.tensor([0]))
