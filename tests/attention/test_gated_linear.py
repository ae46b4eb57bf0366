"""Gated linear attention from its definition: the weights that a query gives to every key."""

import pytest
import torch

from mhla_diffusers.attention.gated_linear import gated_linear, log_decay


def problem(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key, value and logs of α, N = 33."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gate = (torch.randn(2, 33, 3, dim, generator=generator).to(dtype) for dim in (4, 4, 5, 4))
    return [query, key, value, log_decay(gate)]


def weighed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Every pair by itself: o_t = Σ_{s≤t} (q_t · Π_{s<r≤t} α_r k_s) v_s / √D_k."""
    total = decay.cumsum(dim=1)
    since = (total[:, :, None] - total[:, None]).exp()
    weights = torch.einsum("bthd,btshd,bshd->bhts", query, since, key).tril() / query.shape[-1] ** 0.5
    return torch.einsum("bhts,bshe->bthe", weights, value)


def test_it_is_its_definition() -> None:
    torch.testing.assert_close(gated_linear(*problem()), weighed(*problem()))


def test_lower_types_are_summed_in_float32() -> None:
    """Autocast too: with sums in bfloat16 the error would be several times that of rounding the output."""
    given = problem(torch.bfloat16)
    expected = weighed(*(x.double() for x in given))
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_linear(*given)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).norm() / expected.norm()) < 2**-9


@pytest.mark.parametrize("gate", [-100.0, -1000.0])  # decays of e^-6 and e^-63 a token
def test_strong_gates_stay_finite_in_float32(gate: float) -> None:
    query, key, value, _ = problem(torch.float32)
    tensors = [x.requires_grad_() for x in (query, key, value, log_decay(torch.full_like(query, gate)))]
    found = gated_linear(*tensors)
    torch.testing.assert_close(found, weighed(*(x.double() for x in tensors)).float(), rtol=1e-5, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), tensors))
