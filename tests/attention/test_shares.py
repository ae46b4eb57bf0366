"""MHLA over shares of the tokens, whose block states are added up, against the float64 reference of all tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import MHLACall, eager
from mhla_diffusers.attention.precision import sum_dtype
from mhla_diffusers.attention.triton import backend as triton

from .problems import EVERYTHING, drawn_problems, errors_against_reference, errors_of, make_problem
from .test_eager import TOLERANCE

MODULES = [eager, pytest.param(triton, marks=pytest.mark.gpu)]
CUTS = [
    # grid, blocks, tokens per share: begun inside a row or a frame, shorter than a row, of whole frames, of one token
    ((17,), (5,), (6, 6, 5)),
    ((12,), (1,), (1, 11)),
    ((7, 9), (3, 4), (32, 31)),
    ((7, 9), (3, 4), (4, 1, 36, 22)),
    ((5, 7, 3), (2, 3, 2), (21, 21, 21, 21, 21)),
    ((5, 7, 3), (2, 3, 2), (2, 46, 55, 2)),
    ((4, 4, 6), (2, 2, 3), (48, 24, 24)),
]


def shares_of(call: MHLACall, lengths: Sequence[int]) -> list[MHLACall]:
    """The shares that processes would hold, of so many tokens."""
    found = []
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        tensors = {name: getattr(call, name) for name in ("query", "key", "value", "key_mask", "output_gate")}
        own = {name: x[:, start:stop] for name, x in tensors.items() if x is not None}
        if call.rotary is not None:
            own["rotary"] = tuple(x[:, start:stop] for x in call.rotary)
        found.append(replace(call, **own, first=start))
    return found


def in_shares(module: Any, lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """A backend's attention with the arguments of ``mhla_attention``."""

    def attend(**arguments: Any) -> torch.Tensor:
        whole = MHLACall(**arguments)
        # what all shares take: in half precision the gradient that each gives would be rounded before they are added
        for name in ("mixing", "output_norm"):
            if (tensor := getattr(whole, name)) is not None:
                whole = replace(whole, **{name: tensor.to(sum_dtype(tensor.dtype))})
        shares = shares_of(whole, lengths)
        # of any strides, as what processes send each other may have
        states = torch.stack([module.states(share) for share in shares]).sum(dim=0).mT.contiguous().mT
        return torch.cat([module.read(share, states)[0] for share in shares], dim=1)

    return attend


def check(problem, module, lengths, dtype=torch.float32, is_hard=False):
    """Bounds as in test_eager.py and triton/test_operators.py; of hard problems beside the eager backend's errors."""
    eager_errors = errors_against_reference(problem.to(), dtype, "eager")
    for name, error in errors_of(problem.to(), dtype, in_shares(module, lengths)).items():
        if module is eager:
            allowed = 1e-9 if is_hard else TOLERANCE[dtype]
        elif dtype == torch.float32:
            allowed = max(1e-5, is_hard * 2.5 * eager_errors[name])
        else:
            allowed = max(torch.finfo(dtype).eps, 2.5 * eager_errors[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(("grid", "blocks", "lengths"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cuts(grid, blocks, lengths, dtype):
    check(make_problem(grid, blocks, rotary=True), eager, lengths, dtype)


ALL = [(True, "after", torch.float32), (False, "before", torch.bfloat16)]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("normalize", "rope", "dtype"), ALL, ids=str)
def test_everything_at_once(module, normalize, rope, dtype):
    """Angles too are of every sample: a share of their table is not contiguous."""
    dtype = torch.float64 if module is eager else dtype
    options = EVERYTHING | {"rotary": "own", "normalize": normalize, "rope": rope}
    check(make_problem((5, 4, 3), (2, 2, 1), head_dim=32, **options), module, (2, 23, 33, 2), dtype)


def check_drawn(data, module):
    problem = data.draw(drawn_problems("MHLA", kernels=module is triton))
    tokens = math.prod(problem.grid)
    inside = data.draw(st.sets(st.integers(1, tokens - 1), min_size=1, max_size=4)) if tokens > 1 else set()
    cuts = [0, *sorted(inside), tokens]
    dtype = torch.float64 if module is eager else torch.float32
    check(problem, module, tuple(stop - start for start, stop in pairwise(cuts)), dtype, is_hard=True)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_drawn_problems(data):
    check_drawn(data, eager)


@pytest.mark.gpu
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_drawn_problems_on_kernels(data):
    check_drawn(data, triton)
