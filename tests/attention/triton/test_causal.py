"""Causal attention on the kernels against the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import MHLACall, eager
from mhla_diffusers.attention.causal import with_causal_mixing
from mhla_diffusers.attention.triton import backend

from ..problems import POSITIVE_MAPS, errors_against_reference, make_problem, reference
from ..test_causal import of_length, streamed
from .test_kernels import FLOAT32_TOLERANCE, HALF_TO_EAGER, TRITON, on_device

pytestmark = pytest.mark.gpu

# With relu and RoPE after it, the few tokens that a query sees at the begin of a sequence may have nearly no normaliser
# beside large weights: outputs would pass the largest float16, and errors would be those of the problem. elu+1 has one.
AFTER = {"rotary": True, "feature_map": "elu+1"}
BEFORE = {"rotary": True, "rope": "before"}


def check(problem, dtype=torch.float32):
    """Held to the bounds of all kernels; where float32 itself is worse, to what the eager backend's is."""
    problem = on_device(problem)
    eager = errors_against_reference(problem, dtype, "eager")
    for name, error in errors_against_reference(problem, dtype, "triton").items():
        # queries and keys are rounded after RoPE too
        least = FLOAT32_TOLERANCE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        allowed = max(least, HALF_TO_EAGER * eager[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def sequence(tokens, blocks, *, whole=None, **options):
    """``tokens`` of a sequence whose longest one has ``whole``."""
    options = {"batch": 1, "heads": 1} | options
    return of_length(make_problem((whole or tokens,), (blocks,), causal="token", **options), tokens)


@pytest.mark.parametrize("own", [{}, {"linear_branch": True}], ids=["linear", "softmax"])
@pytest.mark.parametrize(
    ("tokens", "whole", "blocks"),
    [(17, 17, 5), (9, 17, 5), (1, 32, 4), (3, 9, 1), (7, 7, 7)],
    ids=["lengths", "ends inside", "one token", "first block", "one a block"],
)
def test_lengths(tokens, whole, blocks, own):
    check(sequence(tokens, blocks, whole=whole, **own))


@pytest.mark.parametrize("options", [AFTER, {"linear_branch": True}], ids=["linear", "softmax"])
def test_blocks_of_several_tiles(options):
    """141 and 140 tokens, of which the sequence has the first block and a part of the second."""
    check(sequence(220, 2, whole=281, mask=True, head_dim=16, **options))


@pytest.mark.parametrize("feature_map", POSITIVE_MAPS)
@pytest.mark.parametrize("rope", [None, "after", "before"])
def test_feature_maps_and_rope(feature_map, rope):
    options = {"rotary": True, "rope": rope} if rope else {}
    problem = sequence(13, 3, head_dim=12, feature_map=feature_map, **options)
    if feature_map == "relu" and rope == "after":
        # else the first tokens have nearly no normaliser: what cancels in their rotated product is 1e6 times as much,
        # and products in three terms of TF32, which keep 21 bits, were 4 times as far off as float32
        problem.tensors |= {name: problem.tensors[name] + 1 for name in ("query", "key")}
    check(problem)


@pytest.mark.parametrize("rope", ["after", "before"])
def test_without_normaliser(rope):
    check(sequence(13, 3, rotary=True, rope=rope, normalize=False, norm=True, per_head=True, heads=2))


@pytest.mark.parametrize("options", [{"per_head": True}, {"linear_branch": True, **BEFORE}], ids=["linear", "softmax"])
def test_everything_at_once(options):
    check(sequence(13, 4, batch=2, heads=2, mask=True, norm=True, gate=True, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [AFTER, {**BEFORE, "mask": True}, {"linear_branch": True, **BEFORE}], ids=str)
def test_half_precision(options, dtype):
    check(sequence(23, 2, head_dim=32, **options), dtype)


@pytest.mark.parametrize("head_dim", [1, 5, 72])
@pytest.mark.parametrize("options", [{}, {"linear_branch": True}], ids=["linear", "softmax"])
def test_head_dims(head_dim, options):
    # with one channel the normaliser cancels the query: its gradient would be 0 and its error noise
    scaled = {"normalize": False} if head_dim == 1 and not options else {}
    # of a mixing entry near 0 the gradient is the rest of D² products that cancel; seed 0 draws one of 0.01, whose rest
    # at D = 256 is a 5000th of them, so that float32 itself came near the bound
    check(sequence(9, 2, head_dim=head_dim, seed=1, **options, **scaled))


@pytest.mark.parametrize(
    "options", [{}, {"linear_branch": True, "rotary": True, "norm": True}], ids=["linear", "softmax"]
)
def test_frame_blocks(options):
    check(of_length(make_problem((5, 3, 4), (3, 2, 1), causal="block", batch=2, heads=1, **options), 48))


@pytest.mark.parametrize("causal", ["token", "block"])
@pytest.mark.parametrize("options", [BEFORE, {"linear_branch": True, "mask": True}], ids=["linear", "softmax"])
def test_a_state_goes_on_with_the_kernels(causal, options):
    grid, blocks = ((13,), (4,)) if causal == "token" else ((4, 2, 3), (2, 1, 3))
    problem = on_device(make_problem(grid, blocks, causal=causal, batch=1, heads=1, **options))
    expected = problem.run(reference, torch.float64)["output"]
    cuts = [5, 6, 7, 13] if causal == "token" else [12, 24]
    found, _ = streamed(problem, cuts, dtype=torch.float32, backend="triton")
    assert (found - expected).norm() <= FLOAT32_TOLERANCE * expected.norm()


@st.composite
def problems(draw):
    blocks = draw(st.integers(1, 4))
    whole = blocks + draw(st.integers(0, 20))
    kind = draw(st.sampled_from([{"linear_branch": True, "rotary": True}, AFTER, BEFORE, {"feature_map": "softmax"}]))
    flags = {name: draw(st.booleans()) for name in ("mask", "per_head", "gate")}
    head_dim, seed = 2 * draw(st.integers(1, 12)), draw(st.integers(0, 99))
    return sequence(draw(st.integers(1, whole)), blocks, whole=whole, head_dim=head_dim, seed=seed, **kind, **flags)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(problem):
    check(problem)


@pytest.mark.parametrize("options", [{"rotary": True}, {"mask": True}], ids=["RoPE", "key mask"])
def test_the_own_part_is_that_of_the_eager_backend(options):
    """Output, log of the sum of weights and their gradients."""
    problem = on_device(of_length(make_problem((14,), (3,), batch=1, linear_branch=True, **options), 11))
    tensors = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    options = problem.options | {"causal": "token"}
    call = with_causal_mixing(MHLACall(**tensors, grid=problem.grid, blocks=problem.blocks, **options))
    results = []
    for attend in (backend.own_block, eager.own_block):
        found = attend(call)
        upstream = [torch.ones_like(x) * torch.arange(x.shape[1], device=x.device)[:, None, None] for x in found]
        results.append([*found, *torch.autograd.grad(found, [call.query, call.key, call.value], upstream)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= FLOAT32_TOLERANCE * expected.norm()


@pytest.mark.parametrize("scale", [1e4])
def test_huge_scores(scale):
    """Softmax that is one key's alone, beside a linear branch that is nothing: no infinity meets another."""
    problem = sequence(12, 3, linear_branch=True)
    problem.tensors["query"] *= scale
    found = on_device(problem).run(TRITON)
    assert all(x.isfinite().all() for x in found.values())
    expected = on_device(problem).run(reference, torch.float64)["output"]
    assert (found["output"] - expected).norm() <= scale * FLOAT32_TOLERANCE * expected.norm()
