"""Gated linear attention in chunks against its recurrence, token by token in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.gated_linear import gated_linear, log_decay

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def problem(length: int, key_dim: int, value_dim: int) -> Problem:
    """Query, key, value and gate with gradients."""
    generator = torch.Generator().manual_seed(length)
    dims = (key_dim, key_dim, value_dim, key_dim)
    drawn = [torch.randn(2, length, 3, dim, generator=generator, dtype=torch.float64) for dim in dims]
    return tuple(x.requires_grad_() for x in drawn)


def recurrence(query: Any, key: Any, value: Any, decay: Any) -> torch.Tensor:
    """The equation as it is written."""
    state, outputs = torch.zeros(2, 3, key.shape[-1], value.shape[-1], dtype=torch.float64), []
    for step in range(query.shape[1]):
        added = key[:, step, :, :, None] * value[:, step, :, None]
        state = state * decay[:, step].exp()[..., None] + added
        outputs.append((query[:, step, :, None] @ state)[:, :, 0] / query.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(length=st.sampled_from([1, 15, 16, 17, 33, 40]), key_dim=st.sampled_from([2, 4]), value_dim=st.just(4))
def test_chunks_and_their_gradients_are_the_recurrence(length: int, key_dim: int, value_dim: int) -> None:
    tensors = problem(length, key_dim, value_dim)
    query, key, value, gate = tensors
    expected = recurrence(query, key, value, log_decay(gate))
    found = gated_linear(query, key, value, log_decay(gate))
    assert found.shape == (2, length, 3, value_dim)
    torch.testing.assert_close(found, expected)
    weights = torch.cos(torch.arange(found.numel(), dtype=torch.float64)).view_as(found)
    gradients = [torch.autograd.grad((output * weights).sum(), tensors) for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_lower_types_are_summed_in_float32() -> None:
    """Autocast too: with sums in bfloat16 the error would be several times that of rounding the output."""
    query, key, value, gate = (x.detach() for x in problem(100, 2, 4))
    query, key, value, decay = (x.bfloat16() for x in (query, key, value, log_decay(gate)))
    expected = recurrence(*(x.double() for x in (query, key, value, decay)))
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_linear(query, key, value, decay)
    assert found.dtype == torch.bfloat16
    # half a unit in the last of bfloat16's 8 digits, and float32 sums below that
    assert ((found.double() - expected).norm() / expected.norm()) < 2**-9


@pytest.mark.parametrize("gate", [-100.0, -1000.0])  # decays of e^-6 and e^-63 a token
def test_strong_gates_stay_finite_in_float32(gate: float) -> None:
    query, key, value, _ = (x.detach() for x in problem(40, 4, 4))
    decay = log_decay(torch.full_like(query, gate))
    decay[:, ::3] = log_decay(torch.tensor(0.0))
    tensors = [x.float().requires_grad_() for x in (query, key, value, decay)]
    found, expected = gated_linear(*tensors), recurrence(query, key, value, decay)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)  # float32 sums of a few tokens
    gradients = torch.autograd.grad(found.sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_backends_that_cannot_be_are_refused() -> None:
    tensors = problem(4, 2, 4)
    with pytest.raises(ValueError, match="backend='flash' is unknown; allowed: auto, fla, eager"):
        gated_linear(*tensors, backend="flash")
    with pytest.raises(ValueError, match="backend='fla' needs tensors on a GPU; got cpu"):
        gated_linear(*tensors, backend="fla")
