"""Rivals, written from their ideas."""

import pytest
import rivals
import torch
from torch.nn.functional import scaled_dot_product_attention


def random_head(tokens: int = 300, channels: int = 16) -> rivals.Head:
    make = torch.Generator().manual_seed(0)
    rows = torch.randn(3, tokens, channels, generator=make, dtype=torch.float64)
    own = torch.randn(2, 1, channels, generator=make, dtype=torch.float64)
    return rivals.Head(rows[0] / channels**0.5, rows[1], rows[2], own[0], own[1])


def softmax(head: rivals.Head) -> torch.Tensor:
    key, value = torch.cat([head.key, head.class_key]), torch.cat([head.value, head.class_value])
    return scaled_dot_product_attention(head.query, key, value, scale=1.0)


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_a_rival_that_lists_everything_is_softmax_attention(name):
    head = random_head()
    plan = rivals.RIVALS[name](head, 2.0)
    assert bool(plan.listed.all())
    torch.testing.assert_close(rivals.attend(head, plan), softmax(head))


@pytest.mark.parametrize("name", ["block-sparse", "SubBlock", "PISA"])
def test_rivals_cost_what_they_may(name):
    """But for half a block, and the last one, which is shorter."""
    head = random_head(64 * 16 + 5)
    for budget in (0.3, 0.6):
        assert rivals.RIVALS[name](head, budget).cost == pytest.approx(budget, abs=0.5 / 16)


def test_svg2_lists_the_fewest_clusters_that_hold_the_share():
    head = random_head()
    plan = rivals.RIVALS["SVG2"](head, 0.6)
    queries, keys = (rivals.means(x, y, n) for x, y, n in zip(head[:2], plan[:2], plan.listed.shape, strict=True))
    weights = (queries @ keys.T + plan.keys.bincount().log()).softmax(dim=-1)
    held = (weights * plan.listed).sum(dim=-1)
    assert bool((held > 0.6).all())
    assert bool((held - weights.masked_fill(~plan.listed, 2).amin(dim=-1) <= 0.6).all())


def test_pisa_expands_values_around_the_mean_key():
    """Written out for one query, block by block."""
    head = random_head()
    plan = rivals.RIVALS["PISA"](head, 0.3)
    query, listed = head.query[0], plan.listed[0]
    blocks = [torch.arange(len(head.key))[plan.keys == c] for c in range(len(listed))]
    state = sum((head.key[rows] - head.key[rows].mean(0)).T @ head.value[rows] for rows in blocks) / len(head.key)
    weights = [(query @ head.class_key.T).exp()]
    values = [head.class_value]
    for rows, is_listed in zip(blocks, listed, strict=True):
        if is_listed:
            weights.append((query @ head.key[rows].T).exp())
            values.append(head.value[rows])
        else:
            weights.append(len(rows) * (query @ head.key[rows].mean(0)).exp()[None])
            values.append(head.value[rows].mean(0, keepdim=True) + query @ state)
    expected = torch.cat(weights) @ torch.cat(values) / torch.cat(weights).sum()
    torch.testing.assert_close(rivals.attend(head, plan)[0], expected)
