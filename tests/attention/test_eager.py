"""The eager backend against the float64 reference: output and every gradient of all kinds of calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .problems import (
    BEFORE,
    EVERYTHING,
    GRIDS,
    POSITIVE_MAPS,
    drawn_problems,
    errors_against_reference,
    make_problem,
    make_sparse_problem,
    random_lists,
)

# float32: some hundred roundings of 6e-8 in sums of positive terms. bfloat16 and float16: one rounding of the result
# (and of its gradient) to 8 or 11 significant bits, so 2**-9 and 2**-12 per element; the bounds are twice that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# sums of a few dozen terms; weights of the own block are rounded before they are summed up
OF_CAUSAL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
SUMS = ("mixing", "linear_weight", "output_norm")
"""Beside softmax their gradients are sums of products of both signs, of which rounded halves leave less: with extra
tokens too little to hold the weight and the norm to the bound of one rounding."""
AXES, RAGGED, LONG = ((5, 7, 3), (2, 3, 2)), ((7, 9), (3, 4)), (5, 7, 29)
"""LONG has 1,015 tokens: with key blocks of 16, three stretches of 16 blocks and one of 15 and a half; and more logits
than are formed at once, of one head too."""
LINEAR_BRANCH = {"linear_branch": True}


def _maps():
    for feature_map in POSITIVE_MAPS:
        for rope in ({}, BEFORE, BEFORE | {"rope": "after"}):
            for normalize in (True, False):
                yield AXES, {"feature_map": feature_map, "normalize": normalize, **rope}


MHLA = [
    *((layout, {}) for layout in GRIDS),
    *_maps(),
    (RAGGED, {"feature_map": "identity", "normalize": False}),
    (AXES, EVERYTHING | {"normalize": False}),
    (RAGGED, BEFORE | {"rotary": "own", "mask": "weights"}),
]
TEXT = [
    *(((grid, tuple(min(2, n) for n in grid)), {"extra": e, "linear_branch": e == (2, 3)})
      for grid in ((12,), (7, 9), (4, 3)) for e in ((2, 3), (0, 14))),
    # the last are more than a block of rows holds
    *((RAGGED, {"extra": e, "rotary": True, "mask": True}) for e in ((3, 0), (0, 1), (70, 30))),
    *((AXES, {"extra": (2, 3), name: True}) for name in (*EVERYTHING, "linear_branch")),
    (RAGGED, BEFORE | {"extra": (3, 4), "rotary": "own", "mask": "weights"}),
]  # fmt: skip
CAUSAL_OPTIONS = [
    {},
    {"rotary": True},
    BEFORE,
    {"mask": True, "per_head": True},
    {"norm": True, "gate": True, "feature_map": "elu+1"},
    {"normalize": False, "norm": True},
    LINEAR_BRANCH,
    {"linear_branch": True, "rotary": True, "mask": "weights", "gate": True},
    {"linear_branch": True, "per_head": True, "norm": True},
]
CAUSAL_LAYOUTS = [
    # grid, blocks, tokens: whole and cut, one token, one block, one token a block, frame blocks
    ((17,), (5,), "token", 17),
    ((17,), (5,), "token", 9),
    ((32,), (4,), "token", 1),
    ((9,), (1,), "token", 7),
    ((5, 1, 1), (3, 1, 1), "token", 4),
    ((12,), (4,), "block", 9),
    ((4, 4, 6), (2, 2, 3), "block", 96),
    ((5, 3, 4), (3, 2, 1), "block", 48),
]
CAUSAL = [
    ((grid, blocks), options | {"causal": causal, "tokens": tokens})
    for grid, blocks, causal, tokens in CAUSAL_LAYOUTS
    for options in CAUSAL_OPTIONS
]
SPARSE = [
    *(((grid, size), {"key_size": key_size, "order": order, "far": far})
      # even and ragged, single tokens, one block for all
      for grid, size, key_size in (
          ((7, 9), 8, 2), ((5, 6), 1, 1), ((5, 7, 3), 16, 4), ((4, 6), 128, 128), ((8, 9), 8, 8)
      )
      for order in ("content", "curve") for far in ("second-order", "means")),
    *(((LONG, 32), {"key_size": 16, "density": 0.5, "rotary": True, "batch": 1} | more)
      for more in ({"mask": True}, {"extra": (2, 3)})),
    *((((5, 7, 3), 16), {"key_size": 4} | more) for more in ({"rotary": True}, {"mask": "weights"})),
    *((((5, 6), 6), {"key_size": 2, "rotary": "own", "extra": e}) for e in ((3, 0), (2, 4), (70, 30))),
    (((7, 5), 8), {"extra": (2, 3), "lists": random_lists((7, 5), 8, 8, density=0.4, samples=2)}),
]  # fmt: skip


HALF = [
    *((layout, {}) for layout in GRIDS),
    *((AXES, {"extra": (2, 3), name: True}) for name in (*EVERYTHING, "linear_branch")),
    *(
        (layout, options | {"causal": causal})
        for layout, causal in ((((11,), (3,)), "token"), (((4, 2, 3), (2, 1, 3)), "block"))
        for options in (BEFORE | {"mask": True}, LINEAR_BRANCH)
    ),
    *((((5, 7, 3), 16), {"key_size": 4, name: True}) for name in ("rotary", "mask")),
]


def check(layout, options, dtype):
    make = make_problem if isinstance(layout[1], tuple) else make_sparse_problem
    found = errors_against_reference(make(*layout, **options), dtype, "eager")
    for name, error in found.items():
        if dtype.itemsize == 2 and "extra" in options and name in SUMS[1:]:
            continue
        allowed = (OF_CAUSAL if "causal" in options else TOLERANCE)[dtype]
        if "causal" in options and name in SUMS:
            allowed *= 3
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("layout", "options"), [*MHLA, *TEXT, *CAUSAL, *SPARSE], ids=str)
def test_it_is_the_reference(layout, options, dtype):
    check(layout, options, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("layout", "options"), HALF, ids=str)
def test_half_precision(layout, options, dtype):
    check(layout, options, dtype)


@pytest.mark.parametrize("kind", ["MHLA", "text", "causal", "sparse"])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_drawn_problems(kind, data):
    problem = data.draw(drawn_problems(kind))
    # float64, so that an ill-conditioned draw (an output norm over a nearly zero output) needs no loose bound
    for name, error in errors_against_reference(problem, torch.float64, "eager").items():
        assert error <= 1e-9, f"{name}: relative error {error:.2e}"
