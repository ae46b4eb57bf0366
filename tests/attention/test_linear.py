"""The eager backend against the float64 reference: output and every gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import feature_map_names, mhla_attention
from mhla_diffusers.attention.feature_maps import get_feature_map

from .problems import GRIDS, POSITIVE_MAPS, errors_against_reference, make_problem

# float32: some hundred roundings of 6e-8 in sums of positive terms. bfloat16 and float16: one rounding of the result
# (and of its gradient) to 8 or 11 significant bits, so 2**-9 and 2**-12 per element; the bounds are twice that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(("grid", "blocks"), GRIDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grids(grid, blocks, dtype):
    check(make_problem(grid, blocks), dtype)


@pytest.mark.parametrize("feature_map", POSITIVE_MAPS)
@pytest.mark.parametrize("rope", [None, "after", "before"])
@pytest.mark.parametrize("normalize", [True, False])
def test_feature_maps_and_rope(feature_map, rope, normalize):
    options = {"rotary": True, "rope": rope} if rope else {}
    check(make_problem((5, 7, 3), (2, 3, 2), feature_map=feature_map, normalize=normalize, **options))


def test_identity_feature_map_needs_no_normaliser():
    assert "identity" in feature_map_names()
    check(make_problem((7, 9), (3, 4), feature_map="identity", normalize=False))


def test_everything_at_once():
    check(
        make_problem((5, 7, 3), (2, 3, 2), rotary=True, mask=True, norm=True, gate=True, per_head=True, normalize=False)
    )


@st.composite
def problems(draw):
    axes = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes)))
    grid = tuple(count + draw(st.integers(0, 5)) for count in blocks)
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask", "norm", "gate", "per_head", "normalize")}
    return make_problem(
        grid,
        blocks,
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 2**16)),
        rope=draw(st.sampled_from(["after", "before"])),
        feature_map=draw(st.sampled_from(POSITIVE_MAPS)),
        **flags,
    )


@settings(max_examples=40, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    # float64, so that an ill-conditioned draw (an output norm over a nearly zero output) needs no loose bound
    for name, error in errors_against_reference(problem, torch.float64, "eager").items():
        assert error <= 1e-9, f"{name}: relative error {error:.2e}"


def test_non_contiguous_inputs_are_not_changed():
    qkv = torch.randn(2, 24, 3 * 2 * 8)
    before = qkv.clone()
    q, k, v = (x.unflatten(2, (2, 8)) for x in qkv.chunk(3, dim=-1))
    mixing = torch.rand(4, 4)
    views = mhla_attention(q, k, v, mixing, (4, 6), (2, 2))
    copies = mhla_attention(q.contiguous(), k.contiguous(), v.contiguous(), mixing, (4, 6), (2, 2))
    assert torch.equal(qkv, before)
    assert torch.equal(views, copies)


@pytest.mark.parametrize("most", [1, 8 * 8 * 3 * 4])
def test_without_gradients_blocks_are_worked_on_in_parts_without_a_trace(most, monkeypatch):
    """A token, and four tokens at once."""
    problem = make_problem((5, 7, 3), (3, 3, 2), heads=3, rotary=True, mask=True, gate=True)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in problem.tensors.items()}

    def run():
        with torch.no_grad():
            return mhla_attention(**inputs, grid=(5, 7, 3), blocks=(3, 3, 2), **problem.options)

    whole = run()
    monkeypatch.setattr("mhla_diffusers.attention.linear._CACHED_BYTES", most)
    monkeypatch.setattr("mhla_diffusers.attention.linear._MOST_BYTES", most)
    torch.testing.assert_close(run(), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_a_sequence_shorter_than_its_grid_keeps_to_the_budget(tokens, monkeypatch):
    """Fewer tokens than the first axis has too; counted are what the feature map is given at once."""
    seen = []

    def counted(name):
        phi = get_feature_map(name)
        return lambda x, eps: (seen.append(x.numel() * x.element_size()), phi(x, eps))[1]

    monkeypatch.setattr("mhla_diffusers.attention.linear.get_feature_map", counted)
    for budget in (4 * 8 * 2 * 4, 4 * 8 * 2 * 64):  # 4 and 64 tokens
        for name in ("_CACHED_BYTES", "_MOST_BYTES"):
            monkeypatch.setattr(f"mhla_diffusers.attention.linear.{name}", budget)
        query = torch.randn(1, tokens, 2, 8)
        with torch.no_grad():
            mhla_attention(query, query, query, torch.rand(4, 4), (64, 2), (4, 1), causal="block", backend="eager")
        assert max(seen) <= budget
        seen.clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype):
    """ReLU features of magnitude 10 over 131 072 tokens: the KV summary reaches 1e7, beyond float16."""
    tokens = 131072
    query = torch.full((1, tokens, 1, 8), 10.0, dtype=dtype)
    value = torch.randn(1, tokens, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    output = mhla_attention(query, query, value, torch.full((16, 16), 1 / 16), (tokens,), (16,))
    expected = value.double().mean(dim=1, keepdim=True).expand_as(value)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_autocast_does_not_lower_the_accumulation():
    problem = make_problem((6, 8), (2, 4))
    plain = problem.run(mhla_attention)
    with torch.autocast("cpu", torch.bfloat16):
        cast = problem.run(mhla_attention)
    assert torch.equal(plain["output"], cast["output"])


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, (1, 1, 1)), (torch.bfloat16, (7, 3, 5))], ids=str)
def test_memory_is_linear_in_tokens(dtype, blocks):
    """Peak working memory of the forward is at most 4 times the bytes of query, key and value, at two lengths."""
    for frames in (21, 42):
        shape = (1, frames * 30 * 50, 4, 64)
        inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
        mixing = torch.rand(2 * [math.prod(blocks)])
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            mhla_attention(*inputs, mixing, (frames, 30, 50), blocks)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        assert peak > 0
        assert peak <= 4 * sum(x.nbytes for x in inputs)


@pytest.mark.parametrize("normalize", [True, False])
def test_bits_do_not_depend_on_whether_the_mixing_matrix_takes_gradients(normalize):
    """LoRA freezes the matrix; torch.matmul multiplies in another order where a shared one takes gradients."""
    problem = make_problem((8, 8), (4, 2), normalize=normalize, head_dim=16)
    with torch.no_grad():
        frozen, learnable = (
            mhla_attention(
                **problem.tensors | {"mixing": problem.tensors["mixing"].clone().requires_grad_(learns)},
                grid=problem.grid,
                blocks=problem.blocks,
                **problem.options,
            )
            for learns in (False, True)
        )
    assert torch.equal(frozen, learnable)


def test_second_derivatives():
    """The kernels have none and send their user here."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 12, 1, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    inputs.append(torch.rand(4, 4, dtype=torch.float64, generator=generator, requires_grad=True))
    assert torch.autograd.gradgradcheck(lambda *x: mhla_attention(*x, (12,), (4,), backend="eager"), inputs)
