"""Keys sorted by content: what is sorted by which channel, ties, padding, and that the order of the keys is all one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import SparseCall, attend
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.order import content_order, stretch_of


def halved(keys, block):
    """The parts of a stretch (L, D) in Python: halved by the channel of largest variance, ties in order."""
    if len(keys) == block:
        return [set(range(len(keys)))]
    column = keys[:, keys.var(dim=0, correction=0).argmax()]
    places = sorted(range(len(keys)), key=lambda i: (float(column[i]), i))
    halves = [sorted(half) for half in (places[: len(keys) // 2], places[len(keys) // 2 :])]
    return [{half[i] for i in part} for half in halves for part in halved(keys[half], block)]


@pytest.mark.parametrize(("block", "stretch"), [(3, 12), (4, 16), (16, 256), (32, 256), (64, 256), (128, 256)])
def test_a_stretch_is_halved_by_the_channel_that_varies_most(block, stretch):
    keys = torch.randn(2, 3, 2 * stretch, 5, generator=torch.Generator().manual_seed(block))
    keys[..., 1:] = (3 * keys[..., 1:]).round()  # equal ones
    order = content_order(keys, torch.ones(1, 2 * stretch, dtype=torch.bool), block)
    assert stretch_of(block) == stretch
    for sample in range(2):
        for head in range(3):
            for start in (0, stretch):
                rows = order[sample, head, start : start + stretch].view(-1, block) - start
                expected = halved(keys[sample, head, start : start + stretch], block)
                assert [set(part.tolist()) for part in rows] == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 9))
def test_what_is_no_key_comes_last_in_its_stretch(count, block, seed):
    make = torch.Generator().manual_seed(seed)
    rows = count + -count % block
    exists = (torch.rand(2, rows, generator=make) < 0.7) & (torch.arange(rows) < count)
    keys = torch.randn(2, 2, rows, 3, generator=make)
    order = content_order(keys, exists, block)
    assert torch.equal(order.sort(dim=-1).values, torch.arange(rows).expand_as(order))
    stretch = stretch_of(block)
    for sample in range(2):
        for start in range(0, rows, stretch):
            here = order[sample, :, start : start + stretch]
            assert bool((here // stretch == start // stretch).all())
            is_key = exists[sample][here]
            assert bool((is_key == (torch.arange(here.shape[1]) < is_key.sum(dim=-1, keepdim=True))).all())
    keys[~exists[:, None].expand(-1, 2, -1)] = 100.0  # and what it holds decides nothing
    assert torch.equal(content_order(keys, exists, block), order)


@pytest.mark.parametrize("block", [4, 16])
def test_the_order_in_which_keys_come_is_all_one(block):
    """Keys and values that change places within a stretch: the same blocks, lists and output."""
    make, grid = torch.Generator().manual_seed(0), (8, 8, 8)
    query, key, value = (torch.randn(2, 512, 2, 8, generator=make, dtype=torch.float64) for _ in range(3))
    rule = ContentRule(block, 0.2)
    call = SparseCall(query=query, key=key, value=value, grid=grid, sparse=rule)
    curve = layout_of(grid, block).order.long()
    moved = torch.cat([part[torch.randperm(len(part), generator=make)] for part in curve.split(stretch_of(block))])
    places = torch.empty_like(moved)
    places[curve] = moved
    other = replace(call, key=key[:, places], value=value[:, places])
    torch.testing.assert_close(attend(other, "eager"), attend(call, "eager"), rtol=1e-10, atol=1e-10)
    by_place = [replace(one, sparse=replace(rule, order="curve")) for one in (call, other)]
    assert not torch.allclose(attend(by_place[0], "eager"), attend(by_place[1], "eager"), rtol=1e-3)
