"""The order of uniform blocks: every token once, neighbours together, and one table the inverse of the other."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import hilbert_curve, layout_of

grids = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


def places(grid):
    """Float32 (N, 3), of the tokens in raster order."""
    axes = (torch.arange(size) for size in (1,) * (3 - len(grid)) + grid)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3).float()


@settings(max_examples=60, deadline=None)
@given(grids)
def test_the_curve_visits_every_token_once_and_never_leaps(grid):
    curve = hilbert_curve(grid)
    assert sorted(curve.tolist()) == list(range(math.prod(grid)))
    steps = places(grid)[curve].diff(dim=0).abs()
    assert not len(steps) or steps.sum(dim=1).max() <= 2


@pytest.mark.parametrize("grid", [(20, 30, 52), (32, 32), (64,)])
def test_the_curve_of_even_sizes_goes_from_neighbour_to_neighbour(grid):
    steps = places(grid)[hilbert_curve(grid)].diff(dim=0).abs().sum(dim=1)
    assert (steps > 1).float().mean() < 0.001


@pytest.mark.parametrize(("grid", "most"), [((21, 30, 50), 2.4), ((21, 45, 80), 2.4), ((64, 64), 3.6), ((37, 53), 4)])
def test_blocks_are_compact(grid, most):
    """Root mean square distance to the block's middle; a cube of 64 has 1.94, a square of 64 has 3.24."""
    members = places(grid)[hilbert_curve(grid)].split(64)
    spreads = [(block - block.mean(dim=0)).square().sum(dim=1).mean().sqrt() for block in members]
    assert torch.stack(spreads).mean() <= most


extras = st.tuples(st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(1, 70), extras, st.lists(st.integers(1, 4), max_size=3))
def test_rows_and_order_are_inverse_and_extra_tokens_have_blocks_of_their_own(grid, size, extra, frame_blocks):
    grid = (sum(frame_blocks) or grid[0], *grid[1:])
    count, (before, after) = math.prod(grid), extra
    layout = layout_of(grid, size, extra, tuple(frame_blocks))
    assert torch.equal(layout.order[layout.rows.long()], torch.arange(before + count + after, dtype=torch.int32))
    blocks = layout.order.view(-1, size)
    assert torch.equal((blocks >= 0).sum(dim=1), layout.valid.long())
    assert (torch.arange(size) < layout.valid[:, None]).equal(blocks >= 0), "tokens come first"
    assert layout.blocks == len(layout.valid) == layout.grid_blocks + -(-(before + after) // size)
    of_grid = (layout.order >= before) & (layout.order < before + count)
    assert torch.equal(of_grid.nonzero().flatten() // size < layout.grid_blocks, torch.ones(count, dtype=torch.bool))
    assert not of_grid[layout.grid_blocks * size :].any()
    if not frame_blocks:
        assert layout.grid_blocks == -(-count // size), "all blocks but the last are full"


def test_every_frame_block_begins_a_block_and_has_a_curve_of_its_own():
    frame = 4 * 6
    layout = layout_of((7, 4, 6), 16, (2, 3), (3, 3, 1))
    assert layout.grid_blocks == 5 + 5 + 2
    first = 0
    for length, blocks in ((3, 5), (3, 5), (1, 2)):
        rows = layout.order[first * 16 : (first + blocks) * 16]
        begin = 2 + frame * sum(x for x, b in ((3, 0), (3, 5), (1, 10)) if b < first)
        assert sorted(rows[rows >= 0].tolist()) == list(range(begin, begin + length * frame))
        assert torch.equal(rows[rows >= 0] - begin, hilbert_curve((length, 4, 6)).int())
        first += blocks


def test_tables_made_without_gradients_serve_calls_with_them():
    with torch.inference_mode():
        layout = layout_of((5, 3), 7)
    assert not any(x.is_inference() for x in (layout.order, layout.valid, layout.rows))
    x = torch.randn(15, requires_grad=True)
    x.index_select(0, layout.rows).sum().backward()
    assert torch.equal(x.grad.bool(), torch.bincount(layout.rows, minlength=15)[:15].bool())


def test_tables_do_not_depend_on_the_device_of_the_moment():
    """Models are built with their weights on the meta device; tables are made where they are wanted all the same."""
    with torch.device("meta"):
        layout = layout_of((5, 11), 7, (1, 0))
    assert sorted(layout.order[layout.order >= 0].tolist()) == list(range(56))


@pytest.mark.parametrize("grid", itertools.permutations((2, 5, 9)))
def test_the_longest_axis_is_followed_whatever_its_place(grid):
    ends = places(grid)[hilbert_curve(grid)][[0, -1]]
    assert (ends[1] - ends[0]).abs().argmax() == grid.index(9)
