"""β and γ of the kernels against those of the eager module's function in float64."""

import math

import pytest
import torch

from mhla_diffusers.attention.precision import EMPTY
from mhla_diffusers.attention.sparse import BIASES, MOST_STATE_WEIGHT, best_weights, fitting_rows
from mhla_diffusers.attention.triton.fit import fit
from mhla_diffusers.attention.triton.tiles import states_dtype

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
STEP = (BIASES[1] - BIASES[0]) / (BIASES[2] - 1)
SIZE, SCALE = 32, 0.25


def make_problem(tokens=900, *, groups=3, head_dim=16, dtype=torch.float32, with_states=True, seed=0):
    """Arguments of the operator, as far as it takes outputs and states.

    They are the true output and noise, so that neither β nor γ is at an end of its range.
    """
    make = torch.Generator().manual_seed(seed)
    blocks, some = -(-tokens // SIZE), fitting_rows(tokens, torch.device("cpu"))
    rows = blocks * SIZE

    def random(*shape):
        return torch.randn(groups, *shape, generator=make)

    query, key, value = (random(rows, head_dim).to(dtype) for _ in range(3))
    mixed = random(blocks, head_dim, head_dim).to(states_dtype(dtype)) if with_states else None
    weights = (SCALE * query.double() @ key.double()[:, :tokens].mT).softmax(dim=-1)
    truth = weights @ value.double()[:, :tokens]
    read = 0
    if with_states:
        read = SCALE * (query.double().unflatten(1, (blocks, SIZE)) @ mixed.double()).flatten(1, 2)
    near = (truth + random(rows, head_dim)).to(dtype)
    far = (truth + random(rows, head_dim) - torch.rand(groups, 1, 1, generator=make) * read).to(dtype)
    near_lse, far_lse = random(rows), random(rows)
    near_lse[:, ::7], far_lse[:, ::5] = EMPTY, EMPTY
    lse_near, lse_far = near_lse.double(), far_lse.double()
    sampled = [x[:, some].double() for x in (truth, near)] + [
        lse_near[:, some],
        far[:, some].double(),
        lse_far[:, some],
    ]
    expected = best_weights(*sampled, read[:, some] if with_states else None)
    inputs = query, key, value, None, near, near_lse, far, far_lse, mixed, SCALE, [tokens], SIZE, 0
    return inputs, expected


@DTYPES
@pytest.mark.parametrize("head_dim", [5, 16, 72, 128])
@pytest.mark.parametrize("with_states", [True, False])
def test_beta_and_gamma(dtype, head_dim, with_states):
    """The last block has padding. γ is a quotient of sums of a true output that is rounded to the inputs' type."""
    inputs, (beta, gamma) = make_problem(head_dim=head_dim, dtype=dtype, with_states=with_states)
    found_beta, found_gamma = fit(*inputs)
    assert found_beta.dtype == found_gamma.dtype == torch.float32
    assert (found_beta - beta).abs().max() < STEP / 2
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert (found_gamma - gamma).abs().max() <= allowed
    assert bool(((gamma > 0) & (gamma < MOST_STATE_WEIGHT)).all()) == with_states


@pytest.mark.parametrize("tokens", [1, 7, 33, 96 * 256 + 5])
def test_few_and_most_queries(tokens):
    inputs, (beta, gamma) = make_problem(tokens, groups=2)
    found_beta, found_gamma = fit(*inputs)
    assert (found_beta - beta).abs().max() < STEP / 2
    torch.testing.assert_close(found_gamma.double(), gamma, rtol=1e-4, atol=1e-5)


def test_gamma_ends_at_its_bounds():
    (*inputs,), _ = make_problem(groups=2)
    query, near, mixed = inputs[0], inputs[4], inputs[8]
    read = SCALE * (query.unflatten(1, (-1, SIZE)) @ mixed).flatten(1, 2)
    truth = torch.nn.functional.scaled_dot_product_attention(query, inputs[1][:, :900], inputs[2][:, :900], scale=SCALE)
    near[:], inputs[5][:] = truth, 0.0
    sign = torch.tensor([1.0, -9.0])[:, None, None]
    inputs[6], inputs[7] = truth + sign * read, torch.zeros_like(inputs[7])
    assert fit(*inputs)[1].tolist() == [0.0, MOST_STATE_WEIGHT]


def test_queries_that_attend_to_nothing():
    """All errors are alike, so that β is the first that is tried, as argmin finds it."""
    inputs, _ = make_problem(groups=1)
    nothing = [torch.zeros_like(x) for x in inputs[4:8]]
    beta, gamma = fit(inputs[0], inputs[1], 0 * inputs[2], None, *nothing, *inputs[8:])
    assert beta.tolist() == [BIASES[0]] and gamma.tolist() == [0.0]


def test_nan_stays_in_its_head():
    inputs, _ = make_problem()
    expected = fit(*inputs)
    inputs[6][1, fitting_rows(900, torch.device("cpu"))[3], 2] = math.nan
    beta, gamma = fit(*inputs)
    assert beta[1] == BIASES[0] and gamma[1].isnan()
    for found, right in zip((beta, gamma), expected, strict=True):
        assert torch.equal(found[::2], right[::2])
