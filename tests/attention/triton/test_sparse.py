"""The sparse branch's kernels, one after the other, against the reference and the eager form in float64."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, ContentRule, mhla_attention
from mhla_diffusers.attention.triton import branches, choose, listed, merge, pooled, prepare
from mhla_diffusers.attention.triton.backend import BLOCK_SIZES

from ..problems import errors_against_reference, relative_error
from ..test_extra import make as make_beside_extra
from ..test_sparse import SUMS, TOLERANCE, make
from .test_kernels import (
    EVERYTHING,
    HALF_TO_EAGER,
    channels_not_last,
    every_other_token_and_not_aligned,
    expanded,
    on_device,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


BY_CONTENT = {
    "plain": {"rotary": True, "rope": "before"},
    "text and mask": {"rotary": True, "rope": "before", "extra": (0, 21), "mask": True, "batch": 2},
    "rope after the feature map": {"rotary": True},
    "norm and gate": {"norm": True, "gate": True},
    "72 channels": {"head_dim": 72, "rotary": True, "rope": "before"},
    "without pooled keys": {"pooled": False},
    "alone": {"pooled": False, "linear": False},
    "fitted": {"grid": (4, 8, 8), "density": 0.2, "fit": True, "mask": True, "batch": 2},
    "fitted, text": {"grid": (4, 8, 8), "density": 0.2, "fit": True, "extra": (0, 5), "linear": False},
    "queries in blocks of 64": {"size": 64, "rotary": True, "rope": "before", "extra": (3, 20), "mask": True},
    "along the curve": {"order": "curve", "linear": False, "norm": True},
}


def by_content(*, grid=(3, 5, 7), density=0.3, fit=False, size=16, order="content", **options):
    problem = on_device(make(grid, size, key_size=16, **{"pooled": not fit, "head_dim": 16, "batch": 1, **options}))
    problem.options["sparse"] = ContentRule(size, density, fit, key_block_size=16, order=order)
    return problem


@pytest.mark.parametrize("options", BY_CONTENT.values(), ids=BY_CONTENT)
def test_by_content(options):
    """Output and gradients where lists are chosen by query and key, against eager operations in float64."""
    problem = by_content(**options)
    expected = problem.run(mhla_attention, torch.float64, backend="eager")
    for name, found in problem.run(mhla_attention, backend="triton").items():
        error = relative_error(found, expected[name])
        assert error < 3e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("name", ["alone", "fitted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_by_content_in_half_precision(dtype, name):
    """Eager operations sum the same rounded inputs in float32, so what is left is the rounding of the products.

    Of this seed no two blocks are so alike that the rounding of their means would decide which is listed.
    """
    problem = by_content(**BY_CONTENT[name], seed=2)
    problem.tensors |= {one: problem.tensors[one].to(dtype) for one in ("query", "key", "value")}
    expected, found = (problem.run(mhla_attention, backend=backend) for backend in ("eager", "triton"))
    for one in ("output", "query", "key", "value"):
        assert found[one].dtype == dtype
        error, bound = relative_error(found[one], expected[one]), torch.finfo(dtype).eps * (4 if one == "output" else 8)
        assert error < bound, f"{one}: relative error {error:.2e}, allowed {bound:.2e}"


def test_the_same_bits_twice():
    problem = on_device(make((5, 7), 16, head_dim=16, rotary=True))
    problem.options["sparse"] = ContentRule(16, 0.3)
    first, second = (problem.run(mhla_attention, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def check(problem, dtype=torch.float32):
    """Held to the eager backend's bounds, in half precision to HALF_TO_EAGER of them, as all kernels are."""
    allowed = TOLERANCE[dtype] * (2 if dtype == torch.float32 else 2 * HALF_TO_EAGER)
    for name, found in errors_against_reference(on_device(problem), dtype, "triton").items():
        if dtype == torch.float32 or name not in SUMS:
            assert found <= allowed, f"{name}: relative error {found:.2e}, allowed {allowed:.2e}"


PROBLEMS = {
    "listed": {"pooled": False, "linear": False},
    "pooled": {"linear": False},
    "linear": {"pooled": False},
    "empty lists": {"density": 0.0},
    "rotary": {"rotary": True, "per_head": True},
    "rotary before": {"rotary": True, "rope": "before", "gate": True},
    "mask": {"mask": True, "batch": 2},
    "5 channels": {"head_dim": 5},
    "6 channels, rotary before": {"head_dim": 6, "rotary": True, "rope": "before"},
    "128 channels": {"head_dim": 128, "rotary": True, "rope": "before"},
}


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_given_lists(options):
    check(make((5, 7), 16, **{"batch": 1, "head_dim": 16} | options))


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_block_sizes(size):
    check(make((9, 16), size, batch=1, head_dim=16, rotary=True))


@pytest.mark.parametrize(("size", "key_size"), [(64, 16), (64, 32), (128, 32), (128, 64)])
def test_smaller_blocks_of_keys(size, key_size):
    """Several entries of a list make one tile; the last tile and the blocks with padding are cut."""
    check(make((9, 19), size, key_size=key_size, batch=1, head_dim=16, extra=(0, 37)))


@pytest.mark.parametrize(("parts", "extra"), [("alone", (2, 3)), ("listed", (0, 17)), ("pooled and linear", (2, 3))])
def test_given_lists_beside_extra_tokens(parts, extra):
    check(make_beside_extra((5, 7), 16, extra, parts, batch=1, head_dim=16, rotary=True, mask=extra[0] > 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_everything_at_once(dtype):
    check(make((5, 7), 16, head_dim=32, **EVERYTHING), dtype)


@pytest.mark.parametrize("extra", [(0, 0), (2, 3)], ids=str)
def test_lists_of_every_sample(extra):
    problem = make((7, 5), 16, head_dim=16, extra=extra)
    mask = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(3)) < 0.4
    problem.options["sparse"] = BlockLists.from_mask(16, mask)
    check(problem)


def test_weights_of_the_key_mask_count():
    """A mask may hold weights: the number of tokens of a pooled key is their sum."""
    problem = make((6, 6), 16, head_dim=16)
    problem.options["key_mask"] = torch.rand(2, 36, generator=torch.Generator().manual_seed(0))
    check(problem)


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    flags = {name: draw(st.booleans()) for name in EVERYTHING}
    extra = draw(st.sampled_from([(0, 0), (2, 3), (0, 18)]))
    parts = draw(st.sampled_from(["listed", "pooled", "pooled and linear"] + ["alone"] * any(extra)))
    # listed blocks and extra tokens may all be masked for a query; the reference divides 0 by 0 then
    flags["mask"] &= parts != "listed"
    more = {} if parts == "alone" else {"density": draw(st.sampled_from([0.0, 0.4, 1.0]))}
    rope, head_dim = draw(st.sampled_from(["after", "before"])), 2 * draw(st.integers(1, 20))
    more |= {"rope": rope, "head_dim": head_dim, "seed": draw(st.integers(0, 99)), "batch": 1}
    return make_beside_extra(grid, 16, extra, parts, **flags, **more)


# A drawn output norm may stand over a nearly zero output, where float32 itself passes the bound: the eager backend's
# error is the measure there, as in test_kernels.
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    problem = on_device(problem)
    eager = errors_against_reference(problem, torch.float32, "eager")
    for name, found in errors_against_reference(problem, torch.float32, "triton").items():
        allowed = max(2 * TOLERANCE[torch.float32], HALF_TO_EAGER * eager[name])
        assert found <= allowed, f"{name}: relative error {found:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("extra", [(0, 0), (2, 3)], ids=str)
def test_masked_samples_attend_to_nothing_without_nan(extra):
    problem = on_device(make((6, 4), 16, head_dim=16, mask=True, extra=extra))
    problem.options["key_mask"] = torch.zeros(2, 24 + sum(extra), dtype=torch.bool, device=DEVICE)
    found = problem.run(mhla_attention, backend="triton")
    assert all(x.isfinite().all() for x in found.values()) and not found["output"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_stay_finite(dtype):
    problem = on_device(make((7, 9), 16, head_dim=16))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    found = mhla_attention(**tensors, grid=(7, 9), blocks=problem.blocks, **problem.options, backend="triton")
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("strided", [channels_not_last, expanded, every_other_token_and_not_aligned])
def test_strides(strided):
    torch.manual_seed(0)
    query, key, value = (x.to(DEVICE) for x in strided(2, 24, 2, 16))
    problem = on_device(make((4, 6), 16, head_dim=16))

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (query, key, value)]
        others = {name: x for name, x in problem.tensors.items() if name not in ("query", "key", "value")}
        output = mhla_attention(*leaves, **others, grid=(4, 6), blocks=(2, 2), **problem.options, backend="triton")
        output.sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)


def test_nan_is_not_hidden():
    """In a key it reaches every query, those that do not list its block through the pooled key."""
    problem = on_device(make((36,), 16, linear=False, batch=1, head_dim=16))
    problem.tensors["key"][0, 6, 0, 3] = float("nan")
    found = mhla_attention(**problem.tensors, grid=(36,), blocks=problem.blocks, **problem.options, backend="triton")
    assert found[0, :, 0].isnan().all() and not found[0, :, 1].isnan().any()


COMPILED = {
    "given lists": {},
    "by content": {"sparse": ContentRule(16, 0.3, fit_pooled_bias=True)},
    "by content, text": {"sparse": ContentRule(16, 0.3), "extra": (2, 3)},
}
COMPILED_BY = [*((name, "triton") for name in COMPILED), ("by content, text", "eager")]


@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != ("by content", "triton"))) for case in COMPILED_BY],
)
def test_compile_in_one_graph_forward_and_backward(name, backend):
    changes = dict(COMPILED[name])
    extra = changes.pop("extra", (0, 0))
    problem = on_device(
        make((5, 7), 16, pooled=name == "by content, text", head_dim=16, extra=extra, batch=1, mask=True)
    )
    if name == "given lists":  # made outside, since a constructor may not look at values while a graph is traced
        changes["sparse"] = problem.options["sparse"]
    problem.options |= changes

    attend = functools.partial(mhla_attention, backend=backend)
    compiled = torch.compile(lambda **given: attend(**given), fullgraph=True, backend="aot_eager")
    expected, found = problem.run(attend), problem.run(compiled)
    for one in expected:
        torch.testing.assert_close(found[one], expected[one])


def operator_calls(mask):
    """Every operator with arguments that fit."""
    make = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=make).to(DEVICE).requires_grad_()

    query, key, value = (random(2, 35 + 5, 2, 16) for _ in range(3))
    table = torch.randn(1, 40, 1, 16, generator=make).to(DEVICE)
    weights = (torch.rand(2, 40, generator=make) > 0.3).float().to(DEVICE) if mask else None
    place, scale = ([5, 7], 16, 5), 0.25
    whole = [5, 7], 16, 16, 5
    rows = prepare.prepare(query, key, value, table, weights, *whole, True)
    yield prepare.prepare, (query, key, value, table, weights, *whole, True)
    of_rows = [x.detach() for x in rows]
    gradients = *of_rows[:3], *of_rows[4:6], of_rows[7]
    yield prepare.prepare_backward, (*gradients, table, weights, *whole, query.shape[2])
    yield prepare.block_weights, (of_rows[7], weights, *place)
    bias, of_blocks = prepare.block_weights(of_rows[7], weights, *place)
    bias = bias if mask else None
    chosen = of_rows[3], of_rows[4], of_rows[6], of_blocks, 0.4, scale, *place
    yield choose.choose, chosen
    indices, counts, bits = choose.choose(*chosen)
    q, k, v, pooled_key, pooled_value = (
        x.detach().contiguous().requires_grad_() for x in (rows[0][:, :48], *rows[1:3], *rows[4:6])
    )
    of_lists = q, k, v, bias, indices, counts, scale, *place, False
    yield listed.listed, of_lists
    of_means = q, pooled_key, pooled_value, of_blocks.log(), bits, scale
    yield pooled.pooled, of_means
    outputs = [x.detach() for x in (*listed.listed(*of_lists), *pooled.pooled(*of_means))]
    for operator, inputs, (output, lse) in (
        (listed.listed_backward, of_lists, outputs[:2]),
        (pooled.pooled_backward, of_means, outputs[2:]),
    ):
        detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
        yield operator, (torch.randn_like(output), torch.randn_like(lse) if mask else None, output, lse, *detached)
    yield pooled.fit_bias, (*(x.detach() for x in (q, k, v)), bias, *outputs, scale, *place)
    branches_of_rows = *(x.requires_grad_() for x in outputs), [5, 7], 16, 2
    yield merge.merge, branches_of_rows
    upstream = random(2, 35, 2, 16).detach()
    yield merge.merge_backward, (upstream, *(x.detach() for x in outputs), [5, 7], 16, 2)


@pytest.mark.parametrize("mask", [False, True])
def test_opcheck(mask):
    for operator, inputs in operator_calls(mask):
        torch.library.opcheck(
            operator, inputs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )


def test_given_lists_are_those_that_the_kernel_chooses():
    """Indices, counts and bits of lists by content, given back as lists, are the same."""
    make = torch.Generator().manual_seed(0)
    groups, blocks = 6, 40
    query, key = (torch.randn(groups, blocks, 16, generator=make).to(DEVICE) for _ in range(2))
    weight = torch.ones(1, blocks, device=DEVICE)
    place = [blocks * 16 - 3], 16, 20
    indices, counts, bits = choose.choose(query, key, key.square(), weight, 0.3, 0.25, *place)
    length, base = round(0.3 * blocks), torch.arange(groups, device=DEVICE)[:, None, None] * (blocks + 2)
    keys = indices.view(groups, blocks, -1)[..., :length].long() - base
    lists = BlockLists(16, keys.view(2, 3, blocks, length))
    for found, expected in zip(branches.given_blocks(lists, 2, blocks + 2), (indices, counts, bits), strict=True):
        assert torch.equal(found, expected)
