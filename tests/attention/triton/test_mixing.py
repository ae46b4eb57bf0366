"""The kernels of Multi-Head Mixing against float64, and that none of it is left to torch.matmul."""

import pytest
import torch

from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.triton import operators

from ..problems import call_of, relative_error
from .test_kernels import DEVICE

pytestmark = pytest.mark.gpu

# IEEE sums of a few hundred terms; three products of bfloat16 halves keep 16 bits of each factor.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-16, torch.float16: 2**-16}


def draw(blocks, per_head, head_dim=5, batch=2, heads=3):
    generator = torch.Generator().manual_seed(blocks)
    mixing = torch.rand(*((heads,) if per_head else ()), blocks, blocks, generator=generator)
    summary, upstream = torch.randn(2, batch, heads, blocks, head_dim + 1, head_dim, generator=generator)
    return mixing.to(DEVICE), summary.to(DEVICE), upstream.to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 17, 70])
def test_against_float64(blocks, per_head, dtype):
    mixing, summary, upstream = draw(blocks, per_head)
    exact = mixing.double().requires_grad_()
    expected = torch.einsum("hij,bhjkl->bhikl", exact.expand(3, -1, -1), summary.double())
    expected.backward(upstream.double())
    assert relative_error(operators.mix(mixing, summary, dtype), expected.detach()) <= TOLERANCE[dtype]
    transposed = torch.einsum("hji,bhjkl->bhikl", exact.detach().expand(3, -1, -1), summary.double())
    assert relative_error(operators.mix(mixing.mT, summary, dtype), transposed) <= TOLERANCE[dtype]
    query = torch.empty(2, blocks, 3, 5, dtype=dtype, device=DEVICE)
    call = call_of(query=query, key=query, value=query, mixing=mixing, grid=(blocks,), blocks=(blocks,))
    gradient = operators.mixing_gradient(call, summary, upstream)
    assert gradient.shape == mixing.shape
    assert relative_error(gradient, exact.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [slice(0, 3), slice(5, 17), slice(16, 17)])
def test_rows_of_some_blocks(rows):
    """Of the others nothing is written; the tests fill what is allocated with NaN."""
    mixing, summary, _ = draw(17, True)
    found = operators.mix(mixing, summary, torch.float32, rows=rows)
    assert torch.equal(found[:, :, rows], operators.mix(mixing, summary, torch.float32)[:, :, rows])
    others = torch.ones(17, dtype=torch.bool)
    others[rows] = False
    assert found[:, :, others.to(DEVICE)].isnan().all()


def test_elements_are_shared_out_and_summed_in_the_same_order():
    mixing, summary, upstream = draw(2, False, head_dim=40)
    query = torch.empty(2, 2, 3, 40, device=DEVICE)
    call = call_of(query=query, key=query, value=query, mixing=mixing, grid=(2,), blocks=(2,))
    gradient = operators.mixing_gradient(call, summary, upstream)
    assert relative_error(gradient, torch.einsum("bhikl,bhjkl->ij", upstream.double(), summary.double())) <= 1e-6
    assert torch.equal(gradient, operators.mixing_gradient(call, summary, upstream))


def test_nothing_follows_the_precision_of_float32_products():
    """torch.set_float32_matmul_precision is the user's, and what it lowers must not be part of a float32 call."""
    leaves = [torch.randn(1, 12, 2, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    mixing = torch.rand(4, 4, device=DEVICE, requires_grad=True)
    with torch.profiler.profile() as profile:
        mhla_attention(*leaves, mixing, (12,), (4,), backend="triton").sum().backward()
    products = {"aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm", "aten::matmul"}
    assert not products & {event.key for event in profile.key_averages()}
