"""Sparse attention against the float64 reference: listed keys, means and states; lists, β and γ found at every call."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, SparseCall, reference_attention, sparse_attention, with_lists
from mhla_diffusers.attention.blocks import in_order
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.order import blocks_per_state, stretch_of
from mhla_diffusers.attention.rope import rotated
from mhla_diffusers.attention.sparse import (
    BIASES,
    MOST_STATE_WEIGHT,
    Pooled,
    attend_to_lists,
    attend_to_pooled,
    best_weights,
    fitting_rows,
    key_block_of_tokens,
    read_mixed,
    uniform_rows,
)

from .problems import call_of, errors_against_reference, make_sparse_problem, reference

# as in test_linear.py
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LAYOUTS = [((12,), 3, 3), ((7, 9), 8, 2), ((5, 6), 1, 1), ((5, 7, 3), 16, 4), ((4, 4, 6), 128, 128), ((8, 9), 8, 8)]
"""Grid and block sizes: even and ragged, single tokens, one block for all."""
LONG = (5, 7, 29)
"""1,015 tokens: with key blocks of 16, three stretches of 16 blocks and one of 15 and a half."""


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("order", ["content", "curve"])
@pytest.mark.parametrize(("grid", "size", "key_size"), LAYOUTS)
@pytest.mark.parametrize("far", ["first-order", "means"])
def test_parts_on_even_and_ragged_blocks(grid, size, key_size, far, order):
    check(make_sparse_problem(grid, size, key_size=key_size, order=order, far=far))


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": (2, 3)}], ids=["plain", "mask", "text"])
def test_a_stretch_that_the_end_of_the_sequence_cuts(options):
    check(make_sparse_problem(LONG, 32, key_size=16, density=0.1, rotary=True, **options), torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("option", ["rotary", "mask"])
def test_options(dtype, option):
    check(make_sparse_problem((5, 7, 3), 16, key_size=4, **{option: True}), dtype)


def test_a_stretch_without_a_key_has_no_state():
    """All keys of a stretch are masked; those of the others take part as before."""
    problem = make_sparse_problem(LONG, 32, key_size=16, density=0.1, order="curve")
    mask = torch.ones(2, math.prod(LONG))
    mask[:, layout_of(LONG, 16).order[:256].long()] = 0
    problem.options["key_mask"] = mask
    check(problem, torch.float64)


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask")}
    density, far = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])), draw(st.sampled_from(["first-order", "means"]))
    key_size, order = draw(st.integers(1, 6)), draw(st.sampled_from(["content", "curve"]))
    sizes = {"key_size": key_size, "order": order}
    size, extra = key_size * draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([(0, 0), (2, 3)]))
    return make_sparse_problem(
        grid, size, density=density, far=far, seed=draw(st.integers(0, 99)), extra=extra, **sizes, **flags
    )


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    check(problem, torch.float64)


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


def test_the_first_order_is_the_derivative_of_a_block():
    """Keys close to their block's mean: the error of the means falls with the distance, this one with its square.

    One block of queries, all alike, and one block of keys per stretch, so that mixing by the mean query is exact.
    """
    make = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 1, 8, generator=make, dtype=torch.float64).expand(1, 32, 1, 8)
    centre = torch.randn(1, 1, 1, 8, generator=make, dtype=torch.float64)
    apart, value = torch.randn(2, 1, 32, 1, 8, generator=make, dtype=torch.float64)
    none = BlockLists.from_mask(32, torch.zeros(1, 1, 1))
    one = torch.ones(1, dtype=torch.float64)
    errors = {"means": [], "first-order": []}
    for distance in (0.1, 0.05):
        key = centre + distance * apart
        softmax = sparse_attention(query, key, value, (32,), density=1.0)
        for far, found in errors.items():
            weights = {"pooled_bias": 0 * one} | ({"state_weight": one} if far == "first-order" else {})
            output = sparse_attention(query, key, value, (32,), lists=none, far=far, **weights)
            found.append(float((output - softmax).norm()))
    assert errors["means"][0] / errors["means"][1] == pytest.approx(2, abs=0.2)
    assert errors["first-order"][0] / errors["first-order"][1] == pytest.approx(4, abs=0.4)


def test_no_weight_of_states_is_means_alone():
    problem = make_sparse_problem((7, 9), 8)
    problem.options["state_weight"] = torch.zeros(2)
    means = problem.attend(state_weight=None, far="means")
    torch.testing.assert_close(problem.attend(), means, rtol=1e-6, atol=1e-6)


def test_lse_agrees_with_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    problem = make_sparse_problem((4, 6), 4, order="curve")
    mask = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[..., 0] = True  # FlexAttention has no LSE of a row that attends to nothing
    lists = BlockLists.from_mask(4, mask)
    block_of, mask = layout_of((4, 6), 4).rows // 4, lists.mask()[0]

    def is_listed(batch, head, query, key):
        return mask[head, block_of[query], block_of[key]]

    shapes = create_block_mask(is_listed, None, 2, 24, 24, device="cpu")
    inputs = [problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value")]
    expected, aux = flex_attention(*inputs, block_mask=shapes, return_aux=AuxRequest(lse=True))
    rows = uniform_rows(SparseCall(**problem.tensors, grid=(4, 6), sparse=lists), lists)
    found = attend_to_lists(rows.query * 8**-0.5, rows.key, rows.value, rows.weights.log(), lists)
    output, lse = (in_order(x, (4, 6), 4) for x in (found[0], found[1][..., None]))
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.squeeze(-1), aux.lse.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("extra", [(0, 0), (3, 4)])
def test_weights_sum_to_one_and_large_logits_stay_finite(extra):
    """The first-order term adds weights that sum to 0."""
    problem = make_sparse_problem((7, 9), 8, key_size=2, extra=extra)
    problem.tensors["value"] = torch.ones_like(problem.tensors["value"])
    for scale in (1, 300):
        found = problem.attend(query=scale * problem.tensors["query"])
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5 * scale)


def test_nan_stays_in_its_sample():
    problem = make_sparse_problem((7, 9), 8, key_size=2, constants=False)
    expected = problem.attend()
    for name in ("query", "key", "value"):
        spoilt = problem.tensors[name].clone()
        spoilt[0, 5] = torch.nan
        found = problem.attend(**{name: spoilt})
        assert torch.equal(found[1], expected[1])
        assert found[0].isnan().any()


def test_work_in_parts_is_the_same(monkeypatch):
    problem = make_sparse_problem((5, 7, 3), 16, key_size=4, mask=True)
    whole = problem.run(sparse_attention)
    for most in (1, 3000):
        monkeypatch.setattr("mhla_diffusers.attention.sparse._LOGITS", most)
        for name, found in problem.run(sparse_attention).items():
            torch.testing.assert_close(found, whole[name], rtol=1e-5, atol=1e-6)


def test_autocast_lowers_neither_the_sums_nor_the_gradients():
    """Attention transfer calls backward() in the middle of a forward, where autocast is on."""
    problem = make_sparse_problem((5, 6), 4)
    plain = problem.run(sparse_attention)
    with torch.autocast("cpu", torch.bfloat16):
        cast = problem.run(sparse_attention)
    for name, expected in plain.items():
        assert torch.equal(cast[name], expected), name


def test_autocast_keeps_the_type_of_the_query_where_all_is_listed():
    problem = make_sparse_problem((4, 5), 64, constants=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert problem.attend().dtype == torch.float32


def test_gradients_of_lists_means_and_states_are_those_of_finite_differences():
    """2 samples, 3 heads, 4 + 1 blocks of 5 rows, lists of up to 2 blocks, 2 states."""
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 4, 5, 8), (2, 3, 5, 5, 8), (2, 3, 5, 5, 8), *[(2, 3, 4, 8)] * 2, (2, 3, 4, 2), (2, 3, 2, 8, 8)]
    given = [torch.randn(shape, generator=make, dtype=torch.float64, requires_grad=True) for shape in shapes]
    lists = BlockLists(5, torch.tensor([[0, 3], [1, -1], [-1, -1], [2, 3]]).expand(1, 3, -1, -1))
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64)

    def attend(query, key, value, mean_key, mean_value, mixing, states):
        pooled = Pooled(None, mean_key, mean_value, None, None, bias[:, :, :4, 0], None)
        return (
            *attend_to_lists(query, key, value, bias, lists),
            *attend_to_pooled(query, pooled, lists),
            read_mixed(query, mixing, states),
        )

    assert torch.autograd.gradcheck(attend, given, fast_mode=True)


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 3, 6, 6)])
def test_lists_and_masks_are_the_same_thing(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    lists = BlockLists.from_mask(4, mask)
    assert torch.equal(lists.mask().view(shape), mask)
    assert (lists.heads, *lists.keys.shape[2:]) == (3, 6, int(mask.sum(dim=-1).max()))
    assert lists.density == pytest.approx(float(mask.float().mean()))


def test_lists_of_every_sample():
    problem = make_sparse_problem((7, 5), 8, extra=(2, 3))
    mask = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    problem.options["lists"] = BlockLists.from_mask(8, mask)
    check(problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lists": BlockLists.from_mask(4, torch.ones(2, 5, 5))}, r"query blocks of 4 tokens: 5, .*\(4, 6\)"),
        ({"lists": BlockLists.from_mask(6, torch.ones(3, 4, 4))}, "heads: 3, .* 2"),
        ({"lists": BlockLists.from_mask(6, torch.ones(3, 2, 4, 4))}, "samples: 3, .* 2"),
        ({"density": 0.5}, "lists .*density"),
        ({"far": "second-order"}, "second-order"),
        ({"pooled_bias": torch.zeros(3)}, r"pooled_bias .*\(2,\)"),
        ({"pooled_bias": 1.0}, "pooled_bias .*float"),
        ({"state_weight": None}, "state_weight"),
        ({"pooled_bias": None}, "pooled_bias"),
        ({"far": "means"}, "state_weight"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        make_sparse_problem((4, 6), 6).attend(**change)


IMPOSSIBLE = {
    r"\(3, 4\)": lambda: BlockLists.from_mask(4, torch.ones(3, 4)),
    "order='place'": lambda: ContentRule(64, 0.1, order="place"),
    "key_block_size=48": lambda: ContentRule(64, 0.1, key_block_size=48),
    "from 0 to 3": lambda: BlockLists(4, torch.full((1, 1, 4, 1), 4)),
    r"\[0, 0\]": lambda: BlockLists(4, torch.tensor([[[[0, 1], [0, 0]]]])),
    r"\[1, 0\]": lambda: BlockLists(4, torch.tensor([[[[1, 0], [0, 1]]]])),
    r"\[-1, 0\]": lambda: BlockLists(4, torch.tensor([[[[-1, 0], [0, 1]]]])),
    "torch.bool": lambda: BlockLists(4, torch.ones(1, 2, 2, 2, dtype=torch.bool)),
    "torch.float32": lambda: BlockLists(4, torch.zeros(1, 2, 2, 1)),
    "pairs=5": lambda: BlockLists(4, torch.tensor([[[[0, 1], [0, -1]]]]), 5),
    r"\(1, 4, 1\)": lambda: BlockLists(4, torch.zeros(1, 4, 1, dtype=torch.int64)),
    "block_size=0": lambda: BlockLists.from_mask(0, torch.ones(2, 3, 3)),
    r"block_size=\(2, 2\)": lambda: ContentRule((2, 2), 0.1),
    "density=0.0": lambda: ContentRule(64, 0.0),
    "density=1.5": lambda: ContentRule(64, 1.5),
    "density='0.1'": lambda: ContentRule(64, "0.1"),
}


@pytest.mark.parametrize(("words", "make_lists"), IMPOSSIBLE.items(), ids=IMPOSSIBLE)
def test_lists_and_rules_that_cannot_be_are_named(words, make_lists):
    with pytest.raises(ValueError, match=words):
        make_lists()


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


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("size", "rule"), [(8, {"order": "curve"}), (8, {}), (8, {"key_block_size": 2})], ids=str)
def test_the_blocks_are_those_that_their_mean_stands_for_worst(mask, size, rule):
    call = content_call(size, mask=mask, **rule)
    lists, layout, tokens = with_lists(call).sparse, layout_of(GRID, size), math.prod(GRID)
    blocks, key_blocks = -(-tokens // size), -(-tokens // call.sparse.key_block_size)
    length = round(0.3 * key_blocks)
    assert lists.keys.shape == (2, 2, blocks, length)
    query, key = (rotated(x, call.rotary) for x in (call.query, call.key))
    weights = torch.ones(2, tokens) if call.key_mask is None else call.key_mask.double()
    members = key_block_of_tokens(call, call.sparse).expand(2, 2, -1)
    for sample in range(2):
        for head in range(2):
            scores = torch.empty(blocks, key_blocks, dtype=torch.float64)
            for a in range(blocks):
                rows = layout.order[a * size : (a + 1) * size].long()
                mean_query = query[sample, rows[rows >= 0], head].mean(dim=0) / 8**0.5
                for b in range(key_blocks):
                    rows = (members[sample, head] == b).nonzero().flatten()
                    weight = weights[sample, rows].double()
                    if not weight.any():
                        scores[a, b] = -math.inf
                        continue
                    share = (weight / weight.sum())[:, None]
                    mean = (share * key[sample, rows, head]).sum(dim=0)
                    variance = (share * (key[sample, rows, head] - mean).square()).sum(dim=0)
                    scores[a, b] = mean_query @ mean + (mean_query.square() @ variance).log() / 2
            best = scores.topk(length, dim=-1).indices
            assert torch.equal(lists.keys[sample, head], best.sort(dim=-1).values)


def test_single_tokens_are_chosen_by_their_logits_whatever_they_weigh():
    """A key alone in its block has no variance, which rounding must not make up."""
    mask = torch.rand(2, math.prod(GRID), generator=torch.Generator().manual_seed(3)).double() + 0.1
    call = replace(content_call(1), key_mask=mask)
    query, key = (rotated(x, call.rotary).transpose(1, 2) for x in (call.query, call.key))
    token_of_block = key_block_of_tokens(call, call.sparse).expand(2, 2, -1).argsort(dim=-1)
    key = key.gather(2, token_of_block[..., None].expand_as(key))
    lists = with_lists(call).sparse.keys
    best = (query[:, :, layout_of(GRID, 1).order.long()] @ key.mT).topk(lists.shape[-1], dim=-1).indices
    assert torch.equal(lists, best.sort(dim=-1).values)


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


def test_states_that_would_only_hurt_get_no_weight():
    """A correction that points away from what is missing, or that is 0."""
    truth = torch.ones(1, 8, 4)
    near, far, lse = 0 * truth, truth / 2, torch.zeros(1, 8)
    for correction in (-truth, 0 * truth):
        assert not best_weights(truth, near, lse, far, lse, correction)[1].any()
    assert best_weights(truth, near, lse, far, lse, 0.01 * truth)[1] == MOST_STATE_WEIGHT


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64, 128, 256])
def test_states_are_of_whole_blocks(size):
    """256 keys; in blocks below 16 each its own, in larger ones at least two blocks."""
    assert stretch_of(size) % size == 0
    assert blocks_per_state(size) == (1 if size < 16 else max(2, 256 // size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": (2, 3)}], ids=str)
def test_without_gradients_a_cpu_has_a_kernel_of_its_own(options, density, dtype):
    problem = make_sparse_problem((7, 9, 4), 32, key_size=8, density=density, **options)
    tensors = {name: x.to(dtype) for name, x in problem.tensors.items()}
    with_gradients = sparse_attention(**{name: x.requires_grad_() for name, x in tensors.items()}, **problem.settings)
    with_gradients = with_gradients.detach()
    with torch.no_grad():
        found = sparse_attention(**tensors, **problem.settings)
    # sums of some 250 products in another order
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps * float(with_gradients.abs().max())}
    torch.testing.assert_close(found, with_gradients, **tolerance)


def test_a_sample_without_a_key_has_reference_weights_of_zero():
    problem = make_sparse_problem((5, 6), 6, key_size=2, mask=True)
    problem.options["key_mask"][0] = False
    assert not reference(**problem.tensors, **problem.settings)[0].any()
