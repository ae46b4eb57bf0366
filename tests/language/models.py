"""Tiny instances of transformers' real Llama, and texts for them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mhla_diffusers import apply_mhla, mhla_layers

from ..models import seeded

BLOCKS, BLOCK_LENGTH = (6,), 8
LONGEST = 48
"""Tokens of all blocks."""
ROUNDING = {"rtol": 1e-4, "atol": 2e-5}
"""Float32 rounding of logits of the order of 1 after three layers that sum in another order."""


def llama(cls: type = LlamaForCausalLM, **settings: Any) -> Any:
    """Three layers, four heads that share two of keys, and a vocabulary of 64."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
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


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny vocabulary, w2 to w63; any other word is a pad."""
    known = {"<pad>": 0, "<end>": 1} | {f"w{index}": index for index in range(2, 64)}
    tokenizer = Tokenizer(WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": "<end>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **names
    )


def save_llama(folder: Path) -> None:
    """Model and tokenizer, as the Hub has them."""
    llama().save_pretrained(folder)
    words().save_pretrained(folder)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """(B, N, vocabulary)."""
    return model(ids, **arguments).logits
