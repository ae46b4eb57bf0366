"""What whole attentions show only in part: transposed lists, lists that are given, β and γ."""

import pytest
import torch

from mhla_diffusers.attention import BlockLists, sparse
from mhla_diffusers.attention.triton.branches import bits_of
from mhla_diffusers.attention.triton.choose import choose
from mhla_diffusers.attention.triton.fit import fit
from mhla_diffusers.attention.triton.listed import transpose_lists
from mhla_diffusers.attention.triton.tiles import states_dtype

from ..problems import relative_error


def test_transposed_lists():
    """Ascending, without the entries that do not count; a block that all name comes first."""
    indices = torch.tensor([[0, 9, 2], [9, 1, 7], [9, 4, 3]] * 4, dtype=torch.int32)
    counts = torch.tensor([2, 2, 1] * 4, dtype=torch.int32)
    turns, starts, queries = transpose_lists(indices, counts, 10)
    lists = [queries[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert lists == [[0, 3, 6, 9], [1, 4, 7, 10], *[[]] * 7, list(range(12))]
    assert turns.tolist() == list(range(10))
    turns, _, _ = transpose_lists(indices, counts, 40)
    assert turns.tolist() == [0, 1, 9, *range(2, 9), *range(10, 40)]
    assert all(x.dtype == torch.int32 for x in (turns, starts, queries))


def test_given_lists_are_those_that_the_kernel_chooses():
    """Indices, counts and bits of lists by content, given back as lists, are the same."""
    make = torch.Generator().manual_seed(0)
    groups, blocks = 6, 40
    query, key = (torch.randn(groups, blocks, 16, generator=make) for _ in range(2))
    variance = torch.rand(groups, blocks, blocks, generator=make)
    tensors, place = (query, key, None, variance, torch.ones(groups, blocks)), ([blocks * 16 - 3], 16, 20)
    expected = choose(*tensors, None, 12, 0.25, *place)
    base = torch.arange(groups)[:, None, None] * (blocks + 2)
    keys = expected[0].view(groups, blocks, -1)[..., :12].long() - base
    given = bits_of(BlockLists(16, keys.view(2, 3, blocks, 12)), 2)
    assert all(map(torch.equal, choose(*tensors, given, 12, 0.25, *place), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 72, 128])
def test_fit(dtype, head_dim):
    """With values of 0 nothing but the inputs is rounded to half precision."""
    make = torch.Generator().manual_seed(0)
    query, key, noise = torch.randn(3, 2, 96, head_dim, generator=make).to(dtype)
    near_lse, far_lse = torch.randn(2, 2, 96, generator=make)
    mixed = torch.randn(2, 3, head_dim, head_dim, generator=make).to(states_dtype(dtype))
    read = 0.3 * (query.double().unflatten(1, (3, 32)) @ mixed.double()).flatten(1, 2)
    near = far = (noise - read).to(dtype)  # so that γ is about 1 or more
    found = fit(query, key, 0 * key, None, near, near_lse, far, far_lse, mixed, 0.3, [96], 32, 0)
    some = sparse.fitting_rows(96, query.device)
    parts = (x[:, some].double() for x in (0 * near, near, near_lse, far, far_lse, read))
    for weights, expected in zip(found, sparse.best_weights(*parts), strict=True):
        assert relative_error(weights, expected) < 2e-6
