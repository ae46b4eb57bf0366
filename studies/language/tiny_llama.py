"""A tiny Llama on the pages of Python's own help(): kinds of attention trained, adapted, and in longer texts.

    OMP_NUM_THREADS=1 python studies/language/tiny_llama.py --output outputs/language

Every kind is trained from scratch with three seeds, and the model with softmax is adapted to the others. A finished
seed is a file, seed-<n>.json, and is not run again.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from mhla_llama import apply_mhla, make_optimizer
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from studies.tables import mean_and_spread, write_table


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, warm-up, then a cosine to 0."""

    steps: int
    batch_size: int
    rate: float
    mixing_rate: float
    """Learning rate of mixing matrices and λ."""
    warmup: int
    """Steps, at most a tenth of all."""
    accumulate: int = 1
    """Batches of a step."""
    bf16: bool = False


LENGTH = 256
"""Tokens, here bytes, of a row."""
SEEDS = (0, 1, 2)
TRAINED = Recipe(steps=240, batch_size=8, rate=2e-3, mixing_rate=2e-2, warmup=24)
ADAPTED = Recipe(steps=60, batch_size=8, rate=2e-3, mixing_rate=2e-2, warmup=6)
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
}
BLOCKS: dict[str, Any] = {"blocks": 16, "block_length": 16}
# within the trained length linear attention without blocks: all weigh alike and stay so
PLAIN = {**BLOCKS, "own": "linear", "mixing_init": "uniform", "mixing_learnable": False}
MHLA = {"plain linear": PLAIN, "MHLA": {**BLOCKS, "own": "linear"}, "MHLA, softmax in the own block": BLOCKS}
"""Settings of MHLA by the name of a kind; it has two more, softmax and gated linear."""
KINDS = ("softmax", "plain linear", "gated linear", "MHLA", "MHLA, softmax in the own block")
ADAPTED_TO = tuple(kind for kind in KINDS if kind != "gated linear")


def rows(length: int, held_out: bool) -> torch.Tensor:
    """Every tenth page as bytes, or all others: (rows, length)."""
    pages = [topics[name] for index, name in enumerate(sorted(topics)) if (index % 10 == 9) == held_out]
    tokens = torch.tensor(list("\n\n".join(pages).encode()))
    return tokens[: len(tokens) // length * length].unflatten(0, (-1, length))


class GatedLinearAttention(nn.Module):
    """Gated linear attention with Llama's projections, to compare with: GLA (Yang et al., 2024, arXiv 2312.06635).

    S_t = diag(α_t) S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √D, α_t = sigmoid(gate_t)^(1/16), then a norm over each head
    and a gate of the output; no RoPE. Token by token, so slow on a GPU.
    """

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.head_dim = int(attn.head_dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        width, inner, keys = attn.q_proj.in_features, attn.q_proj.out_features, attn.k_proj.out_features
        self.decay = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, keys))
        self.norm = nn.RMSNorm(self.head_dim)
        self.gate = nn.Linear(width, inner, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(B, N, hidden size), as Llama calls its attention; masks, positions and caches have no place here."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.decay)
        query, key, value, decay = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in projections)
        groups = query.shape[2] // key.shape[2]
        key, value, decay = (x.repeat_interleave(groups, dim=2) for x in (key, value, decay))
        gates = (functional.logsigmoid(decay) / 16).exp()
        q, k, v, a = (x.unbind(dim=1) for x in (query * self.head_dim**-0.5, key, value, gates))
        state, outputs = torch.zeros_like(k[0][..., None] * v[0][..., None, :]), []
        for token in range(len(q)):
            state = a[token][..., None] * state + k[token][..., None] * v[token][..., None, :]
            outputs.append((q[token][..., None, :] @ state)[..., 0, :])
        output = self.norm(torch.stack(outputs, dim=1)).flatten(2)
        return self.o_proj(output * functional.silu(self.gate(hidden_states))), None


def as_kind(model: Any, kind: str) -> Any:
    """A model with softmax attention, changed in place to attend in another way."""
    if kind == "gated linear":
        for layer in model.model.layers:
            layer.self_attn = GatedLinearAttention(layer.self_attn)
    elif kind != "softmax":
        apply_mhla(model, **MHLA[kind])
    return model


def train(model: Any, data: Any, recipe: Recipe, seed: int, output: Path | None = None) -> float:
    """Train a model in place with transformers' ``Trainer``; the CPU seconds that it took.

    Args:
        model: with any kind of attention.
        data: data set of {"input_ids", "labels"}.
        recipe: of the training.
        seed: of the order of the data.
        output: folder of checkpoints, from the last of which it resumes; None for none.
    """
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as aside:
        arguments = TrainingArguments(
            output_dir=str(output or aside),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.accumulate,
            lr_scheduler_type="cosine",
            warmup_steps=recipe.warmup,
            max_grad_norm=1.0,
            seed=seed,
            data_seed=seed,
            bf16=recipe.bf16,
            save_strategy="no" if output is None else "steps",
            save_steps=500,
            save_total_limit=2,
            logging_steps=100,
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        optimizer = make_optimizer(model, recipe.rate, recipe.mixing_rate, decay=0.01)
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=output is not None and any(output.glob("checkpoint-*")))
    model.eval()
    return time.process_time() - begin


@torch.no_grad()
def losses_by_place(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """Mean loss of every place of texts (rows, N), float64 (N - 1,)."""
    losses = []
    for batch in texts.split(8):
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        losses.append(functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none").double())
    return torch.cat(losses).mean(dim=0)


def perplexity(losses: torch.Tensor) -> float:
    """Return the perplexity of losses of single tokens."""
    return math.exp(float(losses.mean()))


def judged(model: Any) -> dict[str, Any]:
    """Held-out perplexity, and by place in texts of four times the trained length."""
    far = losses_by_place(model, rows(4 * LENGTH, held_out=True))
    return {
        "perplexity": perplexity(losses_by_place(model, rows(LENGTH, held_out=True))),
        "by place": [perplexity(one) for one in (far[:LENGTH], far[LENGTH : 2 * LENGTH], far[2 * LENGTH :])],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def train_and_judge(seed: int) -> dict[str, Any]:
    """Every kind from scratch, and what the one with softmax is adapted to."""
    data = [{"input_ids": row, "labels": row} for row in rows(LENGTH, held_out=False)]
    scratch: dict[str, Any] = {}
    adapted: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(seed)  # all kinds begin with the same weights, as far as they have them
        model = as_kind(LlamaForCausalLM(LlamaConfig(**MODEL)), kind)
        seconds = train(model, data, TRAINED, seed)
        scratch[kind] = {**judged(model), "seconds": seconds}
        for other in ADAPTED_TO if kind == "softmax" else ():
            changed = as_kind(copy.deepcopy(model), other)
            before = perplexity(losses_by_place(changed, rows(LENGTH, held_out=True)))
            seconds = train(changed, data, ADAPTED, seed + 1)
            adapted[other] = {**judged(changed), "seconds": seconds, "before": before}
    return {"scratch": scratch, "adapted": adapted}


def write_tables(results: list[dict[str, Any]], output: Path) -> str:
    """Write scratch, adapted and beyond, as .md and .csv; return them as Markdown."""

    def spread(part: str, kind: str, key: str, style: str = ".3f") -> str:
        return mean_and_spread([one[part][kind][key] for one in results], style)

    scratch, beyond = [], []
    for kind in KINDS:
        parameters = f"{results[0]['scratch'][kind]['parameters']:,}"
        cells = spread("scratch", kind, "perplexity"), spread("scratch", kind, "seconds", ".0f")
        scratch.append([kind, parameters, *cells])
        by_place = zip(*(one["scratch"][kind]["by place"] for one in results), strict=True)
        beyond.append([kind, *(mean_and_spread(found, ".3f") for found in by_place)])
    adapted = [[one, spread("adapted", one, "before"), spread("adapted", one, "perplexity")] for one in ADAPTED_TO]
    places = [f"tokens {a + 1} to {b}" for a, b in ((0, LENGTH), (LENGTH, 2 * LENGTH), (2 * LENGTH, 4 * LENGTH))]
    header = ["attention", "parameters", f"perplexity after {TRAINED.steps} steps", "CPU seconds"]
    then = ["trained with softmax, then", "before adaptation", f"after {ADAPTED.steps} steps"]
    return "\n".join(
        [
            write_table(header, scratch, output, "scratch"),
            write_table(then, adapted, output, "adapted"),
            write_table(["attention", *places], beyond, output, "beyond"),
        ]
    )


def main() -> None:
    """Run the seeds that are not there yet, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"seed-{seed}.json" for seed in SEEDS]
    for seed, file in zip(SEEDS, files, strict=True):
        if not file.is_file():
            file.write_text(json.dumps(train_and_judge(seed), indent=1) + "\n")
    sys.stdout.write(write_tables([json.loads(file.read_text()) for file in files], output))


if __name__ == "__main__":
    main()
