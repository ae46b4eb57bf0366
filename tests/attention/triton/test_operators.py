"""Both attentions on the Triton kernels against the float64 reference: output and every gradient.

On a machine without a GPU they run through Triton's interpreter, on one with a GPU there. What the kernels write begins
as NaN (conftest.py).
"""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention, sparse_attention
from mhla_diffusers.attention.triton import tiles

from ..problems import (
    BEFORE,
    DEVICE,
    EVERYTHING,
    GRIDS,
    KERNEL_MAPS,
    TEXT_AND_MASK,
    drawn_problems,
    errors_against_reference,
    make_problem,
    make_sparse_problem,
    random_lists,
    relative_error,
)

pytestmark = pytest.mark.gpu
TRITON = partial(mhla_attention, backend="triton")
HALF = torch.bfloat16, torch.float16

# IEEE float32 sums of positive terms stay far below it, tf32 (3e-4) far above.
FLOAT32_TOLERANCE = 1e-5
# Relative to the eager backend, which rounds once, at the end: the kernels round features and, in bfloat16, states too.
HALF_TO_EAGER = 2.5
SUMS = ("linear_weight", "output_norm")
"""Of which rounded halves leave too little beside extra tokens, as in test_eager.py."""


def check(problem, dtype=torch.float32, *, is_hard=False, leave_out=()):
    """Hold output and gradients to their bounds; a hard problem, for which float32 is worse, to eager's errors.

    Such is an output norm over a nearly zero output, or a row of features over a nearly zero normaliser.
    """
    problem = problem.to()
    found = errors_against_reference(problem, dtype, "triton")
    eager = errors_against_reference(problem, dtype, "eager")
    is_mhla_alone = problem.blocks is not None and not {"extra", "causal"} & set(problem.options)
    if dtype in HALF and "extra" in problem.options:
        leave_out = (*leave_out, *SUMS)
    for name in set(found) - set(leave_out):
        if dtype == torch.float32:
            allowed = max(FLOAT32_TOLERANCE, is_hard * HALF_TO_EAGER * eager[name])
        else:  # beside MHLA queries and keys are rounded after RoPE too
            roundings = 1 if is_mhla_alone else 2
            allowed = max(roundings * torch.finfo(dtype).eps, HALF_TO_EAGER * eager[name])
        assert found[name] <= allowed, f"{name}: relative error {found[name]:.2e}, allowed {allowed:.2e}"


MHLA = {
    **{f"{g} in {m}": (g, m, {"batch": 1, "rotary": True}) for g, m in (*GRIDS[:2], *GRIDS[5:])},
    **{
        f"{feature_map}, {rope.get('rope')}, normalised {normalize}": (
            (5, 7), (2, 2), {"heads": 1, "feature_map": feature_map, "normalize": normalize, **rope}
        )
        for feature_map in KERNEL_MAPS for rope in ({}, BEFORE, {"rotary": True, "rope": "after"})
        for normalize in (True, False)
    },
    "identity": ((7, 9), (2, 2), {"heads": 1, "feature_map": "identity", "normalize": False}),
    "angles of every sample": ((5, 7), (2, 2), {"heads": 1, "rotary": "own"}),
    # with few channels normaliser and norm each cancel most of the query, and its gradient would be noise
    **{
        f"{d} channels": ((5, 9), (1, 2), {
            "batch": 1, "heads": 1, "head_dim": d, "rotary": d % 2 == 0, "norm": d > 5, "normalize": d > 5
        })
        for d in (1, 5, 72, 128, 200, 256)
    },
}  # fmt: skip


@pytest.mark.parametrize(("grid", "blocks", "options"), MHLA.values(), ids=MHLA)
def test_mhla(grid, blocks, options):
    check(make_problem(grid, blocks, **options))


TEXT = {
    "rotary": {"rotary": True, "per_head": True},
    "rotary before": {**BEFORE, "gate": True, "extra": (70, 30)},
    "mask, a weight": {"mask": True, "batch": 2, "linear_branch": True, "norm": True},
    # of 64 queries, which MHLA's blocks are not cut by
    "several blocks of rows": {**BEFORE, "extra": (0, 21), "mask": True, "grid": (5, 7, 3), "blocks": (2, 2, 2)},
}


@pytest.mark.parametrize("options", TEXT.values(), ids=TEXT)
def test_mhla_beside_extra_tokens(options):
    given = {"grid": (5, 7), "blocks": (2, 2), "batch": 1, "head_dim": 16, "extra": (2, 3)} | options
    check(make_problem(**given), is_hard=True)


# With relu and RoPE after it, the few tokens that a query sees at the begin of a sequence may have nearly no normaliser
# beside large weights: outputs would pass the largest float16, and errors would be those of the problem. elu+1 has one.
AFTER = {"rotary": True, "feature_map": "elu+1"}
LINEAR, SOFTMAX = {}, {"linear_branch": True}
CAUSAL = [
    # whole sequence, blocks, tokens: blocks of two lengths, cut, one token, first block, one token a block
    *((whole, blocks, {"tokens": n, **own})
      for whole, blocks, n in ((17, 5, 17), (17, 5, 9), (32, 4, 1), (9, 1, 3), (7, 7, 7)) for own in (LINEAR, SOFTMAX)),
    # blocks of several tiles: 141 and 140 tokens, of which the sequence has the first block and a part of the second
    *((281, 2, {"tokens": 220, "mask": True, "head_dim": 16, **own}) for own in (AFTER, SOFTMAX)),
    *((13, 3, {"head_dim": 12, "feature_map": name, **BEFORE}) for name in KERNEL_MAPS),
    (13, 3, {"head_dim": 12, **AFTER}),
    *((13, 3, {"rotary": True, "rope": rope, "normalize": False, "norm": True, "per_head": True, "heads": 2})
      for rope in ("after", "before")),
    *((13, 4, {"batch": 2, "heads": 2, "mask": True, "norm": True, "gate": True, **own})
      for own in ({"per_head": True}, SOFTMAX | BEFORE)),
    # With one channel the normaliser cancels the query: its gradient would be 0 and its error noise. Of a mixing entry
    # near 0 the gradient is the rest of D² products that cancel; seed 0 draws one of 0.01.
    *((9, 2, {"head_dim": d, "seed": 1, "normalize": d > 1 or bool(own), **own})
      for d in (1, 5, 72) for own in (LINEAR, SOFTMAX)),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "blocks", "options"), CAUSAL, ids=str)
def test_causal_by_token(whole, blocks, options):
    check(make_problem((whole,), (blocks,), causal="token", **{"batch": 1, "heads": 1} | options), is_hard=True)


@pytest.mark.parametrize("options", [LINEAR, SOFTMAX | {"rotary": True, "norm": True}], ids=["linear", "softmax"])
def test_causal_by_block(options):
    problem = make_problem((5, 3, 4), (3, 2, 1), causal="block", batch=2, heads=1, tokens=48, **options)
    check(problem, is_hard=True)


LONG = {"grid": (5, 7, 8), "density": 0.1}
"""280 tokens: a stretch of 256 keys, and one that the end cuts."""
WIDE = {"grid": (9, 19), "extra": (0, 37)}
SPARSE = {
    "means": {"far": "means"},
    "empty lists": {"density": 0.0},
    "all listed": {"density": 1.1},
    "along the curve": {"order": "curve", "mask": True},
    "text": {"extra": (0, 17), "heads": 2},
    "text and mask": {**TEXT_AND_MASK, "rotary": True, "batch": 2},
    "weights of keys": {"mask": "weights", "grid": (6, 6)},
    # whose bits fill a word and a part
    "35 key blocks": {"grid": (557,), "size": 64, "key_size": 16, "density": 0.05},
    "5 channels": {"head_dim": 5},
    "72 channels, rotary": {"head_dim": 72, "rotary": True},
    "128 channels": {"head_dim": 128, "rotary": True},
    **{f"blocks of {size}": {"size": size, "grid": (9, 9), "rotary": True} for size in (32, 64, 128)},
    # several entries of a list make one tile; the last tile and the blocks with padding are cut
    **{f"{n} keys in {size}": WIDE | {"size": size, "key_size": n} for size, n in ((64, 16), (128, 32), (128, 64))},
    "stretches": LONG | {"size": 16},
    "stretches, mask": LONG | {"size": 64, "key_size": 32, "mask": True},
    "stretches, text": LONG | {"size": 128, "key_size": 32, "rotary": True, "extra": (0, 5)},
    "stretches, curve": LONG | {"size": 64, "order": "curve"},
    "lists of every sample": {
        "lists": random_lists((5, 7), 16, 16, density=0.4, samples=2, seed=3),
        "batch": 2,
        "heads": 2,
    },
}


@pytest.mark.parametrize("options", SPARSE.values(), ids=SPARSE)
def test_given_lists(options):
    check(make_sparse_problem(**{"grid": (5, 7), "size": 16, "batch": 1, "heads": 1, "head_dim": 16} | options))


def test_logits_far_below_zero():
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    problem = make_sparse_problem((5, 7), 16, key_size=16, batch=1, heads=1, head_dim=16, extra=(0, 9))
    problem.tensors["query"] = 8 * problem.tensors["query"].abs()
    problem.tensors["key"] = -8 * problem.tensors["key"].abs()
    check(problem, is_hard=True)


LOW = {
    "everything": (make_problem, (5, 7, 3), (2, 3, 1), EVERYTHING),
    "everything, not normalised": (make_problem, (5, 7, 3), (2, 3, 1), EVERYTHING | {"normalize": False}),
    "elu+1": (make_problem, (7, 9), (2, 2), {"rotary": True, "feature_map": "elu+1"}),
    **{
        f"{d} channels": (make_problem, (5, 9), (1, 2), {"head_dim": d, "rotary": True, "norm": True})
        for d in (72, 128, 256)
    },
    "text": (make_problem, (5, 7), (2, 2), EVERYTHING | {"extra": (2, 3), "linear_branch": True}),
    "text, before": (make_problem, (5, 7), (2, 2), EVERYTHING | BEFORE | {"extra": (2, 3), "linear_branch": True}),
    "causal": (make_problem, (23,), (2,), AFTER | {"causal": "token"}),
    "causal, before": (make_problem, (23,), (2,), BEFORE | {"mask": True, "causal": "token"}),
    "causal, softmax": (make_problem, (23,), (2,), BEFORE | SOFTMAX | {"causal": "token"}),
    "lists": (make_sparse_problem, (9, 19), 64, {"key_size": 32, "rotary": True, **TEXT_AND_MASK}),
    "lists, means": (
        make_sparse_problem,
        (9, 19),
        64,
        {"key_size": 32, "rotary": True, "far": "means", **TEXT_AND_MASK},
    ),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("make", "grid", "size", "options"), LOW.values(), ids=LOW)
def test_half_precision(make, grid, size, options, dtype):
    check(make(grid, size, **{"batch": 1, "heads": 1, "head_dim": 32} | options), dtype)


@pytest.mark.parametrize("kind", ["MHLA", "text", "causal", "sparse"])
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_drawn_problems(kind, data):
    check(data.draw(drawn_problems(kind, kernels=True)), is_hard=True)


@pytest.mark.parametrize(
    ("dtype", "normalize"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
)
def test_one_long_block_is_shared_out(dtype, normalize):
    """Plain linear attention, M = 1: several programs, several tiles each, the last one partly empty."""
    options = {"rotary": True, "mask": True, "gate": True, "normalize": normalize}
    problem = make_problem((1187,), (1,), batch=1, heads=1, head_dim=16, **options)
    # with the normaliser, the only entry of the mixing matrix cancels: its gradient is 0 and what is found is noise
    check(problem, dtype, leave_out=("mixing",) if normalize else ())


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_floor_of_relu_counts_above_and_below(eps, dtype):
    """Every other query and key has no positive channel, so that all it says is the floor."""
    problem = make_problem((61,), (2,), batch=1, eps=eps)
    for name in ("query", "key"):
        problem.tensors[name][:, ::2] = -problem.tensors[name][:, ::2].abs()
    check(problem, dtype)


needs_interpreter = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU has its own tiles, with which all else runs"
)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_tiles_of_a_real_card(head_dim, dtype, monkeypatch):
    """The interpreter's own tiles are smaller than those that Wan and DiT run with."""
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_90")
    options = {"batch": 1, "heads": 1, "head_dim": head_dim, "rotary": True, "mask": True}
    check(make_problem((3, 5, 14), (1, 1, 2), norm=True, **options), dtype)
    check(make_sparse_problem((9, 19), 64, key_size=32, extra=(0, 9), **options), dtype)


@needs_interpreter
def test_states_read_in_parts(monkeypatch):
    """As on cards with little shared memory, and for 256 channels."""
    monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, {"": ((16, 16, 4, 1),) * 4}))
    check(make_problem((49,), (2,), batch=1, heads=1, head_dim=40, rotary=True))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_does_not_overflow(dtype):
    """ReLU features of magnitude 10 over 8 192 tokens: the KV summary reaches 8e5, beyond float16."""
    query = torch.full((1, 8192, 1, 8), 10.0, dtype=dtype, device=DEVICE)
    value = torch.ones_like(query)
    assert torch.equal(TRITON(query, query, value, torch.ones(1, 1, device=DEVICE), (8192,), (1,)), value)


# Sparse attention by content


BY_CONTENT = {
    "text and mask": {"rotary": True, "extra": (0, 21), "mask": True, "batch": 2},
    "means": {"far": "means", "mask": True},
    "72 channels": {"head_dim": 72, "rotary": True, "heads": 1},
    "along the curve": {"order": "curve"},
    "stretches, text": LONG | {"size": 64, "extra": (3, 20), "mask": True},
    "keys in 32": LONG | {"size": 64, "key_size": 32, "rotary": True, "heads": 1},
    "blocks of 128": LONG | {"size": 128, "key_size": 32, "heads": 1},
}


def by_content(**options):
    """A call that chooses lists, β and γ."""
    given = {"grid": (3, 5, 7), "size": 16, "key_size": 16, "head_dim": 16, "batch": 1, "density": 0.3} | options
    return make_sparse_problem(constants=False, **given).to()


@pytest.mark.parametrize("options", BY_CONTENT.values(), ids=BY_CONTENT)
def test_by_content(options):
    """Output and gradients where lists, β and γ are found, against eager operations in float64.

    γ is a quotient of float32 sums, whose rounding it shares among all.
    """
    problem = by_content(**options)
    expected = problem.run(sparse_attention, torch.float64, backend="eager")
    for name, found in problem.run(sparse_attention, backend="triton").items():
        error = relative_error(found, expected[name])
        assert error < 3e-5, f"{name}: relative error {error:.2e}"
