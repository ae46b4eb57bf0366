"""Sparse attention on kernels, one after the other, against the reference and the eager form in float64."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, sparse_attention, with_lists
from mhla_diffusers.attention.sparse import BIASES
from mhla_diffusers.attention.triton import branches, choose, first_order, listed, merge, pooled, prepare
from mhla_diffusers.attention.triton.backend import BLOCK_SIZES

from ..problems import call_of, errors_against_reference, make_sparse_problem, relative_error
from ..test_sparse import TOLERANCE
from .test_kernels import (
    HALF_TO_EAGER,
    channels_not_last,
    every_other_token_and_not_aligned,
    expanded,
    on_device,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = functools.partial(sparse_attention, backend="triton")


def check(problem, dtype=torch.float32):
    """Held to the eager backend's bounds, in half precision to HALF_TO_EAGER of them, as all kernels are."""
    allowed = TOLERANCE[dtype] * (2 if dtype == torch.float32 else 2 * HALF_TO_EAGER)
    for name, found in errors_against_reference(on_device(problem), dtype, "triton").items():
        assert found <= allowed, f"{name}: relative error {found:.2e}, allowed {allowed:.2e}"


PROBLEMS = {
    "means": {"far": "means"},
    "empty lists": {"density": 0.0},
    "all listed": {"density": 1.1},
    "along the curve": {"order": "curve", "mask": True},
    "text": {"extra": (0, 17), "heads": 2},
    "text and mask": {"extra": (2, 3), "mask": True, "rotary": True, "batch": 2},
    "5 channels": {"head_dim": 5},
    "72 channels, rotary": {"head_dim": 72, "rotary": True},
    "128 channels": {"head_dim": 128, "rotary": True},
}


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_given_lists(options):
    check(make_sparse_problem((5, 7), 16, **{"batch": 1, "heads": 1, "head_dim": 16} | options))


@pytest.mark.parametrize("size", BLOCK_SIZES[1:])
def test_block_sizes(size):
    check(make_sparse_problem((9, 16), size, batch=1, head_dim=16, rotary=True))


@pytest.mark.parametrize(("size", "key_size"), [(64, 16), (128, 32), (128, 64)])
def test_smaller_blocks_of_keys(size, key_size):
    """Several entries of a list make one tile; the last tile and the blocks with padding are cut."""
    check(make_sparse_problem((9, 19), size, key_size=key_size, batch=1, head_dim=16, extra=(0, 37)))


LONG = {"grid": (5, 7, 15), "batch": 1, "heads": 1, "head_dim": 16, "density": 0.1}
"""525 tokens: with key blocks of 16 and 32 two stretches of 256 keys, and one that the end cuts."""


@pytest.mark.parametrize(
    ("size", "key_size", "options"),
    [
        (16, 16, {}),
        (64, 32, {"mask": True}),
        (128, 32, {"rotary": True, "extra": (0, 5)}),
        (64, 64, {"order": "curve"}),
    ],
    ids=str,
)
def test_several_stretches(size, key_size, options):
    given = LONG | options
    check(make_sparse_problem(given.pop("grid"), size, key_size=key_size, **given))


@pytest.mark.parametrize(
    ("dtype", "far"),
    [(torch.float16, "first-order"), (torch.bfloat16, "first-order"), (torch.bfloat16, "means")],
    ids=str,
)
def test_everything_at_once(dtype, far):
    options = {"rotary": True, "mask": True, "extra": (2, 3), "far": far}
    check(make_sparse_problem((9, 19), 64, key_size=32, batch=2, heads=1, head_dim=32, **options), dtype)


@pytest.mark.parametrize("extra", [(0, 0), (2, 3)], ids=str)
def test_lists_of_every_sample(extra):
    problem = make_sparse_problem((7, 5), 16, head_dim=16, extra=extra)
    mask = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(3)) < 0.4
    problem.options["lists"] = BlockLists.from_mask(16, mask)
    check(problem)


def test_weights_of_the_key_mask_count():
    """A mask may hold weights: the number of tokens of a mean is their sum."""
    problem = make_sparse_problem((6, 6), 16, heads=1, head_dim=16)
    problem.options["key_mask"] = torch.rand(2, 36, generator=torch.Generator().manual_seed(0))
    check(problem)


def test_no_weight_of_states_is_means_alone():
    problem = on_device(make_sparse_problem((9, 19), 64, key_size=32, batch=1, head_dim=16, rotary=True))
    problem.options["state_weight"] = torch.zeros(2, device=DEVICE)
    found = problem.run(TRITON)
    problem.options |= {"state_weight": None, "far": "means"}
    for name, expected in problem.run(TRITON).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)


BY_CONTENT = {
    "plain": {"rotary": True},
    "text and mask": {"rotary": True, "extra": (0, 21), "mask": True, "batch": 2},
    "means": {"far": "means", "mask": True},
    "72 channels": {"head_dim": 72, "rotary": True},
    "along the curve": {"order": "curve"},
    "several stretches": {"size": 64, "grid": (4, 8, 16), "extra": (3, 20), "mask": True, "density": 0.1},
    "keys in 32": {"size": 64, "key_size": 32, "grid": (4, 8, 16), "density": 0.1, "rotary": True},
    "blocks of 128": {"size": 128, "key_size": 32, "grid": (4, 8, 16), "density": 0.1, "heads": 1},
}


def by_content(*, grid=(3, 5, 7), size=16, **options):
    """A call that chooses lists, β and γ."""
    options = {"key_size": 16, "head_dim": 16, "batch": 1, "density": 0.3} | options
    return on_device(make_sparse_problem(grid, size, constants=False, **options))


@pytest.mark.parametrize("options", BY_CONTENT.values(), ids=BY_CONTENT)
def test_by_content(options):
    """Output and gradients where lists, β and γ are found, against eager operations in float64.

    γ is a quotient of float32 sums, whose rounding it shares among all.
    """
    problem = by_content(**options)
    expected = problem.run(sparse_attention, torch.float64, backend="eager")
    for name, found in problem.run(TRITON).items():
        error = relative_error(found, expected[name])
        assert error < 3e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_by_content_in_half_precision(dtype):
    """With the lists, β and γ of the float32 call of the same rounded inputs, against eager operations in float32.

    In half precision means are rounded, and which of two blocks that are alike is listed may depend on it.
    """
    problem = by_content(grid=(4, 6, 7), density=0.2, rotary=True, mask=True)
    rounded = {name: x.to(dtype) for name, x in problem.tensors.items()}
    call = with_lists(call_of(**{name: x.float() for name, x in rounded.items()}, **problem.settings))
    for name in ("block_size", "key_block_size", "order", "density"):
        problem.options.pop(name)
    assert call.pooled_bias.shape == call.state_weight.shape == (1, 2)
    problem.options |= {"lists": call.sparse, "pooled_bias": call.pooled_bias[0], "state_weight": call.state_weight[0]}
    problem.tensors = rounded
    check(problem, dtype)


def test_beta_and_gamma_are_those_of_eager_operations():
    problem = by_content(grid=(4, 8, 8), density=0.2, rotary=True, mask=True, batch=2)
    expected = with_lists(call_of(**{name: x.double() for name, x in problem.tensors.items()}, **problem.settings))
    found = []
    fit, problem.options["backend"] = branches.fit, "triton"
    try:
        branches.fit = lambda *inputs: found.append(fit(*inputs)) or found[0]
        problem.attend()
    finally:
        branches.fit = fit
    beta, gamma = (x.view(2, 2) for x in found[0])
    # the same of the β that are tried
    assert (beta - expected.pooled_bias).abs().max() < (BIASES[1] - BIASES[0]) / (BIASES[2] - 1) / 2
    torch.testing.assert_close(gamma.double(), expected.state_weight, rtol=1e-4, atol=1e-4)


def test_the_same_bits_twice():
    problem = by_content(rotary=True)
    first, second = (problem.run(TRITON) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask")}
    more = {
        "extra": draw(st.sampled_from([(0, 0), (2, 3), (0, 18)])),
        "density": draw(st.sampled_from([0.0, 0.4, 1.0])),
    }
    more |= {
        "far": draw(st.sampled_from(["first-order", "means"])),
        "order": draw(st.sampled_from(["content", "curve"])),
    }
    size, key_size = draw(st.sampled_from([(16, 16), (32, 16)]))
    more |= {"head_dim": 2 * draw(st.integers(1, 20)), "seed": draw(st.integers(0, 99)), "batch": 1}
    return make_sparse_problem(grid, size, key_size=key_size, **flags, **more)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    check(problem)


def test_masked_samples_attend_to_nothing_without_nan():
    problem = on_device(make_sparse_problem((6, 4), 16, head_dim=16, mask=True, extra=(2, 3)))
    problem.options["key_mask"] = torch.zeros(2, 29, dtype=torch.bool, device=DEVICE)
    found = problem.run(TRITON)
    assert all(x.isfinite().all() for x in found.values()) and not found["output"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_stay_finite(dtype):
    """Of values that are all 1 the states are 0 but for rounding, which large queries multiply."""
    problem = on_device(make_sparse_problem((7, 9), 16, head_dim=16))
    tensors = problem.tensors | {"value": torch.ones_like(problem.tensors["value"])}
    tensors["query"] = 300 * tensors["query"]
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    found = TRITON(**tensors, **problem.settings)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=3e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("strided", [channels_not_last, expanded, every_other_token_and_not_aligned])
def test_strides(strided):
    torch.manual_seed(0)
    query, key, value = (x.to(DEVICE) for x in strided(2, 24, 2, 16))
    problem = on_device(make_sparse_problem((4, 6), 16, head_dim=16))

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (query, key, value)]
        output = TRITON(*leaves, **problem.settings)
        output.sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)


def test_nan_is_not_hidden():
    """In a key it reaches every query of its head, those that do not list its block through mean and state."""
    problem = on_device(make_sparse_problem((36,), 16, batch=1, head_dim=16))
    problem.tensors["key"][0, 6, 0, 3] = float("nan")
    found = TRITON(**problem.tensors, **problem.settings)
    assert found[0, :, 0].isnan().all() and not found[0, :, 1].isnan().any()


def test_nan_stays_in_its_sample():
    problem = by_content(batch=2, rotary=True)
    expected = problem.attend(backend="triton")
    for name, tensor in problem.tensors.items():
        with_nan = tensor.clone()
        with_nan[0, 5, 0, 2] = float("nan")
        found = problem.attend(backend="triton", **{name: with_nan})
        assert found[0].isnan().any() and torch.equal(found[1], expected[1]), name


COMPILED = {
    "given lists": {},
    "by content, text": {"constants": False, "extra": (2, 3)},
    "by content, means": {"constants": False, "far": "means"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compile_in_one_graph_forward_and_backward(options):
    """Lists are made outside, since a constructor may not look at values while a graph is traced."""
    problem = on_device(make_sparse_problem((5, 7), 16, head_dim=16, batch=1, mask=True, **options))
    compiled = torch.compile(lambda **given: TRITON(**given), fullgraph=True, backend="aot_eager")
    expected, found = problem.run(TRITON), problem.run(compiled)
    for one in expected:
        torch.testing.assert_close(found[one], expected[one])


def operator_calls(mask, with_states=True):
    """Every operator with arguments that fit."""
    make = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=make).to(DEVICE).requires_grad_()

    query, key, value = (random(2, 35 + 5, 2, 16) for _ in range(3))
    table = torch.randn(1, 40, 1, 16, generator=make).to(DEVICE)
    weights = (torch.rand(2, 40, generator=make) > 0.3).float().to(DEVICE) if mask else None
    place, scale = ([5, 7], 16, 5), 0.25
    whole = [5, 7], 16, 16, 5
    rows = prepare.prepare(query, key, value, table, weights, *whole, True, with_states)
    yield prepare.prepare, (query, key, value, table, weights, *whole, True, with_states)
    of_rows = [x.detach() for x in rows]
    gradients = *of_rows[:3], *of_rows[4:6], of_rows[8] if with_states else None
    of_keys = *of_rows[1:3], of_rows[7], table, weights
    yield prepare.prepare_backward, (*gradients[:3], of_rows[3], *gradients[3:], *of_keys, *whole, query.shape[2])
    yield prepare.block_weights, (of_rows[7], weights, *place)
    bias, of_blocks = prepare.block_weights(of_rows[7], weights, *place)
    bias = bias if mask else None
    chosen = of_rows[3], of_rows[4], of_rows[6], of_blocks, 0.4, scale, *place
    yield choose.choose, chosen
    indices, counts, bits = choose.choose(*chosen)
    q, k, v, pooled_query, pooled_key, pooled_value = (
        x.detach().contiguous().requires_grad_() for x in (rows[0][:, :48], *rows[1:6])
    )
    of_lists = q, k, v, bias, indices, counts, scale, *place, False
    yield listed.listed, of_lists
    of_means = q, pooled_key, pooled_value, of_blocks.log(), bits, scale
    yield pooled.pooled, of_means
    of_mixing = pooled_query, pooled_key, of_blocks, bits, scale, 16
    yield first_order.content_mixing, of_mixing
    mixing = first_order.content_mixing(*of_mixing).detach()
    detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in of_mixing)
    yield first_order.content_mixing_backward, (torch.randn_like(mixing), *detached)
    outputs = [x.detach() for x in (*listed.listed(*of_lists), *pooled.pooled(*of_means))]
    for operator, inputs, (output, lse) in (
        (listed.listed_backward, of_lists, outputs[:2]),
        (pooled.pooled_backward, of_means, outputs[2:]),
    ):
        detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
        yield operator, (torch.randn_like(output), torch.randn_like(lse) if mask else None, output, lse, *detached)
    mixed, gamma = (random(4, 3, 16, 16), torch.rand(4, device=DEVICE)) if with_states else (None, None)
    of_fit = None if mixed is None else mixed.detach()
    yield pooled.fit, (*(x.detach() for x in (q, k, v)), bias, *outputs, of_fit, scale, *place)
    of_merge = *(x.requires_grad_() for x in outputs), q, mixed, gamma, scale, [5, 7], 16, 2
    yield merge.merge, of_merge
    upstream = random(2, 35, 2, 16).detach()
    detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in of_merge)
    yield merge.merge_backward, (upstream, *detached)


@pytest.mark.parametrize(("mask", "with_states"), [(True, True), (False, False)])
def test_opcheck(mask, with_states):
    for operator, inputs in operator_calls(mask, with_states):
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
