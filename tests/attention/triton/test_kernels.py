"""The Triton kernels against the float64 reference: output and every gradient.

On a machine without a GPU they run through Triton's interpreter, on one with a GPU there.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, mhla_attention
from mhla_diffusers.attention.triton import tiles

from ..problems import (
    GRIDS,
    POSITIVE_MAPS,
    Problem,
    check_empty_sample,
    errors_against_reference,
    errors_of,
    make_problem,
    masked_problem,
    reference,
    relative_error,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The bound of the issue: IEEE float32 sums of positive terms stay far below it, tf32 (3e-4) far above.
FLOAT32_TOLERANCE = 1e-5
# Relative to the eager backend, which rounds once, at the end: the kernels round features and, in bfloat16, states too.
HALF_TO_EAGER = 2.5


def on_device(problem: Problem) -> Problem:
    def move(x):
        if isinstance(x, tuple):
            return tuple(map(move, x))
        if isinstance(x, BlockLists):
            return replace(x, keys=x.keys.to(DEVICE))
        return x.to(DEVICE) if isinstance(x, torch.Tensor) else x

    tensors, options = ({name: move(x) for name, x in d.items()} for d in (problem.tensors, problem.options))
    return Problem(tensors, problem.grid, problem.blocks, options)


TRITON = functools.partial(mhla_attention, backend="triton")


def check(problem, dtype=torch.float32, leave_out=(), attend=TRITON):
    problem = on_device(problem)
    found = errors_of(problem, dtype, attend)
    found = {name: error for name, error in found.items() if name not in leave_out}
    if dtype == torch.float32:
        allowed = dict.fromkeys(found, FLOAT32_TOLERANCE)
    else:
        eager = errors_against_reference(problem, dtype, "eager")
        allowed = {name: max(torch.finfo(dtype).eps, HALF_TO_EAGER * error) for name, error in eager.items()}
    for name, error in found.items():
        assert error <= allowed[name], f"{name}: relative error {error:.2e}, allowed {allowed[name]:.2e}"


EVERYTHING = {"rotary": True, "mask": True, "norm": True, "gate": True, "per_head": True}


@pytest.mark.parametrize(("grid", "blocks"), [case for case in GRIDS if math.prod(case[1]) <= 12 and len(case[0]) != 2])
def test_grids(grid, blocks):
    check(make_problem(grid, blocks, batch=1, rotary=True))


@pytest.mark.parametrize("feature_map", POSITIVE_MAPS)
@pytest.mark.parametrize("rope", [None, "after", "before"])
@pytest.mark.parametrize("normalize", [True, False])
def test_feature_maps_and_rope(feature_map, rope, normalize):
    options = {"rotary": True, "rope": rope} if rope else {}
    check(make_problem((5, 7), (2, 2), heads=1, feature_map=feature_map, normalize=normalize, **options))


@pytest.mark.parametrize("kind", ["linear", "sparse", "sparse by content", "extra", "causal by token"])
def test_a_sample_without_a_key_gets_nothing(kind):
    problem = on_device(masked_problem(kind))
    check_empty_sample(problem, functools.partial(problem.attention, backend="triton"))


def test_identity_feature_map_needs_no_normaliser():
    check(make_problem((7, 9), (2, 2), heads=1, feature_map="identity", normalize=False))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_everything_at_once(dtype, normalize):
    check(make_problem((5, 7, 3), (2, 3, 1), batch=1, head_dim=32, normalize=normalize, **EVERYTHING), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [1, 5, 72, 128, 200, 256])
def test_head_dims(head_dim, dtype):
    # with few channels normaliser and norm each cancel most of the query, and its gradient would be noise
    scaled = head_dim > 5
    options = {"rotary": head_dim % 2 == 0, "norm": scaled, "normalize": scaled}
    check(make_problem((5, 9), (1, 2), batch=1, heads=1, head_dim=head_dim, **options), dtype)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has its own tiles, which all other tests run with")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_tiles_of_a_real_card(head_dim, dtype, monkeypatch):
    """The interpreter's own tiles are smaller than those that Wan and DiT run with."""
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_90")
    problem = make_problem(
        (3, 5, 14), (1, 1, 2), batch=1, heads=1, head_dim=head_dim, rotary=True, mask=True, norm=True
    )
    check(problem, dtype)


@pytest.mark.parametrize("feature_map", ["elu+1", "softmax"])
def test_feature_maps_in_half_precision(feature_map):
    check(make_problem((7, 9), (2, 2), heads=1, head_dim=32, rotary=True, feature_map=feature_map), torch.bfloat16)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_floor_of_relu_counts_above_and_below(eps, dtype):
    """Every other query and key has no positive channel, so that all it says is the floor."""
    problem = make_problem((61,), (2,), batch=1, eps=eps)
    for name in ("query", "key"):
        problem.tensors[name][:, ::2] = -problem.tensors[name][:, ::2].abs()
    check(problem, dtype)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the entry of the interpreter is changed")
@pytest.mark.parametrize("feature_map", ["relu", "softmax"])
def test_states_read_in_parts(feature_map, monkeypatch):
    """As on cards with little shared memory, and for 256 channels."""
    monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, {"": ((16, 16, 4, 1),) * 4}))
    check(make_problem((49,), (2,), batch=1, heads=1, head_dim=40, feature_map=feature_map, rotary=True))


@pytest.mark.parametrize("head_dim", [24, 72, 112])
def test_softmax_of_very_negative_channels(head_dim):
    """Padded channels are no channels: beside inputs around -100 the exponential of 0 would be infinite."""
    problem = make_problem((3, 4), (1, 2), batch=1, heads=1, head_dim=head_dim, rotary=True, feature_map="softmax")
    shifted = {name: x - 100 if name in ("query", "key") else x for name, x in problem.tensors.items()}
    problem.options["rope"] = "after"
    check(Problem(shifted, problem.grid, problem.blocks, problem.options))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_long_block_is_shared_out(dtype, normalize):
    """Plain linear attention, M = 1: several programs, several tiles each, the last one partly empty."""
    problem = make_problem(
        (1187,), (1,), batch=1, heads=1, head_dim=32, rotary=True, mask=True, gate=True, normalize=normalize
    )
    # with the normaliser, the only entry of the mixing matrix cancels: its gradient is 0 and what is found is noise
    check(problem, dtype, leave_out=("mixing",) if normalize else ())


def test_parts_are_summed_in_the_same_order_every_time():
    problem = on_device(make_problem((1187,), (1,), batch=1, heads=1, head_dim=32))
    first, second = problem.run(TRITON), problem.run(TRITON)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes).filter(lambda b: math.prod(b) <= 6)))
    grid = tuple(count + draw(st.integers(0, 7)) for count in blocks)
    return make_problem(
        grid,
        blocks,
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 2)),
        head_dim=2 * draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**16)),
        rope=draw(st.sampled_from(["after", "before"])),
        feature_map=draw(st.sampled_from(POSITIVE_MAPS)),
        **{name: draw(st.booleans()) for name in (*EVERYTHING, "normalize")},
    )


# A drawn output norm may stand over a nearly zero output, or a row of features over a nearly zero normaliser, and then
# float32 itself is worse than the bound: such a draw is held to the eager backend's float32 error.
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_drawn_problems(problem, dtype):
    problem = on_device(problem)
    found = errors_against_reference(problem, dtype, "triton")
    eager = errors_against_reference(problem, dtype, "eager")
    for name, error in found.items():
        one_rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
        allowed = max(FLOAT32_TOLERANCE, one_rounding, HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def fused_projection(batch, tokens, heads, head_dim):
    return [x.unflatten(2, (heads, head_dim)) for x in torch.randn(batch, tokens, 3 * heads * head_dim).chunk(3, -1)]


def heads_before_tokens(batch, tokens, heads, head_dim):
    return [torch.randn(batch, heads, tokens, head_dim).transpose(1, 2) for _ in range(3)]


def channels_not_last(batch, tokens, heads, head_dim):
    return [torch.randn(batch, head_dim, tokens, heads).permute(0, 2, 3, 1) for _ in range(3)]


def expanded(batch, tokens, heads, head_dim):
    return [
        torch.randn(1, tokens, heads, head_dim).expand(batch, -1, -1, -1),
        torch.randn(batch, tokens, 1, head_dim).expand(-1, -1, heads, -1),
        torch.randn(batch, 1, heads, 1).expand(-1, tokens, -1, head_dim),
    ]


def every_other_token_and_not_aligned(batch, tokens, heads, head_dim):
    return [torch.randn(batch, 2 * tokens, heads, head_dim + 1)[:, ::2, :, 1:] for _ in range(3)]


@pytest.mark.parametrize(
    "strided",
    [fused_projection, heads_before_tokens, channels_not_last, expanded, every_other_token_and_not_aligned],
)
def test_strides(strided):
    torch.manual_seed(0)
    query, key, value = (x.to(DEVICE) for x in strided(2, 24, 2, 8))
    mixing, gate = torch.rand(4, 4, device=DEVICE), strided(2, 24, 2, 8)[0].to(DEVICE)
    before = [x.clone() for x in (query, key, value, gate)]

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in (query, key, value)]
        output = mhla_attention(*leaves, mixing, (4, 6), (2, 2), output_gate=gate, backend="triton")
        output.sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)
    for now, then in zip((query, key, value, gate), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_does_not_overflow(dtype):
    """ReLU features of magnitude 10 over 8 192 tokens: the KV summary reaches 8e5, beyond float16."""
    tokens = 8192
    query = torch.full((1, tokens, 1, 8), 10.0, dtype=dtype, device=DEVICE)
    value = torch.ones_like(query)
    output = mhla_attention(query, query, value, torch.ones(1, 1, device=DEVICE), (tokens,), (1,), backend="triton")
    assert torch.equal(output, value)


@pytest.mark.parametrize("feature_map", POSITIVE_MAPS)
def test_nan_is_not_hidden(feature_map):
    query, key, value = torch.randn(3, 1, 12, 1, 16, device=DEVICE)
    query[0, 5, 0, 3] = float("nan")
    output = mhla_attention(
        query, key, value, torch.ones(1, 1, device=DEVICE), (12,), (1,), feature_map=feature_map, backend="triton"
    )
    assert output[0, 5].isnan().all()
    assert output.isnan().any(dim=-1).sum() == 1


@pytest.mark.slow
def test_a_thousand_blocks():
    """The output alone: the interpreter takes a minute for it, and the gradients walk the blocks in the same way."""
    problem = on_device(make_problem((32, 33), (32, 32), batch=1, heads=1, head_dim=16))
    found = mhla_attention(**problem.tensors, grid=problem.grid, blocks=problem.blocks, backend="triton")
    expected = reference(**problem.tensors, grid=problem.grid, blocks=problem.blocks)
    assert relative_error(found, expected) <= FLOAT32_TOLERANCE
