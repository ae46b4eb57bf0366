"""Token grids cut into token blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusers.attention.blocks import (
    block_index,
    block_lengths,
    block_sizes,
    blocks_of_range,
    check_layout,
    from_blocks,
    join_blocks,
    join_tokens,
    regular_regions,
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


@given(layouts(), st.none() | st.integers(1, 3), st.none() | st.integers(1, 3))
def test_regions_cover_the_grid_and_are_put_back(layout, max_rows, max_length):
    grid, blocks = layout
    x = torch.arange(2 * torch.Size(grid).numel() * 3 * 2.0).view(2, *grid, 3, 2)
    regions = regular_regions(grid, blocks, max_rows, max_length)
    pieces = [from_blocks(to_blocks(x, region, torch.float64), region) for region in regions]
    assert torch.equal(join_tokens(pieces, regions, first_axis=1), x.double())


@given(layouts(), st.none() | st.integers(1, 3), st.none() | st.integers(1, 3))
def test_sums_over_blocks_are_those_of_their_tokens(layout, max_rows, max_length):
    grid, blocks = layout
    numbers = torch.arange(torch.Size(grid).numel())
    regions = regular_regions(grid, blocks, max_rows, max_length)
    x = numbers.view(1, *grid, 1, 1)
    sums = [to_blocks(x, region, torch.int64).sum(dim=-2) for region in regions]
    expected = torch.zeros(torch.Size(blocks).numel(), dtype=torch.int64).index_add_(
        0, block_index(grid, blocks), numbers
    )
    assert torch.equal(join_blocks(sums, regions, blocks, first_axis=2).flatten(), expected)


@given(layouts(), st.integers(1, 3))
def test_no_region_of_one_row_of_blocks_is_longer_than_asked(layout, max_length):
    for region in regular_regions(*layout, max_rows=1, max_length=max_length):
        assert region.tokens[0].stop - region.tokens[0].start == region.block_shape[0] <= max_length


@given(layouts())
def test_a_block_gathers_its_tokens_in_raster_order(layout):
    grid, blocks = layout
    tokens = torch.arange(torch.Size(grid).numel()).view(1, *grid, 1, 1)
    index = block_index(grid, blocks)
    for region in regular_regions(grid, blocks):
        gathered = to_blocks(tokens, region, torch.int64)[0, 0, ..., 0].flatten(0, -2)
        numbers = torch.arange(torch.Size(blocks).numel()).view(blocks)[region.blocks].flatten()
        for number, found in zip(numbers, gathered, strict=True):
            assert found.tolist() == torch.nonzero(index == number).flatten().tolist()


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
