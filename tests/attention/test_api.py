"""What mhla_attention and sparse_attention promise beyond the contract: special cases, inputs of all kinds, bounds."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from mhla_diffusers.attention import initial_mixing, mhla_attention, sparse_attention

from ..refusals import refused
from .problems import BACKENDS, errors_of, make_problem, peak_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", ["identity", "locality"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_gives_weight_to_masked_keys_alone_gets_nothing(weight, dtype, backend):
    """Its row of the mixing matrix has zeros for all other blocks; the other queries do not notice."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels take no float64")
    problem = make_problem((12,), (3,), head_dim=16, mask=True, norm=True)
    problem.tensors["mixing"] = initial_mixing((3,), weight)
    seen = 8 if weight == "identity" else 4
    problem.options["key_mask"] = (torch.arange(12) < seen).expand(2, -1)
    problem = problem.to()
    found = problem.run(mhla_attention, dtype, backend=backend)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][:, seen:].any() and found["output"][:, :seen].any(dim=-1).all()
    assert not found["query"][:, seen:].any() and found["mixing"][2].abs().max() < 1e-20
    for name, error in errors_of(problem, dtype, partial(mhla_attention, backend=backend)).items():
        assert error <= {torch.float64: 1e-12, torch.float32: 5e-6}[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("apart", [0, 8])
def test_softmax_features_of_large_inputs_are_no_nan(apart):
    """Also where a query and its keys have no channel in common: its features at theirs are 0 in float32."""
    problem = make_problem((12,), (3,), feature_map="softmax")
    for channel, name in enumerate(("query", "key")):
        problem.tensors[name][..., channel] += apart
        problem.tensors[name] *= 50
    found = problem.run(mhla_attention)
    assert all(x.isfinite().all() for x in found.values()) and found["output"].any(dim=-1).all()
    for name, error in errors_of(problem, torch.float32, partial(mhla_attention, backend="eager")).items():
        assert error <= 5e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize("blocks", [(2,), (8,)])
def test_without_gradients_blocks_are_worked_on_in_parts_without_a_trace(blocks):
    """Blocks of 6 000 tokens in parts of 5 461, and blocks of 1 500 tokens one after the other."""
    problem = make_problem((12_000,), blocks, batch=1, heads=3, head_dim=64, rotary=True, mask=True, gate=True)
    problem = problem.to("cpu", torch.float64)
    whole = problem.attend(mixing=problem.tensors["mixing"].requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(problem.attend(), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "blocks", "causal"),
    [(torch.float32, (1, 1, 1), None), (torch.bfloat16, (7, 3, 5), None), (torch.float32, (7, 3, 5), "block")],
    ids=str,
)
def test_memory_is_linear_in_tokens(dtype, blocks, causal):
    """Peak working memory of the forward is at most 4 times the bytes of query, key and value, at two lengths.

    A causal sequence is shorter than its grid.
    """
    for frames in (12, 24):
        inputs = [torch.randn(1, frames * 30 * 50, 4, 64, dtype=dtype) for _ in range(3)]
        grid = (frames if causal is None else 7 * frames // 4, 30, 50)
        mixing = torch.rand(2 * [math.prod(blocks)])
        peak = peak_bytes(partial(mhla_attention, *inputs, mixing, grid, blocks, causal=causal))
        assert 0 < peak <= 4 * sum(x.nbytes for x in inputs)


@pytest.mark.parametrize("normalize", [True, False])
def test_bits_do_not_depend_on_whether_the_mixing_matrix_takes_gradients(normalize):
    """LoRA freezes the matrix; torch.matmul multiplies in another order where a shared one takes gradients."""
    problem = make_problem((8, 8), (4, 2), normalize=normalize, head_dim=16)
    mixing = problem.tensors["mixing"]
    with torch.no_grad():
        frozen, learnable = (problem.attend(mixing=mixing.clone().requires_grad_(learns)) for learns in (False, True))
    assert torch.equal(frozen, learnable)


@pytest.mark.parametrize("attend", [mhla_attention, sparse_attention])
def test_forward_mode_and_transforms_are_refused(attend):
    """Custom operators would lose their tangents without a word."""
    problem = make_problem((12,), (3,))
    query, key, value, mixing = problem.tensors.values()
    rest = (mixing, (12,), (3,)) if attend is mhla_attention else ((12,),)
    with refused("torch.func", error=NotImplementedError):
        torch.func.grad(lambda x: attend(x, key, value, *rest).sum())(query)
    with refused("forward-mode", error=NotImplementedError), forward_ad.dual_level():
        attend(forward_ad.make_dual(query, key), key, value, *rest)
