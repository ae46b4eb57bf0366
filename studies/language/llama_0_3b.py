"""The paper's language model (Sec. 5.4): 0.3B, 10B tokens of FineWeb-Edu, 2,048 tokens in 32 blocks, after GLA's.

    pip install datasets lm-eval
    accelerate launch studies/language/llama_0_3b.py train --kind MHLA --output outputs/llama-0.3b
    python studies/language/llama_0_3b.py judge --kind MHLA --output outputs/llama-0.3b --tasks arc_easy,hellaswag

Never run here: it takes GPUs and the Hub. A step is 128 rows, 0.26M tokens, of one process; with P processes divide
RECIPE's accumulate by P. Training resumes from the last checkpoint in the folder.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from mhla_llama import apply_mhla
from safetensors.torch import load_model
from tiny_llama import Recipe, train
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TOKENIZER = "mistralai/Mistral-7B-v0.1"
LENGTH = 2048
RECIPE = Recipe(steps=38147, batch_size=16, accumulate=8, rate=3e-4, mixing_rate=3e-4, warmup=1000, bf16=True)
MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "use_cache": False,
}
BLOCKS: dict[str, Any] = {"blocks": 32, "block_length": 64}
KINDS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "plain linear": {**BLOCKS, "own": "linear", "mixing_init": "uniform", "mixing_learnable": False},
    "MHLA": {**BLOCKS, "own": "linear"},
    "MHLA, softmax in the own block": BLOCKS,
}


class StreamedRows(IterableDataset[dict[str, torch.Tensor]]):
    """Rows of ``length`` tokens, cut from texts as they come; what does not fill the last row is left out."""

    def __init__(self, texts: Callable[[], Iterable[str]], encode: Callable[[str], list[int]], length: int) -> None:
        self.texts, self.encode, self.length = texts, encode, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rest: list[int] = []
        for text in self.texts():
            rest += self.encode(text)
            while len(rest) >= self.length:
                row, rest = torch.tensor(rest[: self.length]), rest[self.length :]
                yield {"input_ids": row, "labels": row}


def build(kind: str) -> Any:
    """A fresh model with a kind of attention; all kinds begin with the same weights."""
    torch.manual_seed(0)
    model, settings = LlamaForCausalLM(LlamaConfig(**MODEL)), KINDS[kind]
    return model if settings is None else apply_mhla(model, **settings)


def fineweb_edu(tokenizer: Any) -> StreamedRows:
    """Rows of FineWeb-Edu, read from the Hub while it is trained on."""
    from datasets import load_dataset

    def texts() -> Iterator[str]:
        for sample in load_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train", streaming=True):
            yield sample["text"]

    return StreamedRows(texts, lambda text: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id], LENGTH)


def main() -> None:
    """Train one kind, or print its zero-shot scores by lm-eval as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "judge"))
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", default="arc_easy,hellaswag", help="of lm-eval, with commas between")
    given = parser.parse_args()
    model, tokenizer = build(given.kind), AutoTokenizer.from_pretrained(TOKENIZER)
    if given.what == "train":
        train(model, fineweb_edu(tokenizer), RECIPE, seed=0, output=given.output)
        return
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    load_model(model, given.output / f"checkpoint-{RECIPE.steps}" / "model.safetensors")
    # one text at a time: lm-eval pads prompts on the left to generate, which would shift the blocks
    judge = HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=1, max_length=LENGTH)
    found = simple_evaluate(judge, tasks=given.tasks.split(","))
    sys.stdout.write(json.dumps(found["results"], indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
