"""MHLA over shares of the tokens, whose block states are added up, against the float64 reference of all tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import MHLACall
from mhla_diffusers.attention.api import backend_for
from mhla_diffusers.attention.precision import sum_dtype

from .problems import BACKENDS, EVERYTHING, drawn_problems, make_problem
from .test_reference import check


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


def in_shares(backend: str, lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """A backend's attention with the arguments of ``mhla_attention``."""

    def attend(**arguments: Any) -> torch.Tensor:
        whole = MHLACall(**arguments)
        module = backend_for(whole, backend)
        # what all shares take: in half precision the gradient that each gives would be rounded before they are added
        for name in ("mixing", "output_norm"):
            if (tensor := getattr(whole, name)) is not None:
                whole = replace(whole, **{name: tensor.to(sum_dtype(tensor.dtype))})
        shares = shares_of(whole, lengths)
        # of any strides, as what processes send each other may have
        states = torch.stack([module.states(share) for share in shares]).sum(dim=0).mT.contiguous().mT
        return torch.cat([module.read(share, states)[0] for share in shares], dim=1)

    return attend


ALL = [(True, "after", torch.float32), (False, "before", torch.bfloat16)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("normalize", "rope", "dtype"), ALL, ids=str)
def test_everything_at_once(backend, normalize, rope, dtype):
    """Angles too are of every sample: a share of their table is not contiguous."""
    dtype = torch.float64 if backend == "eager" else dtype
    options = EVERYTHING | {"rotary": "own", "normalize": normalize, "rope": rope}
    problem = make_problem((5, 4, 3), (2, 2, 1), head_dim=32, **options)
    check(problem, dtype, backend, attend=in_shares(backend, (2, 23, 33, 2)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_drawn_problems(data):
    problem = data.draw(drawn_problems("MHLA"))
    tokens = math.prod(problem.grid)
    inside = data.draw(st.sets(st.integers(1, tokens - 1), min_size=1, max_size=4)) if tokens > 1 else set()
    lengths = [stop - start for start, stop in pairwise([0, *sorted(inside), tokens])]
    check(problem, torch.float64, "eager", attend=in_shares("eager", lengths), is_hard=True)
