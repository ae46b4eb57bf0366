"""Token grids cut into token blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.blocks import (
    block_index,
    block_lengths,
    block_rows,
    block_sizes,
    blocks_of_range,
    check_layout,
    from_blocks,
    to_blocks,
)


@st.composite
def layouts(draw):
    axes = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes)))
    return tuple(count + draw(st.integers(0, 6)) for count in blocks), blocks


@given(st.integers(1, 200), st.integers(1, 60))
def test_lengths_add_up_and_differ_by_at_most_one(tokens, blocks):
    if blocks > tokens:
        blocks = tokens
    lengths = block_lengths(tokens, blocks)
    assert len(lengths) == blocks
    assert sum(lengths) == tokens
    assert max(lengths) - min(lengths) <= 1


@given(layouts())
def test_every_token_has_one_block_of_the_stated_size(layout):
    index = block_index(*layout)
    assert torch.bincount(index).tolist() == block_sizes(*layout)


@st.composite
def runs(draw):
    """A layout and a run of its tokens."""
    grid, blocks = draw(layouts())
    first = draw(st.integers(0, torch.Size(grid).numel() - 1))
    return grid, blocks, first, draw(st.integers(1, torch.Size(grid).numel() - first))


@settings(deadline=None)  # the first call of an operator takes seconds
@given(runs())
def test_blocks_hold_their_tokens_in_raster_order_and_give_them_back(run):
    grid, blocks, first, count = run
    x = torch.arange(2 * count * 3).view(2, count, 3) + 1
    rows = to_blocks(x, grid, blocks, first, True)
    index, own = block_index(grid, blocks)[first : first + count], blocks_of_range(grid, blocks, first, count)
    assert rows.shape[1] == own.stop - own.start
    for number, block in enumerate(rows.unbind(1), own.start):
        held = x[:, index == number]
        assert torch.equal(block[:, : held.shape[1]], held)
        assert not block[:, held.shape[1] :].any()
    assert torch.equal(from_blocks(rows, grid, blocks, first, count), x)
    filled = to_blocks(x, grid, blocks, first, False)
    assert torch.equal(from_blocks(filled, grid, blocks, first, count), x)
    assert bool(filled.all())


@settings(deadline=None)  # the first call of an operator takes seconds
@given(runs())
def test_as_many_rows_as_are_counted(run):
    grid, blocks, first, count = run
    index, own = block_index(grid, blocks)[first : first + count], blocks_of_range(grid, blocks, first, count)
    assert block_rows(*run) == (own.stop - own.start, int(torch.bincount(index).max()))


@pytest.mark.parametrize("run", [((5, 4), (2, 3), 0, 20), ((5, 4), (2, 3), 3, 11)], ids=str)
def test_operators_of_the_order(run):
    grid, blocks, first, count = run
    x = torch.randn(2, count, 3, 4, dtype=torch.float64, requires_grad=True)
    rows = to_blocks(x, grid, blocks, first, True).detach().requires_grad_()
    for operator, inputs in (
        (to_blocks, (x, grid, blocks, first, True)),
        (from_blocks, (rows, grid, blocks, first, count)),
    ):
        torch.library.opcheck(operator, inputs)
        assert torch.autograd.gradgradcheck(lambda given, f=operator, rest=inputs[1:]: f(given, *rest), inputs[:1])


def test_too_few_tokens_name_the_axis_and_both_numbers():
    with pytest.raises(ValueError, match="height axis of the token grid has 3 tokens, too few for 5 blocks"):
        check_layout((4, 3, 8), (2, 5, 2))


@pytest.mark.parametrize(
    ("grid", "blocks", "words"),
    [
        ((4, 6), (2, 2, 2), r"blocks=\(2, 2, 2\) has 3 axes but the token grid \(4, 6\) has 2"),
        ((4,), (0,), "positive integers, got 0"),
        ((4,), (2.0,), "positive integers, got 2.0"),
        ((1, 1, 1, 1), (1, 1, 1, 1), "has 4 axes"),
    ],
)
def test_bad_layouts(grid, blocks, words):
    with pytest.raises(ValueError, match=words):
        check_layout(grid, blocks)


@given(layouts(), st.data())
def test_the_blocks_that_a_run_of_tokens_may_lie_in(layout, data):
    grid, blocks = layout
    tokens = torch.Size(grid).numel()
    first = data.draw(st.integers(0, tokens - 1))
    count = data.draw(st.integers(1, tokens - first))
    index, behind = block_index(grid, blocks)[first : first + count], torch.Size(blocks[1:]).numel()
    found = blocks_of_range(grid, blocks, first, count)
    assert found.start == int(index.min()) // behind * behind
    assert found.stop == (int(index.max()) // behind + 1) * behind
