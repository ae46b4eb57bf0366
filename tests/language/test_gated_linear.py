"""Gated linear attention in chunks against its recurrence, token by token in float64."""

import pytest
import torch

from mhla_diffusers.training.language.gated_linear import gated_linear, give_gated_linear

from .models import llama, logits, text


@pytest.mark.parametrize("length", [1, 15, 16, 40])
def test_chunks_are_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    query, key, value, gate = (torch.randn(2, length, 3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    decay = torch.nn.functional.logsigmoid(gate) / 16
    state, expected = torch.zeros(2, 3, 4, 4, dtype=torch.float64), []
    for step in range(length):
        state = state * decay[:, step].exp()[..., None] + key[:, step, :, :, None] * value[:, step, :, None]
        expected.append((query[:, step, :, None] @ state)[:, :, 0] / 2)
    torch.testing.assert_close(gated_linear(query, key, value, decay), torch.stack(expected, dim=1))


def test_a_llama_with_it_sees_no_later_token():
    model = llama()
    give_gated_linear(model)
    ids, other = text(), text()
    other[:, 21:] = 5
    torch.testing.assert_close(logits(model, ids)[:, :21], logits(model, other)[:, :21])
