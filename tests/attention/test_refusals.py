"""What the attention refuses, by name: one table, in which a text says what the message must hold."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mhla_diffusers.attention import (
    MHLAState,
    SparseCall,
    attend,
    extend_mixing,
    initial_mixing,
    mhla_attention,
    sparse_attention,
)
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import check_layout

from ..refusals import refused

X, FIVE = torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 5)
TENSORS = {"query": X, "key": X, "value": X}


def mhla(**changes: Any) -> None:
    mhla_attention(**TENSORS | {"mixing": torch.rand(4, 4), "grid": (3, 4), "blocks": (2, 2)} | changes)


def causal(**changes: Any) -> None:
    mhla(**{"grid": (12,), "blocks": (4,), "causal": "token"} | changes)


def sparse(**changes: Any) -> None:
    sparse_attention(**TENSORS | {"grid": (3, 4)} | changes)


def with_weights(**changes: Any) -> None:
    """β and γ given."""
    weights = {"pooled_bias": torch.zeros(2), "state_weight": torch.ones(2)}
    attend(SparseCall(**TENSORS, grid=(3, 4), sparse=ContentRule(4, 0.5), **weights | changes))


def state(before: int = 0, tokens: torch.Tensor = X[:, :1], rotary: Any = None, **settings: Any) -> None:
    """A step after so many tokens of a state of 16 in 4 blocks."""
    one, mixing = MHLAState(**{"grid": (16,), "blocks": (4,), "causal": "token"} | settings), initial_mixing((4,))
    if before:
        one.step(*(X[:, :before],) * 3, mixing)
    try:
        one.step(tokens, tokens, tokens, mixing, rotary=rotary)
    finally:
        assert one.length == before


kernels = partial(mhla, backend="triton")
sparse_kernels = partial(sparse, backend="triton")

CALLS = [
    (mhla, "(2, 12, 16)", {"query": X.flatten(2)}),
    (mhla, "key...2, 11, 2, 8...query...2, 12, 2, 8", {"key": X[:, :11]}),
    (mhla, "value...torch.float64...torch.float32", {"value": X.double()}),
    (mhla, "(3, 5)...15...N=12", {"grid": (3, 5)}),
    (mhla, "mixing...(4, 4)...(2, 4, 4)...(3, 3)", {"mixing": torch.rand(3, 3)}),
    (mhla, "mixing...NoneType", {"mixing": None}),
    (mhla, "'rulu'...'relu'", {"feature_map": "rulu"}),
    (mhla, "rope='during'...'after'...'before'", {"rope": "during"}),
    (mhla, "'eagr'...'eager'", {"backend": "eagr"}),
    (mhla, "(1 or 2, 12, 1, 8)...(12, 8)", {"rotary": (torch.randn(12, 8),) * 2}),
    (mhla, "rotary...torch.float32", {"rotary": (torch.randn(1, 12, 1, 8),)}),
    (mhla, "head dim...5", dict.fromkeys(TENSORS, FIVE) | {"rotary": (torch.randn(1, 12, 1, 5),) * 2}),
    (mhla, "key_mask...(2, 12)...(12,)", {"key_mask": torch.ones(12, dtype=torch.bool)}),
    (mhla, "key_mask...-10000", {"key_mask": torch.full((2, 12), -1e4)}),
    (mhla, "linear_weight...causal", {"linear_weight": torch.ones(2)}),
    (mhla, "output_norm...(8,)...(16,)", {"output_norm": torch.ones(16)}),
    (mhla, "output_gate...(2, 12, 2, 8)...(2, 12, 16)", {"output_gate": torch.ones(2, 12, 16)}),
    (causal, "'tokens'...'token'...'block'", {"causal": "tokens"}),
    (causal, "(4, 3)...(12,)...causal='block'", {"grid": (4, 3), "blocks": (2, 2)}),
    (causal, "N=12...11", {"grid": (11,)}),
    (causal, "4, 8, 11, 14...12", {"grid": (14,), "causal": "block"}),
    (causal, "key_mask...causal='token'", {"key_mask": torch.ones(2, 12)}),
    (causal, "mixing...-0.5", {"linear_weight": torch.ones(2), "mixing": torch.full((4, 4), -0.5)}),
    (causal, "linear_weight...-0.5 to 1", {"linear_weight": torch.tensor([1.0, -0.5])}),
    (causal, "eps=0.0", {"eps": 0.0}),
    (causal, "normalize=True", {"linear_weight": torch.ones(2), "normalize": False}),
    (sparse, "extra=(3,)", {"extra": (3,)}),
    (sparse, "extra=(-1, 8)", {"extra": (-1, 8)}),
    (sparse, "(2, 4)...8...N=12...extra=(3, 5)", {"grid": (2, 4), "extra": (3, 5)}),
    (sparse, "third-order", {"far": "third-order"}),
    (with_weights, "pooled_bias...(2,)", {"pooled_bias": torch.zeros(3)}),
    (with_weights, "state_weight", {"state_weight": None}),
    (with_weights, "pooled_bias", {"pooled_bias": None}),
    (with_weights, "state_weight", {"far": "means"}),
    (kernels, "float64", {name: x.double() for name, x in TENSORS.items()}),
    (kernels, "257...256", dict.fromkeys(TENSORS, torch.randn(1, 12, 1, 257))),
    (mhla, "output_gate...on cpu...on meta", {"output_gate": torch.ones(2, 12, 2, 8, device="meta")}),
    (mhla, "rotary...on cpu...on meta", {"rotary": (torch.ones(1, 12, 1, 8, device="meta"),) * 2}),
    (sparse_kernels, "block size is 4", {"block_size": 4}),
    (state, "'words'", {"causal": "words"}),
    (state, "'further'...'error'...'relative'", {"beyond": "further"}),
    (state, "'tritn'...'triton'", {"backend": "tritn"}),
    (state, "'rellu'...'relu'", {"feature_map": "rellu"}),
    (state, "rope='never'", {"rope": "never"}),
    (state, "15 tokens...4", {"grid": (15,), "beyond": "relative"}),
    (state, "4 tokens in 1 block", {"grid": (4,), "blocks": (1,), "beyond": "relative"}),
    (state, "batch of 2...3...reorder()", {"before": 10, "tokens": torch.ones(3, 1, 2, 8)}),
    (state, "10...7...16...beyond='relative'", {"before": 10, "tokens": X[:, :7]}),
    (ContentRule, "block_size=0", {"block_size": 0, "density": 0.1}),
    (ContentRule, "block_size=(2, 2)", {"block_size": (2, 2), "density": 0.1}),
    (ContentRule, "order='place'", {"block_size": 64, "density": 0.1, "order": "place"}),
    (ContentRule, "key_block_size=48", {"block_size": 64, "density": 0.1, "key_block_size": 48}),
    (ContentRule, "density=0.0", {"block_size": 64, "density": 0.0}),
    (initial_mixing, "'random'...'locality'...'uniform'...'identity'", {"blocks": (2,), "init": "random"}),
    (extend_mixing, "blocks=(4,)...3", {"mixing": torch.ones(4, 4), "blocks": (4,), "count": 3}),
    (extend_mixing, "blocks=(1,)...4", {"mixing": torch.ones(1, 1), "blocks": (1,), "count": 4}),
    (check_layout, "height...3...5", {"grid": (4, 3, 8), "blocks": (2, 5, 2)}),
    (check_layout, "(2, 2, 2)...(4, 6)", {"grid": (4, 6), "blocks": (2, 2, 2)}),
    (check_layout, "blocks=(0,)", {"grid": (4,), "blocks": (0,)}),
    (check_layout, "grid=(1, 1, 1, 1)", {"grid": (1, 1, 1, 1), "blocks": (1, 1, 1, 1)}),
    (state, "4 tokens...query has 3", {"causal": "block", "tokens": X[:, :3], "grid": (4, 2, 2), "blocks": (4, 1, 1)}),
]


@pytest.mark.parametrize(("call", "words", "changes"), CALLS, ids=[words for _, words, _ in CALLS])
def test_a_call_that_does_not_fit(call, words, changes):
    with refused(words):
        call(**changes)


GRIDS = [(3, 0), (3.0, 4), (np.float64(3), 4), "34", (), (2, 1, 6, 1), None, 12]


@pytest.mark.parametrize("call", [mhla, sparse])
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_what_is_no_grid(call, grid):
    with refused("grid="):
        call(grid=grid)
