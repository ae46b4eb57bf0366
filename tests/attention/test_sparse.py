"""Tiles along the curve, and β, that are found by query and key at every call."""

import math

import pytest
import torch

from mhla_diffusers.attention import (
    Call,
    ContentRule,
    BlockLists,
    initial_mixing,
    mhla_attention,
    reference_attention,
)
from mhla_diffusers.attention.sparse import BIASES, with_lists
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.rope import rotary_table

GRID, BLOCKS, SIZE = (3, 5, 7), (1, 2, 2), 8


def problem(heads=2, head_dim=8, batch=2, *, mask=False, extra=0, seed=0):
    make = torch.Generator().manual_seed(seed)
    tokens = math.prod(GRID) + extra
    query, key, value = (
        torch.randn(batch, tokens, heads, head_dim, generator=make, dtype=torch.float64) for _ in range(3)
    )
    angles = torch.randn(1, tokens, 1, head_dim // 2, generator=make, dtype=torch.float64).repeat_interleave(2, dim=-1)
    settings = {"rotary": (angles.cos(), angles.sin()), "extra": (0, extra), "rope": "before"}
    if mask:
        settings["key_mask"] = torch.rand(batch, tokens, generator=make) > 0.3
        settings["key_mask"][0, layout_of(GRID, SIZE).order[:SIZE].long()] = False
    return (query * 2, key, value), settings


def call_of(tensors, settings, **changes):
    mixing = initial_mixing(BLOCKS).double()
    given = {name: x for name, x in settings.items() if name not in ("rotary", "extra")}
    return Call(*tensors, mixing, GRID, BLOCKS, rotary=rotary_table(settings["rotary"]), **given | changes)


@pytest.mark.parametrize("mask", [False, True])
def test_the_blocks_are_those_that_their_mean_stands_for_worst(mask):
    tensors, settings = problem(mask=mask)
    call = call_of(tensors, settings)
    lists = with_lists(call_of(tensors, settings, rule=ContentRule(SIZE, 0.3))).lists.mask()
    layout, blocks = layout_of(GRID, SIZE), -(-math.prod(GRID) // SIZE)
    assert lists.shape == (2, 2, blocks, blocks) and bool((lists.sum(dim=-1) == round(0.3 * blocks)).all())
    from mhla_diffusers.attention.rope import rotated

    query, key = (rotated(x, call.rotary) for x in tensors[:2])
    weights = torch.ones(2, math.prod(GRID)) if call.key_mask is None else call.key_mask.double()
    for sample in range(2):
        for head in range(2):
            scores = torch.empty(blocks, blocks, dtype=torch.float64)
            for a in range(blocks):
                rows = layout.order[a * SIZE : (a + 1) * SIZE].long()
                mean_query = query[sample, rows[rows >= 0], head].mean(dim=0) / 8**0.5
                for b in range(blocks):
                    rows = layout.order[b * SIZE : (b + 1) * SIZE].long()
                    rows = rows[rows >= 0]
                    weight = weights[sample, rows].double()
                    if not weight.any():
                        scores[a, b] = -math.inf
                        continue
                    share = (weight / weight.sum())[:, None]
                    mean = (share * key[sample, rows, head]).sum(dim=0)
                    variance = (share * (key[sample, rows, head] - mean).square()).sum(dim=0)
                    scores[a, b] = mean_query @ mean + (mean_query.square() @ variance).log() / 2
            best = scores.topk(round(0.3 * blocks), dim=-1).indices
            assert torch.equal(lists[sample, head].nonzero()[:, 1].view(blocks, -1), best.sort(dim=-1).values)


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"extra": 5}], ids=["plain", "mask", "text"])
def test_the_fitted_bias_is_the_best_of_those_tried(options):
    """By brute force: every β, on all queries that it is fitted on, against softmax attention."""
    tensors, settings = problem(**options)
    extra = settings["extra"][1]

    def attend(bias, rule):
        mixing = initial_mixing(BLOCKS).double()
        return mhla_attention(
            *tensors, mixing, GRID, BLOCKS, pooled_bias=bias, sparse=rule, backend="eager", **settings
        )

    softmax = attend(None, ContentRule(SIZE, 1.0))
    order = layout_of(GRID, SIZE).order
    places = order[order >= 0].long()
    some = places[((torch.arange(8) + 0.5) * len(places) / 8).long()]
    errors = torch.stack(
        [
            (attend(torch.full((2,), float(bias), dtype=torch.float64), ContentRule(SIZE, 0.2)) - softmax)[:, some]
            .square()
            .sum(dim=(1, 3))
            for bias in torch.linspace(*BIASES)
        ]
    )
    best = torch.linspace(*BIASES, dtype=torch.float64)[errors.argmin(dim=0)]
    fitted = attend(None, ContentRule(SIZE, 0.2, fit_pooled_bias=True))
    expected = torch.cat([attend(best[sample], ContentRule(SIZE, 0.2))[[sample]] for sample in range(2)])
    torch.testing.assert_close(fitted, expected, rtol=1e-9, atol=1e-9)
    assert extra == 0 or len(fitted[0]) == math.prod(GRID) + extra


def test_lists_along_the_curve_are_those_of_the_reference():
    tensors, settings = problem(mask=True)
    chosen = with_lists(
        call_of(tensors, settings, rule=ContentRule(SIZE, 0.3, True), linear_weight=torch.tensor([0.1, 0.3]))
    )
    assert chosen.pooled_bias.shape == (2, 2)
    found = mhla_attention(
        *tensors,
        chosen.mixing,
        GRID,
        BLOCKS,
        sparse=ContentRule(SIZE, 0.3, fit_pooled_bias=True),
        linear_weight=chosen.linear_weight,
        backend="eager",
        **settings,
    )
    torch.testing.assert_close(found, reference_attention(chosen), rtol=1e-9, atol=1e-9)


def test_lists_of_another_grid_are_refused():
    tensors, settings = problem()
    lists = BlockLists.from_mask(SIZE, torch.ones(2, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="lists of 5 blocks, but the grid"):
        mhla_attention(*tensors, initial_mixing(BLOCKS), GRID, BLOCKS, sparse=lists, backend="eager", **settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0.1), "positive number of tokens"),
        (((2, 2), 0.1), "block_size"),
        ((64, 0.0), "density"),
        ((64, 1.5), "density"),
    ],
)
def test_rules_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ContentRule(*arguments)
