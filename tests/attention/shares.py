"""One attention over shares of its tokens, as processes hold them, by one process that adds up the states itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from mhla_diffusers.attention import MHLACall
from mhla_diffusers.attention.precision import sum_dtype

from .problems import POSITIVE_MAPS, make_problem

CUTS = [
    # grid, blocks, tokens per share: begun inside a row or a frame, shorter than a row, of whole frames, of one token
    ((17,), (5,), (6, 6, 5)),
    ((12,), (1,), (1, 11)),
    ((7, 9), (3, 4), (32, 31)),
    ((7, 9), (3, 4), (4, 1, 36, 22)),
    ((5, 7, 3), (2, 3, 2), (21, 21, 21, 21, 21)),
    ((5, 7, 3), (2, 3, 2), (2, 46, 55, 2)),
    ((3, 5, 4), (1, 2, 1), (11, 49)),
    ((4, 4, 6), (2, 2, 3), (48, 24, 24)),
]

_PER_TOKEN = ("query", "key", "value", "key_mask", "output_gate")


def shares_of(call: MHLACall, lengths: Sequence[int]) -> list[MHLACall]:
    """The shares that processes would hold, of so many tokens."""
    assert sum(lengths) == call.query.shape[1]
    found = []
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        tensors = {name: getattr(call, name) for name in _PER_TOKEN}
        own = {name: x[:, start:stop] for name, x in tensors.items() if x is not None}
        if call.rotary is not None:
            own["rotary"] = tuple(x[:, start:stop] for x in call.rotary)
        found.append(replace(call, **own, first=start))
    return found


def in_shares(backend: Any, lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """A backend's attention with the arguments of ``mhla_attention``, for :meth:`Problem.run`."""

    def attend(**arguments: Any) -> torch.Tensor:
        whole = MHLACall(**arguments)
        # what all shares take: in half precision the gradient that each gives would be rounded before they are added
        for name in ("mixing", "output_norm"):
            if (tensor := getattr(whole, name)) is not None:
                whole = replace(whole, **{name: tensor.to(sum_dtype(tensor.dtype))})
        shares = shares_of(whole, lengths)
        states = torch.stack([backend.states(share) for share in shares]).sum(dim=0)
        return torch.cat([backend.read(share, states)[0] for share in shares], dim=1)

    return attend


@st.composite
def cut_problems(draw, most_blocks: int = 24, most_channels: int = 16):
    """A problem of any kind, and its tokens in two to five shares."""
    axes = draw(st.integers(1, 3))
    counts = st.lists(st.integers(1, 3), min_size=axes, max_size=axes)
    blocks = tuple(draw(counts.filter(lambda found: math.prod(found) <= most_blocks)))
    grid = tuple(count + draw(st.integers(0, 4)) for count in blocks)
    flags = {name: draw(st.booleans()) for name in ("rotary", "mask", "norm", "gate", "per_head", "normalize")}
    rope, feature_map = draw(st.sampled_from(["after", "before"])), draw(st.sampled_from(POSITIVE_MAPS))
    if flags["normalize"] and flags["rotary"] and rope == "after" and feature_map == "relu":
        # The normaliser, which is not rotated, can be 1e-6 of the rotated weights where query and key are positive in
        # different channels: the weights of a row are then up to 4e5 in sum, and so much more is any rounding.
        feature_map = "elu+1"
    problem = make_problem(
        grid,
        blocks,
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 2)),
        head_dim=2 * draw(st.integers(1, most_channels // 2)),
        seed=draw(st.integers(0, 2**16)),
        rope=rope,
        feature_map=feature_map,
        **flags,
    )
    tokens = math.prod(grid)
    inside = st.sets(st.integers(1, tokens - 1), min_size=1, max_size=4) if tokens > 1 else st.just(set())
    cuts = [0, *sorted(draw(inside)), tokens]
    return problem, tuple(stop - start for start, stop in pairwise(cuts))
