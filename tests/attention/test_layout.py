"""Token grids cut into MHLA blocks and into uniform ones: every token once, and one table the inverse of the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.blocks import from_blocks, from_blocks_operator, to_blocks, to_blocks_operator
from mhla_diffusers.attention.layout import block_index, block_sizes, blocks_of_range, hilbert_curve, layout_of

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


@pytest.mark.parametrize(("grid", "most"), [((21, 30, 50), 2.4), ((21, 45, 80), 2.4), ((64, 64), 3.6), ((37, 53), 4)])
def test_blocks_are_compact(grid, most):
    """Root mean square distance to the block's middle; a cube of 64 has 1.94, a square of 64 has 3.24."""
    members = places(grid)[hilbert_curve(grid)].split(64)
    spreads = [(block - block.mean(dim=0)).square().sum(dim=1).mean().sqrt() for block in members]
    assert torch.stack(spreads).mean() <= most


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(1, 70), st.integers(0, 9))
def test_rows_and_order_are_inverse_and_extra_tokens_have_blocks_of_their_own(grid, size, extra):
    count = math.prod(grid)
    layout = layout_of(grid, size, extra)
    assert torch.equal(layout.order[layout.rows.long()], torch.arange(count + extra, dtype=torch.int32))
    blocks = layout.order.view(-1, size)
    assert torch.equal((blocks >= 0).sum(dim=1), layout.valid.long())
    assert (torch.arange(size) < layout.valid[:, None]).equal(blocks >= 0), "tokens come first"
    assert layout.grid_blocks == -(-count // size), "all blocks but the last are full"
    assert layout.blocks == len(layout.valid) == layout.grid_blocks + -(-extra // size)
    assert sorted(blocks[: layout.grid_blocks][blocks[: layout.grid_blocks] >= 0].tolist()) == list(range(count))


@st.composite
def runs(draw):
    """A grid, its MHLA blocks, and a run of its tokens."""
    blocks = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    grid = tuple(count + draw(st.integers(0, 6)) for count in blocks)
    first = draw(st.integers(0, math.prod(grid) - 1))
    return grid, blocks, first, draw(st.integers(1, math.prod(grid) - first))


@settings(deadline=None)  # the first call of an operator takes seconds
@given(runs())
def test_mhla_blocks_hold_their_tokens_in_raster_order_and_give_them_back(run):
    grid, blocks, first, count = run
    assert torch.bincount(block_index(grid, blocks)).tolist() == block_sizes(grid, blocks)
    index, behind = block_index(grid, blocks)[first : first + count], math.prod(blocks[1:])
    own = blocks_of_range(grid, blocks, first, count)
    assert (own.start, own.stop) == (int(index.min()) // behind * behind, (int(index.max()) // behind + 1) * behind)
    place, x = (grid, blocks, 0, first), torch.arange(2 * count * 3).view(2, count, 3) + 1
    rows = to_blocks(x, *place)
    assert rows.shape[1:3] == (own.stop - own.start, max(block_sizes(grid, blocks)))
    for number, block in enumerate(rows.unbind(1), own.start):
        held = x[:, index == number]
        assert torch.equal(block[:, : held.shape[1]], held)
        assert not block[:, held.shape[1] :].any()
    assert torch.equal(from_blocks(rows, *place, count), x)


def test_tables_do_not_depend_on_the_mode_or_device_of_the_moment():
    """Models are built with their weights on the meta device, and run first without gradients."""
    x = torch.randn(1, 56, 2, requires_grad=True)
    with torch.inference_mode(), torch.device("meta"):
        to_blocks(x, (5, 11), [], 7, 0)
    from_blocks(to_blocks(x, (5, 11), [], 7, 0), (5, 11), [], 7, 0, 56).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize(
    ("place", "count"), [(((5, 4), (2, 3), 0, 0), 20), (((5, 4), (2, 3), 0, 3), 11), (((5, 4), [], 6, 0), 23)], ids=str
)
def test_operators_of_the_order(place, count):
    x = torch.randn(2, count, 1, 2, dtype=torch.float64, requires_grad=True)
    rows = to_blocks(x, *place).detach().requires_grad_()
    for operator, inputs in ((to_blocks_operator, (x, *place)), (from_blocks_operator, (rows, *place, count))):
        torch.library.opcheck(operator, inputs)
        assert torch.autograd.gradgradcheck(lambda given, f=operator, rest=inputs[1:]: f(given, *rest), inputs[:1])
