"""The mixing matrix: initialisation, clipping, resizing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import clip_mixing_, initial_mixing, resize_mixing

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)
@given(COUNTS, st.sampled_from(["locality", "uniform", "identity"]))
def test_rows_are_normalised_and_nonnegative(blocks, init):
    mixing = initial_mixing(blocks, init)
    assert mixing.dtype == torch.float32
    assert (mixing >= 0).all()
    torch.testing.assert_close(mixing.sum(dim=1), torch.ones(len(mixing)))


def test_locality_follows_the_paper_row_by_row():
    """Three blocks in a line: distances 0, 1, 2; the maximum is taken per row, 2, 1, 2."""
    expected = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 1.0]])
    expected = expected / expected.sum(dim=1, keepdim=True)
    torch.testing.assert_close(initial_mixing((3,)), expected)


def test_locality_measures_distance_on_the_block_grid():
    mixing = initial_mixing((2, 3))
    farthest = 5**0.5
    row = torch.tensor([0, 1, 2, 1, 2**0.5, 5**0.5])
    expected = 1 - row / farthest
    torch.testing.assert_close(mixing[0], expected / expected.sum())


def test_clipping_leaves_the_open_interval():
    mixing = clip_mixing_(torch.tensor([-1.0, 0.0, 0.3, 1.0, 2.0]))
    assert ((mixing > 0) & (mixing < 1)).all()
    assert mixing[2] == torch.tensor(0.3)


def test_resizing_is_the_product_with_the_interpolation_of_all_axes_and_costs_far_less():
    """Rows of weights of every axis, their Kronecker product, and M x M products, in float64."""

    def weights(old, new):
        place = ((torch.arange(new).double() + 0.5) * old / new - 0.5).clamp(0, old - 1)
        return (1 - (place[:, None] - torch.arange(old)).abs()).clamp_min(0)

    for old, new in (((3, 4, 5), (3, 6, 2)), ((5,), (1,)), ((1, 4), (3, 4))):
        whole = torch.ones(1, 1, dtype=torch.float64)
        for sizes in zip(old, new, strict=True):
            whole = torch.kron(whole, weights(*sizes))
        mixing = torch.rand(2, whole.shape[1], whole.shape[1], generator=torch.Generator().manual_seed(0))
        expected = whole @ mixing.double() @ whole.mT
        torch.testing.assert_close(resize_mixing(mixing.double(), old, new), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(resize_mixing(mixing, old, new).double(), expected, rtol=1e-6, atol=1e-7)
    with FlopCounterMode(display=False) as counter:
        resize_mixing(torch.rand(12, 576, 576), (9, 8, 8), (7, 8, 8))
    assert counter.get_total_flops() == 0
