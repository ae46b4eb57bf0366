"""Both backends against the float64 reference: output and every gradient of all kinds of calls.

Without a GPU the kernels run through Triton's interpreter. What they write begins as NaN (conftest.py).
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention, sparse_attention
from mhla_diffusers.attention.triton import tiles

from .problems import (
    BEFORE,
    DEVICE,
    EVERYTHING,
    GRIDS,
    KERNEL_MAPS,
    KINDS,
    TEXT_AND_MASK,
    drawn_problems,
    errors_of,
    make_problem,
    make_sparse_problem,
    problem_of,
    random_lists,
    relative_error,
)

# float32: some hundred roundings of 6e-8 in sums of positive terms. bfloat16 and float16: one rounding of the result
# (and of its gradient) to 8 or 11 significant bits, so 2**-9 and 2**-12 per element; the bounds are twice that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# sums of a few dozen terms; weights of the own block are rounded before they are summed up
OF_CAUSAL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
SUMS = ("mixing", "linear_weight", "output_norm")
"""Tensors whose gradients in causal attention sum products of both signs, which cancel and so lose more precision."""
# of kernels: IEEE float32 sums of positive terms stay far below it, tf32 (3e-4) far above
KERNEL_TOLERANCE = 1e-5
# relative to the eager backend, which rounds once, at the end: the kernels round features and, in bfloat16, states too
TO_EAGER = 2.5
HALF = torch.bfloat16, torch.float16


def check(problem, dtype=torch.float32, backend="triton", *, attend=None, is_hard=False, leave_out=()):
    """Hold output and gradients of a backend, or of ``attend``, to their bounds.

    Hard is an output norm over a nearly zero output, or a row of features over a nearly zero normaliser; float32 is
    worse for it, so kernels are held to eager's errors.
    """
    problem, is_causal = problem.to(), "causal" in problem.options
    found = errors_of(problem, dtype, attend or partial(problem.attention, backend=backend))
    eager = {} if backend == "eager" else errors_of(problem, dtype, partial(problem.attention, backend="eager"))
    for name in set(found) - set(leave_out):
        if backend == "eager":
            allowed = (OF_CAUSAL if is_causal else TOLERANCE)[dtype] * (3 if is_causal and name in SUMS else 1)
            allowed = 1e-9 if is_hard else allowed
        elif dtype == torch.float32:
            allowed = max(KERNEL_TOLERANCE, is_hard * TO_EAGER * eager[name])
        else:  # beside MHLA queries and keys are rounded after RoPE too
            roundings = 1 if problem.blocks is not None and not is_causal else 2
            allowed = max(roundings * torch.finfo(dtype).eps, TO_EAGER * eager[name])
        assert found[name] <= allowed, f"{name}: relative error {found[name]:.2e}, allowed {allowed:.2e}"


# Problems: name → grid, blocks or block size, and options

RAGGED, LONG = ((7, 9), (3, 4)), ((5, 7, 29), 32)
"""LONG has 1,015 tokens: with key blocks of 16, three stretches of 16 blocks and one of 15 and a half; and more logits
than are formed at once, of one head too."""
MAPS = {
    f"{feature_map}, {rope.get('rope')}, normalised {normalize}": {
        "feature_map": feature_map, "normalize": normalize, **rope
    }
    for feature_map in KERNEL_MAPS for rope in ({}, BEFORE, {"rotary": True, "rope": "after"})
    for normalize in (True, False)
}  # fmt: skip
IDENTITY = {"feature_map": "identity", "normalize": False}
SOFTMAX = {"linear_branch": True}
EAGER = {
    **{f"{grid} in {blocks}": (grid, blocks, {}) for grid, blocks in GRIDS},
    "identity": (*RAGGED, IDENTITY),
    "everything, not normalised": ((5, 7, 3), (2, 3, 2), EVERYTHING | {"normalize": False}),
    "angles of every sample": (*RAGGED, BEFORE | {"rotary": "own", "mask": "weights"}),
    **{f"stretches, {more}": (*LONG, {"key_size": 16, "density": 0.5, "rotary": True, "batch": 1} | more)
       for more in ({"mask": True}, {"extra": (2, 3)})},
    "weights of keys": ((5, 7, 3), 16, {"key_size": 4, "mask": "weights"}),
    "text, angles of every sample": ((5, 6), 6, {"key_size": 2, "rotary": "own", "extra": (70, 30)}),
    "lists of every sample": (
        (7, 5), 8, {"extra": (2, 3), "lists": random_lists((7, 5), 8, 8, density=0.4, samples=2)}
    ),
}  # fmt: skip
"""What neither :data:`KINDS` nor drawn problems have."""
ONE = {"batch": 1, "heads": 1}
KERNEL_MHLA = {
    **{f"{g} in {m}": (g, m, {"batch": 1, "rotary": True}) for g, m in (*GRIDS[:2], *GRIDS[5:])},
    **{
        name: ((5, 7), (2, 2), {"heads": 1, **options})
        for name, options in MAPS.items()
    },
    "identity": ((7, 9), (2, 2), {"heads": 1, **IDENTITY}),
    "angles of every sample": ((5, 7), (2, 2), {"heads": 1, "rotary": "own"}),
    # with few channels normaliser and norm each cancel most of the query, and its gradient would be noise
    **{
        f"{d} channels": ((5, 9), (1, 2), ONE | {
            "head_dim": d, "rotary": d % 2 == 0, "norm": d > 5, "normalize": d > 5
        })
        for d in (1, 5, 72, 128, 200, 256)
    },
}  # fmt: skip
# With relu and RoPE after it, the few tokens that a query sees at the begin of a sequence may have nearly no normaliser
# beside large weights: outputs would pass the largest float16, and errors would be those of the problem. elu+1 has one.
AFTER = {"rotary": True, "feature_map": "elu+1"}
KERNEL_CAUSAL = {
    # blocks of two lengths, cut, one token, first block, one token a block
    **{
        f"{n} of {whole} in {blocks}, {own}": ((whole,), (blocks,), ONE | {"causal": "token", "tokens": n, **own})
        for whole, blocks, n in ((17, 5, 17), (17, 5, 9), (32, 4, 1), (9, 1, 3), (7, 7, 7)) for own in ({}, SOFTMAX)
    },
    # blocks of several tiles: 141 and 140 tokens; the sequence ends within the second
    **{f"several tiles, {own}": ((281,), (2,), ONE | {"causal": "token", "tokens": 220, "head_dim": 16, **own})
       for own in (AFTER, SOFTMAX)},
    "not normalised": ((13,), (3,), {
        "causal": "token", "batch": 1, "rotary": True, "normalize": False, "norm": True, "per_head": True
    }),
    # Of a mixing entry near 0 the gradient is the rest of D² products that cancel; seed 0 draws one of 0.01.
    **{f"{d} channels": ((9,), (2,), ONE | {"causal": "token", "head_dim": d, "seed": 1, **SOFTMAX})
       for d in (1, 5, 72)},
    **{
        f"by block, {options}": ((5, 3, 4), (3, 2, 1), {"heads": 1, "causal": "block", "tokens": 48, **options})
        for options in ({}, SOFTMAX | {"rotary": True, "norm": True}, SOFTMAX | BEFORE | {"gate": True})
    },
}  # fmt: skip
STRETCHES = {"grid": (5, 7, 8), "density": 0.1}
"""280 tokens: a stretch of 256 keys, and one that the end cuts."""
WIDE = {"grid": (9, 19), "extra": (0, 37)}
KERNEL_SPARSE = {
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
    "stretches": STRETCHES | {"size": 16},
    "stretches, mask": STRETCHES | {"size": 64, "key_size": 32, "mask": True},
    "stretches, text": STRETCHES | {"size": 128, "key_size": 32, "rotary": True, "extra": (0, 5)},
    "stretches, curve": STRETCHES | {"size": 64, "order": "curve"},
    "lists of every sample": {
        "lists": random_lists((5, 7), 16, 16, density=0.4, samples=2, seed=3), "batch": 2, "heads": 2
    },
}  # fmt: skip


def of_kernels(grid=(5, 7), size=16, **options):
    """A problem that the interpreter runs in a second."""
    return grid, size, {"head_dim": 16, **ONE, **options}


KERNEL_SPARSE = {name: of_kernels(**options) for name, options in KERNEL_SPARSE.items()}
KERNEL_HALF = {
    "everything": ((5, 7, 3), (2, 3, 1), EVERYTHING),
    "everything, not normalised": ((5, 7, 3), (2, 3, 1), EVERYTHING | {"normalize": False}),
    "elu+1": ((7, 9), (2, 2), {"rotary": True, "feature_map": "elu+1"}),
    **{f"{d} channels": ((5, 9), (1, 2), {"head_dim": d, "rotary": True, "norm": True}) for d in (72, 128, 256)},
    "causal": ((23,), (2,), AFTER | {"causal": "token"}),
    "causal, softmax": ((23,), (2,), BEFORE | SOFTMAX | {"causal": "token"}),
    "lists": ((9, 19), 64, {"key_size": 32, "rotary": True, **TEXT_AND_MASK}),
    "lists, means": ((9, 19), 64, {"key_size": 32, "rotary": True, "far": "means", **TEXT_AND_MASK}),
}
KERNEL_HALF = {name: (*layout, {"head_dim": 32, **ONE, **options}) for name, (*layout, options) in KERNEL_HALF.items()}


def cases(backend, dtypes, *tables):
    """Parameters of :func:`test_it_is_the_reference`."""
    marks = pytest.mark.gpu if backend == "triton" else ()
    return [
        pytest.param(backend, dtype, problem, id=f"{backend}-{dtype}-{name}", marks=marks)
        for table in tables
        for name, problem in table.items()
        for dtype in dtypes
    ]


@pytest.mark.parametrize(
    ("backend", "dtype", "problem"),
    [
        *cases("eager", (torch.float64, torch.float32), EAGER),
        *cases("triton", (torch.float32,), KERNEL_MHLA, KERNEL_CAUSAL, KERNEL_SPARSE),
        *cases("triton", HALF, KERNEL_HALF),
    ],
)
def test_it_is_the_reference(backend, dtype, problem):
    grid, blocks, options = problem
    make = make_problem if isinstance(blocks, tuple) else make_sparse_problem
    is_hard = backend == "triton" and dtype == torch.float32 and "causal" in options
    check(make(grid, blocks, **options), dtype, backend, is_hard=is_hard)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "content" not in kind])
def test_eager_operations_of_every_kind(kind, dtype):
    check(problem_of(kind), dtype, "eager")


@pytest.mark.parametrize("kind", ["MHLA", "causal", "sparse"])
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_drawn_problems(kind, data):
    """In float64, so that an ill-conditioned draw needs no loose bound."""
    check(data.draw(drawn_problems(kind)), torch.float64, "eager", is_hard=True)


@pytest.mark.gpu
def test_logits_far_below_zero():
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    problem = make_sparse_problem((5, 7), 16, key_size=16, batch=1, heads=1, head_dim=16, extra=(0, 9))
    problem.tensors["query"] = 8 * problem.tensors["query"].abs()
    problem.tensors["key"] = -8 * problem.tensors["key"].abs()
    check(problem, is_hard=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "normalize"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
)
def test_one_long_block_is_shared_out(dtype, normalize):
    """Plain linear attention, M = 1: several programs, several tiles each, the last one partly empty."""
    options = {"rotary": True, "mask": True, "gate": True, "normalize": normalize}
    problem = make_problem((1187,), (1,), batch=1, heads=1, head_dim=16, **options)
    # with the normaliser, the only entry of the mixing matrix cancels: its gradient is 0 and what is found is noise
    check(problem, dtype, leave_out=("mixing",) if normalize else ())


@pytest.mark.gpu
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


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_tiles_of_a_real_card(head_dim, dtype, monkeypatch):
    """The interpreter's own tiles are smaller than those that Wan and DiT run with."""
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_90")
    options = {"batch": 1, "heads": 1, "head_dim": head_dim, "rotary": True, "mask": True}
    check(make_problem((3, 5, 14), (1, 1, 2), norm=True, **options), dtype)
    check(make_sparse_problem((9, 19), 64, key_size=32, extra=(0, 9), **options), dtype)


@pytest.mark.gpu
@needs_interpreter
def test_states_read_in_parts(monkeypatch):
    """As on cards with little shared memory, and for 256 channels."""
    monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, {"": ((16, 16, 4, 1),) * 4}))
    check(make_problem((49,), (2,), batch=1, heads=1, head_dim=40, rotary=True))


@pytest.mark.parametrize(("backend", "tokens", "blocks"), [("eager", 131_072, 16), ("triton", 8192, 1)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_does_not_overflow(backend, tokens, blocks, dtype):
    """ReLU features of magnitude 10: the KV state reaches 8e5 and more, beyond float16."""
    query = torch.full((1, tokens, 1, 8), 10.0, dtype=dtype, device=DEVICE)
    mixing = torch.full((blocks, blocks), 1 / blocks, device=DEVICE)
    found = mhla_attention(query, query, torch.ones_like(query), mixing, (tokens,), (blocks,), backend=backend)
    torch.testing.assert_close(found, torch.ones_like(query), rtol=torch.finfo(dtype).eps, atol=0)


BY_CONTENT = {
    "text and mask": {"rotary": True, "extra": (0, 21), "mask": True, "batch": 2},
    "means": {"far": "means", "mask": True},
    "72 channels": {"head_dim": 72, "rotary": True, "heads": 1},
    "along the curve": {"order": "curve"},
    "stretches, text": STRETCHES | {"size": 64, "extra": (3, 20), "mask": True},
    "keys in 32": STRETCHES | {"size": 64, "key_size": 32, "rotary": True, "heads": 1},
    "blocks of 128": STRETCHES | {"size": 128, "key_size": 32, "heads": 1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", BY_CONTENT.values(), ids=BY_CONTENT)
def test_by_content(options):
    """Output and gradients where lists, β and γ are found, against eager operations in float64.

    γ is a quotient of float32 sums, whose rounding it shares among all.
    """
    given = {"grid": (3, 5, 7), "size": 16, "key_size": 16, "head_dim": 16, "batch": 1, "density": 0.3} | options
    problem = make_sparse_problem(constants=False, **given).to()
    expected = problem.run(sparse_attention, torch.float64, backend="eager")
    for name, found in problem.run(sparse_attention, backend="triton").items():
        error = relative_error(found, expected[name])
        assert error < 3e-5, f"{name}: relative error {error:.2e}"
