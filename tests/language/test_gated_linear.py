"""A Llama with gated linear attention."""

import torch

from mhla_diffusers.training.language.gated_linear import give_gated_linear

from .models import llama, logits, text


def test_a_llama_with_it_sees_no_later_token():
    model = llama()
    give_gated_linear(model)
    ids, other = text(), text()
    other[:, 21:] = 5
    torch.testing.assert_close(logits(model, ids)[:, :21], logits(model, other)[:, :21])
