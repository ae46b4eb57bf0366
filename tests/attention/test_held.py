"""How much of softmax attention's weight lists hold, against attention written out."""

import math

import pytest
import torch

from mhla_diffusers.attention import SparseCall, with_lists
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.held import weight_held
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.sparse import key_block_of_tokens

GRID, BLOCK, HEADS, DIM = (7, 5), 4, 2, 8


def call_of(extra, **rule):
    make = torch.Generator().manual_seed(0)
    count = math.prod(GRID) + sum(extra)
    query, key, value = (torch.randn(2, count, HEADS, DIM, generator=make) for _ in range(3))
    mask, rule = torch.rand(2, count, generator=make) > 0.2, ContentRule(BLOCK, **rule)
    return SparseCall(query=query, key=key, value=value, grid=GRID, key_mask=mask, extra=extra, sparse=rule)


@pytest.mark.parametrize("rule", [{"key_block_size": 2}, {"order": "curve"}], ids=["content", "curve"])
@pytest.mark.parametrize("extra", [(0, 0), (2, 3)], ids=str)
def test_it_is_that_of_the_listed_blocks_and_of_extra_tokens(extra, rule):
    block = layout_of(GRID, BLOCK).rows.long() // BLOCK
    for density in (0.2, 0.5, 1.0):
        call = call_of(extra, density=density, **rule)
        query, key = (x.transpose(1, 2) for x in (call.query, call.key))
        logits = (query @ key.mT / DIM**0.5).masked_fill(~call.key_mask[:, None, None], -math.inf)
        weights = call.on_grid(logits.softmax(dim=-1).transpose(1, 2)).transpose(1, 2)
        of_tokens = weights[..., extra[0] : weights.shape[-1] - extra[1]]
        of_extra = weights.sum(dim=-1) - of_tokens.sum(dim=-1)
        mask = with_lists(call).sparse.mask()[:, :, block].expand(2, HEADS, -1, -1)
        members = key_block_of_tokens(call, call.sparse).expand(2, HEADS, -1)[:, :, None].expand(-1, -1, 35, -1)
        expected = ((of_tokens * mask.gather(-1, members)).sum(dim=-1) + of_extra).mean()
        held = weight_held(call, 35, 0)
        assert float(held) == pytest.approx(float(expected), rel=1e-4)
    assert float(held) == pytest.approx(1, rel=1e-5)


def test_other_shifts_look_at_other_queries():
    call = call_of((0, 0), density=0.2)
    assert len({float(weight_held(call, 6, shift)) for shift in range(4)}) == 4
