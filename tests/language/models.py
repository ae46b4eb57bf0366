"""Tiny instances of transformers' real Llama, and texts for them."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_diffusers import apply_mhla, mhla_layers

from ..models import seeded

BLOCKS, BLOCK_LENGTH = (6,), 8
LONGEST = 48
"""Tokens of all blocks."""


def llama(cls: type = LlamaForCausalLM, **settings: Any) -> Any:
    """Three layers, four heads that share two of keys, and a vocabulary of 64."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return seeded(cls, config=LlamaConfig(**(sizes | settings)))


def patch(model: Any, **settings: Any) -> Any:
    """The model with MHLA whose mixing matrices are random, so that every entry matters."""
    apply_mhla(model, **({"blocks": BLOCKS, "block_length": BLOCK_LENGTH} | settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.mixing.copy_(torch.rand(layer.mixing.shape, generator=generator))
    return model


def patched(**settings: Any) -> Any:
    """A tiny Llama with MHLA."""
    return patch(llama(), **settings)


def text(batch: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    """Tokens (B, N) other than that of padding."""
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """(B, N, vocabulary)."""
    return model(ids, **arguments).logits
