"""Tokens per second of a language model after texts of growing length: keys and values beside MHLA's state.

OMP_NUM_THREADS=1 python studies/language/decoding.py --output outputs/decoding
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mhla_llama import MHLACache, apply_mhla, cache_bytes
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from mhla_diffusers.reporting import scaled
from studies.tables import write_table

NAMES = ("softmax", "MHLA, softmax in the own block", "MHLA")
AT_ONCE = 1024
"""Tokens of the text that are read in one call."""


def fill(model: Any, cache: Any, length: int) -> None:
    """Read a text until it is as long; keys and values are random, since time does not depend on them."""
    sizes = model.config
    while (missing := length - cache.get_seq_length()) > 0:
        if isinstance(cache, MHLACache):
            text = torch.randint(256, (1, min(AT_ONCE, missing)))
            model(text, past_key_values=cache, logits_to_keep=1)
        else:
            for layer in range(sizes.num_hidden_layers):
                keys, values = (torch.randn(1, sizes.num_key_value_heads, missing, sizes.head_dim) for _ in range(2))
                cache.update(keys, values, layer)


@torch.inference_mode()
def main() -> None:
    """Let the models take turns at every length, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=(1024, 4096, 16384, 65536), help="ascending")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16, help="that are decoded in a turn")
    parser.add_argument("--turns", type=int, default=5, help="the median counts")
    given = parser.parse_args()
    settings = LlamaConfig(
        vocab_size=256,
        hidden_size=given.width,
        intermediate_size=2 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        max_position_embeddings=max(given.lengths) + 1024,
    )
    softmax, near, linear = (LlamaForCausalLM(settings).eval() for _ in NAMES)
    for model, own in ((near, "softmax"), (linear, "linear")):
        apply_mhla(model, blocks=32, block_length=64, own=own)
    models = {softmax: DynamicCache(config=settings), near: MHLACache(near), linear: MHLACache(linear)}
    rows = []
    for length in given.lengths:
        for model, cache in models.items():
            fill(model, cache, length)
        sizes = [scaled(cache_bytes(cache), 1024, "B") for cache in models.values()]
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(given.turns):
            for (model, cache), taken in zip(models.items(), seconds, strict=True):
                begin = time.perf_counter()
                for _ in range(given.tokens):
                    model(torch.randint(256, (1, 1)), past_key_values=cache)
                taken.append(time.perf_counter() - begin)
        rows.append([f"{length:,}", *(f"{given.tokens / median(taken):.0f}" for taken in seconds), *sizes])
    header = ["tokens before", *(f"{name}, tokens/s" for name in NAMES), *(f"{name}, cache" for name in NAMES)]
    sys.stdout.write(write_table(header, rows, given.output, "decoding"))


if __name__ == "__main__":
    main()
