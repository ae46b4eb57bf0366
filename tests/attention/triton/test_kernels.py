"""What whole attentions show only in part: the order of keys and chosen blocks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.order import content_order
from mhla_diffusers.attention.triton.choose import choose
from mhla_diffusers.attention.triton.prepare import prepare

from ...refusals import refused


def test_rows_of_keys_in_several_stretches_with_equal_keys():
    """Which token every row is, and its weight: the curve, sorted by content as eager operations sort it."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 600, 1, 8)
    key, mask = key.round(), torch.rand(2, 600) * (torch.rand(2, 600) < 0.8)
    order = layout_of((600,), 64).order.long()
    here = order.clamp(min=0)
    exists = (mask[:, here] > 0) & (order >= 0)
    positions = order.expand(2, 1, -1).gather(2, content_order(key.transpose(1, 2)[:, :, here], exists, 64))[:, 0]
    found = prepare(query, key, value, None, mask, [600], 64, 64, 0, True, True)
    assert torch.equal(found[7].long(), positions)
    weights = mask.gather(1, positions.clamp(min=0)) * (positions >= 0)
    assert torch.allclose(found[9].exp(), weights)
    assert torch.allclose(found[10], weights.unflatten(1, (-1, 64)).sum(2))


def test_nan_does_not_push_keys_out():
    """It is sorted before the padding, so that every token has its row."""
    query, key, value = torch.randn(3, 1, 37, 2, 8)
    key[:, ::3] = float("nan")
    for row in prepare(query, key, value, None, None, [37], 16, 16, 0, True, True)[7]:
        assert torch.equal(row[:37].sort().values, torch.arange(37, dtype=torch.int32))


def words_of(is_listed):
    """Bits of blocks in int32 words, the first block the lowest bit."""
    bits = torch.nn.functional.pad(is_listed.long(), (0, -is_listed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def chosen(logits, variance, weight, n, extra, by_states=False):
    """Indices, counts and bits of the n best of all blocks, of 16 tokens, and of extra blocks."""
    place = [16 * logits.shape[2]], 16, 16 * extra
    return choose(logits, variance, weight, None, n, by_states, *place)[:3]


def lists_of(scores, n, extra):
    """The same from scores (G, Tq, T) by a stable sort, list after list."""
    groups, query_blocks, key_blocks = scores.shape
    can = torch.isfinite(scores)
    indices = torch.full((groups * query_blocks, n + extra), 0, dtype=torch.int32)
    counts = can.sum(-1).clamp(max=n).flatten().to(torch.int32) + extra
    is_listed = torch.zeros(groups * query_blocks, key_blocks, dtype=torch.bool)
    best = torch.where(can, scores, -torch.inf).sort(dim=-1, descending=True, stable=True).indices.flatten(0, 1)
    for row, (order, count) in enumerate(zip(best, (counts - extra).tolist(), strict=True)):
        blocks = torch.cat([order[:count].sort().values, key_blocks + torch.arange(extra)])
        indices[row] = row // query_blocks * (key_blocks + extra)
        indices[row, : count + extra] += blocks.to(torch.int32)
        is_listed[row, order[:count]] = True
    return indices, counts, words_of(is_listed)


def check_chosen(scores, n, extra):
    """Choose by given scores (G, T): those of one query block in each group, -inf by weights of 0."""
    logits, weight = scores.nan_to_num(torch.nan, neginf=0.0)[:, None], (scores != -torch.inf).float()
    found = chosen(logits, torch.ones_like(logits), weight, n, extra)
    assert all(map(torch.equal, found, lists_of(scores[:, None], n, extra)))


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 3),
    blocks=st.integers(1, 70),
    part=st.floats(0, 1),
    extra=st.integers(0, 40),
    values=st.integers(1, 9),
    masked=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_best_of_a_row(groups, blocks, part, extra, values, masked, seed):
    """Few values, so most rows have ties; some blocks or all are masked."""
    make = torch.Generator().manual_seed(seed)
    scores = torch.randint(-values, values, (groups, blocks), generator=make).float() / 2
    scores[torch.rand(scores.shape, generator=make) < masked] = -torch.inf
    check_chosen(scores, max(1, round(part * blocks)), extra)


def test_nan_is_never_chosen():
    scores = torch.randn(3, 40)
    scores[0, 3:9], scores[1], scores[2, :4] = torch.nan, torch.nan, -torch.nan
    check_chosen(scores, 38, 2)


def drawn(*shape, masked=0.2):
    """Logits, variance and weights for groups, query blocks and key blocks."""
    torch.manual_seed(0)
    weight = torch.rand(shape[0], shape[2]) * (torch.rand(shape[0], shape[2]) >= masked)
    return torch.randn(shape), torch.rand(shape), weight


def test_keys_without_spread():
    """The logarithm of their variance is finite, so they are chosen where there is nothing better."""
    logits, variance, weight = drawn(1, 2, 8, masked=0.0)
    variance[..., 3:] = 0.0
    _, counts, bits = chosen(logits, variance, weight, 5, 0)
    assert (counts == 5).all() and (bits & 7 == 7).all()


def test_too_many_blocks():
    logits = torch.empty(1, 1, 32769)
    with refused("32769"):
        chosen(logits, logits, logits[:, 0], 3, 0)
