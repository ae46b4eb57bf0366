"""Block lists, pooled keys and the linear branch against the float64 reference; lists and β found at every call."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import (
    BlockLists,
    Call,
    ContentRule,
    initial_mixing,
    mhla_attention,
    reference_attention,
    with_lists,
)
from mhla_diffusers.attention.layout import block_count, in_order, layout_of
from mhla_diffusers.attention.rope import rotated
from mhla_diffusers.attention.sparse import (
    BIASES,
    attend_to_lists,
    attend_to_pooled,
    key_block_of_tokens,
    uniform_rows,
)

from .problems import errors_against_reference, make_problem

# as in test_eager.py
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUMS = ("linear_weight", "pooled_bias", "output_norm")
"""Their gradients are sums over all tokens of products of both signs, of which rounded halves leave too little to hold
them to the bound of one rounding; float32 and float64 do."""
LAYOUTS = [((12,), 3, 3), ((7, 9), 8, 2), ((5, 6), 1, 1), ((5, 7, 3), 16, 4), ((4, 4, 6), 128, 128), ((8, 9), 8, 8)]
"""Grid and block sizes: even and ragged, single tokens, one block for all."""


def random_lists(grid, size, key_size, order, heads=2, density=0.3, at_least_one=False, seed=0):
    shape = heads, block_count(grid, size), block_count(grid, key_size)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    if at_least_one:
        mask[..., 0] = True
    return BlockLists.from_mask(size, mask, key_block_size=key_size, order=order)


def make(
    grid,
    size,
    *,
    key_size=None,
    order="content",
    pooled=True,
    linear=True,
    density=0.3,
    blocks=None,
    head_dim=8,
    seed=0,
    **options,
):
    """A problem with block lists: the tensors of ``make_problem`` with λ, β and lists that are empty in places."""
    blocks = blocks or tuple(min(2, length) for length in grid)
    at_least_one = not (pooled or linear)
    lists = random_lists(grid, size, key_size or size, order, density=density, at_least_one=at_least_one, seed=seed)
    problem = make_problem(grid, blocks, linear_branch=linear, head_dim=head_dim, seed=seed, sparse=lists, **options)
    if pooled:
        problem.tensors["pooled_bias"] = 0.3 * torch.randn(2, generator=torch.Generator().manual_seed(seed))
    return problem


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        if dtype.itemsize > 2 or name not in SUMS:
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("order", ["content", "curve"])
@pytest.mark.parametrize(("grid", "size", "key_size"), LAYOUTS)
@pytest.mark.parametrize("parts", ["listed", "pooled", "linear", "pooled and linear"])
def test_parts_on_even_and_ragged_blocks(grid, size, key_size, parts, order):
    check(make(grid, size, key_size=key_size, order=order, pooled="pooled" in parts, linear="linear" in parts))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("option", ["rotary", "mask", "norm", "gate", "per_head"])
def test_options(dtype, option):
    check(make((5, 7, 3), 16, **{option: True}), dtype)


def test_a_block_that_mixes_nothing():
    problem = make((5, 7), 8)
    problem.tensors["mixing"][0] = 0
    assert errors_against_reference(problem, torch.float64, "eager")["output"] < TOLERANCE[torch.float64]


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    names = "rotary", "mask", "norm", "gate", "per_head", "pooled", "linear"
    flags = {name: draw(st.booleans()) for name in names}
    # listed blocks alone may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= flags["pooled"]
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    key_size, order = draw(st.integers(1, 6)), draw(st.sampled_from(["content", "curve"]))
    sizes = {"size": key_size * draw(st.sampled_from([1, 2, 4])), "key_size": key_size, "order": order}
    return make(grid, density=density, seed=draw(st.integers(0, 99)), **sizes, **flags)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    check(problem, torch.float64)


@pytest.mark.parametrize("sparse", ["lists", "rule"])
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"mask": True}, {"extra": (2, 3)}], ids=str)
def test_all_pairs_listed_is_softmax_attention(options, sparse):
    """Of everything, whatever λ and β are: nothing is left to them."""
    problem = make((5, 6), 4, density=1.1, **options)
    given = problem.options | ({"sparse": ContentRule(4, 1.0)} if sparse == "rule" else {})
    rotary, mask = given.get("rotary"), given.get("key_mask")
    query, key, value = (problem.tensors[name] for name in ("query", "key", "value"))
    if rotary is not None:
        query, key = (rotated(x, rotary) for x in (query, key))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=None if mask is None else mask[:, None, None]
    )
    found = mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks, **given)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_a_rule_that_lists_everything_on_this_grid_is_softmax_attention():
    """Whatever its density: of one block, a list of at least one holds all."""
    problem = make_problem((4, 5), (2, 1), linear_branch=True)
    given = problem.tensors | {"grid": problem.grid, "blocks": problem.blocks}
    found, dense = (mhla_attention(**given, sparse=ContentRule(64, density)) for density in (0.3, 1.0))
    assert torch.equal(found, dense)


def test_lse_agrees_with_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    problem = make((4, 6), 4, pooled=False, linear=False, order="curve")
    lists = problem.options["sparse"]
    block_of, mask = layout_of((4, 6), 4).rows // 4, lists.mask()[0]

    def is_listed(batch, head, query, key):
        return mask[head, block_of[query], block_of[key]]

    shapes = create_block_mask(is_listed, None, 2, 24, 24, device="cpu")
    inputs = [problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value")]
    expected, aux = flex_attention(*inputs, block_mask=shapes, return_aux=AuxRequest(lse=True))
    *rows, weights = uniform_rows(Call(**problem.tensors, grid=(4, 6), blocks=(2, 2), sparse=lists))
    found = attend_to_lists(rows[0] * 8**-0.5, *rows[1:], weights.log(), lists)
    output, lse = (in_order(x, (4, 6), 4) for x in (found[0], found[1][..., None]))
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.squeeze(-1), aux.lse.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_weights_sum_to_one_and_large_logits_stay_finite():
    problem = make((7, 9), 8)
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    for scale in (1, 300):
        scaled = tensors | {"query": scale * tensors["query"]}
        found = mhla_attention(**scaled, grid=problem.grid, blocks=problem.blocks, **problem.options)
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)


def test_work_in_parts_is_the_same(monkeypatch):
    problem = make((5, 7, 3), 16, mask=True)
    whole = problem.run(mhla_attention)
    for most in (1, 3000):
        monkeypatch.setattr("mhla_diffusers.attention.sparse._LOGITS", most)
        for name, found in problem.run(mhla_attention).items():
            torch.testing.assert_close(found, whole[name], rtol=1e-5, atol=1e-6)


def test_autocast_lowers_neither_the_sums_nor_the_gradients():
    """Attention transfer calls backward() in the middle of a forward, where autocast is on."""
    problem = make((5, 6), 4, linear=False)
    plain = problem.run(mhla_attention)
    with torch.autocast("cpu", torch.bfloat16):
        cast = problem.run(mhla_attention)
    for name, expected in plain.items():
        assert torch.equal(cast[name], expected), name


@pytest.mark.parametrize("pooled", [False, True])
def test_gradients_of_lists_are_those_of_finite_differences(pooled):
    """2 samples, 3 heads, 4 + 1 blocks of 5 rows, lists of up to 2 blocks."""
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 4, 5, 8), (2, 3, 5, 5, 8), (2, 3, 5, 5, 8), *[(2, 3, 4, 8)] * 2, (1, 3, 4)]
    given = [torch.randn(shape, generator=make, dtype=torch.float64, requires_grad=True) for shape in shapes]
    lists = BlockLists(5, torch.tensor([[0, 3], [1, -1], [-1, -1], [2, 3]]).expand(1, 3, -1, -1))
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64)

    def attend(*tensors):
        listed = attend_to_lists(*tensors[:3], bias, lists)
        return (*listed, *(attend_to_pooled(tensors[0], *tensors[3:], lists) if pooled else ()))

    assert torch.autograd.gradcheck(attend, given if pooled else given[:3], fast_mode=True)


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 3, 6, 6)])
def test_lists_and_masks_are_the_same_thing(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    lists = BlockLists.from_mask(4, mask)
    assert torch.equal(lists.mask().view(shape), mask)
    assert (lists.heads, *lists.keys.shape[2:]) == (3, 6, int(mask.sum(dim=-1).max()))
    assert lists.density == pytest.approx(float(mask.float().mean()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparse": BlockLists.from_mask(4, torch.ones(2, 5, 5))}, r"of 5 query blocks, .*\(4, 6\)"),
        ({"sparse": BlockLists.from_mask(6, torch.ones(3, 4, 4))}, "3 heads, but query has 2"),
        ({"sparse": BlockLists.from_mask(6, torch.zeros(2, 4, 4))}, "empty list.*linear_weight"),
        ({"sparse": None, "pooled_bias": torch.zeros(2)}, "pooled_bias .*sparse"),
        ({"sparse": None, "linear_weight": torch.ones(2)}, "linear_weight .*sparse"),
        ({"sparse": BlockLists.from_mask(6, torch.ones(3, 2, 4, 4))}, "3 samples, but query has 2"),
        ({"sparse": ContentRule(4, 0.5, True), "pooled_bias": torch.zeros(2)}, "fit_pooled_bias"),
        ({"pooled_bias": torch.zeros(3)}, r"pooled_bias .*\(2,\)"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    problem = make((4, 6), 6, pooled=False, linear=False)
    arguments = {**problem.tensors, "grid": problem.grid, "blocks": problem.blocks, **problem.options, **change}
    with pytest.raises(ValueError, match=words):
        mhla_attention(**arguments)


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


GRID, BLOCKS, SIZE = (3, 5, 7), (1, 2, 2), 8


def content_problem(heads=2, head_dim=8, batch=2, *, mask=False, extra=0, seed=0):
    make = torch.Generator().manual_seed(seed)
    tokens = math.prod(GRID) + extra
    query, key, value = (
        torch.randn(batch, tokens, heads, head_dim, generator=make, dtype=torch.float64) for _ in range(3)
    )
    angles = torch.randn(1, tokens, 1, head_dim // 2, generator=make, dtype=torch.float64).repeat_interleave(2, dim=-1)
    settings = {"rotary": (angles.cos(), angles.sin()), "extra": (0, extra), "rope": "before"}
    if mask:
        settings["key_mask"] = torch.rand(batch, tokens, generator=make) > 0.3
        settings["key_mask"][0, layout_of(GRID, SIZE).order[:SIZE].long()] = False
    return (query * 2, key, value), settings


def call_of(tensors, settings, **changes):
    return Call(*tensors, initial_mixing(BLOCKS).double(), GRID, BLOCKS, **settings | changes)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("size", "rule"), [(8, {"order": "curve"}), (8, {}), (8, {"key_block_size": 2})], ids=str)
def test_the_blocks_are_those_that_their_mean_stands_for_worst(mask, size, rule):
    tensors, settings = content_problem(mask=mask)
    rule = ContentRule(size, 0.3, **rule)
    call = call_of(tensors, settings, sparse=rule)
    lists, layout, tokens = with_lists(call).sparse, layout_of(GRID, size), math.prod(GRID)
    blocks, key_blocks = -(-tokens // size), -(-tokens // rule.key_block_size)
    length = round(0.3 * key_blocks)
    assert lists.keys.shape == (2, 2, blocks, length)
    query, key = (rotated(x, call.rotary) for x in tensors[:2])
    weights = torch.ones(2, tokens) if call.key_mask is None else call.key_mask.double()
    members = key_block_of_tokens(call, rule).expand(2, 2, -1)
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
    tensors, settings = content_problem()
    mask = torch.rand(2, math.prod(GRID), generator=torch.Generator().manual_seed(3)).double() + 0.1
    rule = ContentRule(1, 0.3)
    call = call_of(tensors, settings, sparse=rule, key_mask=mask)
    query, key = (rotated(x, call.rotary).transpose(1, 2) for x in tensors[:2])
    token_of_block = key_block_of_tokens(call, rule).expand(2, 2, -1).argsort(dim=-1)
    key = key.gather(2, token_of_block[..., None].expand_as(key))
    lists = with_lists(call).sparse.keys
    best = (query[:, :, layout_of(GRID, 1).order.long()] @ key.mT).topk(lists.shape[-1], dim=-1).indices
    assert torch.equal(lists, best.sort(dim=-1).values)


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": 5}], ids=["plain", "mask", "text"])
def test_the_fitted_bias_is_the_best_of_those_tried(options):
    """By brute force: every β, on all queries that it is fitted on, against softmax attention."""
    tensors, settings = content_problem(**options)
    extra = settings["extra"][1]

    def attend(bias, rule):
        mixing = initial_mixing(BLOCKS).double()
        return mhla_attention(
            *tensors, mixing, GRID, BLOCKS, pooled_bias=bias, sparse=rule, backend="eager", **settings
        )

    softmax = attend(None, ContentRule(SIZE, 1.0))
    order = layout_of(GRID, SIZE).order
    places = order[order >= 0].long()
    some = places[((torch.arange(8) + 0.5) * len(places) / 8).long()]
    errors = torch.stack(
        [
            (attend(torch.full((2,), float(bias), dtype=torch.float64), ContentRule(SIZE, 0.2)) - softmax)[:, some]
            .square()
            .sum(dim=(1, 3))
            for bias in torch.linspace(*BIASES)
        ]
    )
    best = torch.linspace(*BIASES, dtype=torch.float64)[errors.argmin(dim=0)]
    fitted = attend(None, ContentRule(SIZE, 0.2, fit_pooled_bias=True))
    expected = torch.cat([attend(best[sample], ContentRule(SIZE, 0.2))[[sample]] for sample in range(2)])
    torch.testing.assert_close(fitted, expected, rtol=1e-9, atol=1e-9)
    assert extra == 0 or len(fitted[0]) == math.prod(GRID) + extra


def test_lists_along_the_curve_are_those_of_the_reference():
    tensors, settings = content_problem(mask=True)
    chosen = with_lists(
        call_of(tensors, settings, sparse=ContentRule(SIZE, 0.3, True), linear_weight=torch.tensor([0.1, 0.3]))
    )
    assert chosen.pooled_bias.shape == (2, 2)
    found = mhla_attention(
        *tensors,
        chosen.mixing,
        GRID,
        BLOCKS,
        sparse=ContentRule(SIZE, 0.3, fit_pooled_bias=True),
        linear_weight=chosen.linear_weight,
        backend="eager",
        **settings,
    )
    torch.testing.assert_close(found, reference_attention(chosen), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": (2, 3)}, {"linear": False}], ids=str)
def test_without_gradients_a_cpu_has_a_kernel_of_its_own(options, density, dtype):
    problem = make((7, 9, 4), 32, key_size=8, density=density, **options)
    tensors = {name: x.to(dtype) for name, x in problem.tensors.items()}
    given = {"grid": problem.grid, "blocks": problem.blocks, **problem.options}
    with_gradients = mhla_attention(**{name: x.requires_grad_() for name, x in tensors.items()}, **given).detach()
    with torch.no_grad():
        found = mhla_attention(**tensors, **given)
    # sums of some 250 products in another order
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps * float(with_gradients.abs().max())}
    torch.testing.assert_close(found, with_gradients, **tolerance)
