"""Tokens per second of a language model after texts of growing length: keys and values beside MHLA's state.

OMP_NUM_THREADS=1 python studies/language/decoding.py --output outputs/decoding
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from mhla_diffusers import MHLACache, apply_mhla
from mhla_diffusers.benchmark.measure import gather_conditions
from mhla_diffusers.reporting import scaled, write_table

LENGTHS = (1024, 4096, 16384, 65536)
_AT_ONCE = 1024
"""Tokens of the text that are read in one call."""


def main() -> None:
    """Read the arguments and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16, help="that are decoded in a turn")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    settings = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        max_position_embeddings=max(arguments.lengths) + 1024,
    )
    sys.stdout.write(measure(settings, arguments.lengths, arguments.tokens, arguments.turns, arguments.output))


@torch.inference_mode()
def measure(settings: LlamaConfig, lengths: Sequence[int], tokens: int, turns: int, output: Path) -> str:
    """The table, as Markdown; its rows are lengths, and every length's models take turns.

    Args:
        settings: of the models, with random weights.
        lengths: of the texts before what is decoded, ascending.
        tokens: decoded in a turn.
        turns: how many; the median counts.
        output: folder of the table.
    """
    models = [LlamaForCausalLM(settings).eval() for _ in range(3)]
    for model, own in ((models[1], "softmax"), (models[2], "linear")):
        apply_mhla(model, blocks=(32,), block_length=64, own=own, beyond="relative")
    caches: list[Any] = [DynamicCache(config=settings), *(MHLACache(model) for model in models[1:])]
    rows = []
    for length in lengths:
        for model, cache in zip(models, caches, strict=True):
            _fill(model, cache, length)
        bytes_then = [_bytes(cache) for cache in caches]
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(turns):
            for place, (model, cache) in enumerate(zip(models, caches, strict=True)):
                begin = time.perf_counter()
                for _ in range(tokens):
                    model(torch.randint(256, (1, 1)), past_key_values=cache)
                seconds[place].append(time.perf_counter() - begin)
        rates = [f"{tokens / median(one):.0f}" for one in seconds]
        rows.append([f"{length:,}", *rates, *(scaled(one, 1024, "B") for one in bytes_then)])
    names = ["softmax", "MHLA, softmax in the own block", "MHLA"]
    header = ["tokens before", *(f"{name}, tokens/s" for name in names), *(f"{name}, cache" for name in names)]
    table = write_table(header, rows, output, "decoding")
    device = gather_conditions(torch.device("cpu"))["device"]
    where = f"{device}, torch {torch.__version__}"
    return f"{table}\n{where}; medians of {turns} turns of {tokens} tokens\n"


def _fill(model: Any, cache: Any, length: int) -> None:
    """Let a text be as long; keys and values are random ones, since time does not depend on them."""
    sizes = model.config
    while (missing := length - cache.get_seq_length()) > 0:
        count = min(_AT_ONCE, missing)
        if isinstance(cache, MHLACache):
            model(torch.randint(256, (1, count)), past_key_values=cache, logits_to_keep=1)
            continue
        for layer in range(sizes.num_hidden_layers):
            keys, values = (torch.randn(1, sizes.num_key_value_heads, missing, sizes.head_dim) for _ in range(2))
            cache.update(keys, values, layer)


def _bytes(cache: Any) -> int:
    if isinstance(cache, MHLACache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    main()
