"""Adapt DINOv2-S to every kind of attention, on frames of clips, and measure it on photographs it never saw.

    OMP_NUM_THREADS=1 python studies/real_weights/adapted.py train           # all runs that are not there yet
    OMP_NUM_THREADS=1 python studies/real_weights/adapted.py train --only MHLA --seeds 0
    python studies/real_weights/adapted.py table

First every attention alone learns from that of the unpatched model, given the same input (attention transfer), then
the whole model learns its last hidden state (feature distillation). No labels. A run that is finished is a file in
adapted/, and is not run again.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from dinov2 import DinoMHLA, Saliency, attend_with, attentions, features_error, measure, open_model, recorded, see
from fetch import FOLDER, frames, pixels_of
from safetensors.torch import load_file, save_file
from torch import nn

from mhla_diffusers.attention import clip_mixing_
from mhla_diffusers.files import write_json
from studies.tables import mean_and_spread, write_table

HERE = Path(__file__).parent
PIXELS, BATCH = 518, 2
FRAMES_PER_CLIP = 5
UPDATES = {"transfer": 120, "distillation": 80}
RATES = {"transfer": 5e-4, "distillation": 2e-5}
"""With 1e-4 in the second stage the features get worse, from .71 to .78 (MHLA)."""
MIXING_RATE, WARM_UP = 1e-2, 10
LOOKS = (60, 120, 160, 200)
"""Updates after which the photographs are looked at."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain linear": {"blocks": (1, 1)},
    "MHLA": {"blocks": (4, 4)},
    "MHLA + CPE": {"blocks": (4, 4), "convolution": 3},
    "MHLA in 2/3 of the layers": {"blocks": (4, 4), "hybrid": True},
}
SEEDS = {"plain linear": (0, 1, 2), "MHLA": (0, 1, 2)}
"""Only the first where nothing is said."""


def relative_loss(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the squared error over the square of what is expected."""
    return (found.float() - expected).square().sum() / expected.square().sum()


@torch.no_grad()
def training_frames() -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 frames as DINOv2 takes them before it sees them as numbers, and its last hidden state of each.

    Both are kept: the model without a patch takes a second per frame.
    """
    file = FOLDER / f"frames-{PIXELS}-{FRAMES_PER_CLIP}.safetensors"
    if not file.is_file():
        model, pictures = open_model(), frames(FRAMES_PER_CLIP)
        pixels = torch.cat([pixels_of(x, PIXELS) for x in pictures]).half()
        hidden = torch.cat([model(x[None].float()).last_hidden_state.half() for x in pixels])
        save_file({"pixels": pixels, "hidden": hidden}, file)
    kept = load_file(file)
    return kept["pixels"], kept["hidden"]


def trained(
    student: nn.Module, losses: Iterator[torch.Tensor], steps: int, rate: float, warm_up: int
) -> Iterator[float]:
    """Train for some updates with a fresh optimizer, and yield the loss of each.

    Learning rates rise over the warm-up, stay, and fall to a tenth over the second half.

    Args:
        student: what is trained.
        losses: computes the loss of an update when it is asked for it, under bfloat16 autocast.
        steps: updates.
        rate: learning rate of all but mixing matrices.
        warm_up: updates.
    """
    named = dict(student.named_parameters())
    mixing = [x for name, x in named.items() if name.endswith((".mixing", ".log_weight"))]
    others = [x for name, x in named.items() if not name.endswith((".mixing", ".log_weight"))]
    groups = [{"params": others, "initial_lr": rate}, {"params": mixing, "initial_lr": MIXING_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for step in range(steps):
        factor = min((step + 1) / warm_up, 1.0) * (1 - 0.9 * max(0.0, 2 * step / steps - 1))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for layer in mhla_of(student).values():
                clip_mixing_(layer.mixing)
        yield loss.item()


def make_student(variant: str) -> nn.Module:
    """Return a model with another attention."""
    return attend_with(open_model(), VARIANTS[variant]).train()


def mhla_of(model: nn.Module) -> dict[str, DinoMHLA]:
    """Return the attentions that are MHLA; the others of a hybrid have nothing to learn from their own teacher."""
    return {name: x for name, x in attentions(model).items() if isinstance(x, DinoMHLA)}


def transfer_loss(teacher: nn.Module, student: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every patched attention on the teacher's input, mean over layers."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    with torch.no_grad(), recorded(attentions(teacher), inputs, outputs):
        teacher(pixels)
    losses = [relative_loss(x(inputs[name])[0], outputs[name].float()) for name, x in mhla_of(student).items()]
    return torch.stack(losses).mean()


def train(variant: str, seed: int) -> dict[str, Any]:
    """Return the losses of a run, what was measured on the way, and at its end."""
    pixels, hidden = training_frames()
    seen, saliency, teacher, student = see(open_model(), PIXELS), Saliency(), open_model(), make_student(variant)
    torch.manual_seed(seed)
    result: dict[str, Any] = {"transfer": [], "distillation": [], "photographs": [[0, features_error(student, seen)]]}
    batches = iter(torch.randperm(len(pixels)).split(BATCH))
    losses = {
        "transfer": (transfer_loss(teacher, student, pixels[chosen].float()) for chosen in batches),
        "distillation": (
            relative_loss(student(pixels[chosen].float()).last_hidden_state, hidden[chosen].float())
            for chosen in batches
        ),
    }
    seconds, update = 0.0, 0
    for stage, steps in UPDATES.items():
        start = time.process_time()
        for loss in trained(student, losses[stage], steps, RATES[stage], WARM_UP):
            seconds, update = seconds + time.process_time() - start, update + 1
            result[stage].append(loss)
            if update in LOOKS:
                result["photographs"].append([update, features_error(student, seen)])
                sys.stdout.write(f"{variant}, seed {seed}, update {update}: {result['photographs'][-1][1]:.4f}\n")
                sys.stdout.flush()
            start = time.process_time()
    result["minutes"] = seconds / 60
    result["measured"] = vars(measure(student.eval(), seen, saliency))
    save_file(
        {name: x.contiguous() for name, x in student.state_dict().items()},
        FOLDER / f"adapted-{file_name(variant, seed)}.safetensors",
    )
    return result


def file_name(variant: str, seed: int) -> str:
    """Return the name of a run's file, without its ending."""
    kept = "".join(x if x.isalnum() else "-" for x in variant.lower())
    return f"{'-'.join(filter(None, kept.split('-')))}-{seed}"


def write_tables() -> None:
    """Write adapted.csv and adapted.md from the runs that are there."""
    rows = []
    for variant in VARIANTS:
        files = [HERE / "adapted" / f"{file_name(variant, seed)}.json" for seed in (0, 1, 2)]
        runs = [json.loads(x.read_text()) for x in files if x.is_file()]
        if runs:
            columns = ("features", "attention", "cosine", "matches", "mask")
            measured = [mean_and_spread([x["measured"][name] for x in runs], ".3f") for name in columns]
            before = fmean(x["photographs"][0][1] for x in runs)
            minutes = fmean(x["minutes"] for x in runs)
            rows.append([variant, str(len(runs)), f"{before:.3f}", *measured, f"{minutes:.0f}"])
    header = ["attention", "seeds", "features before", "features", "attention", "cosine", "matches", "mask", "minutes"]
    write_table(header, rows, HERE, "adapted")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "table"))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.what == "train":
        for seed in arguments.seeds:
            for variant in arguments.only:
                file = HERE / "adapted" / f"{file_name(variant, seed)}.json"
                if seed in SEEDS.get(variant, (0,)) and not file.is_file():
                    file.parent.mkdir(exist_ok=True)
                    write_json(train(variant, seed), file)
    write_tables()


if __name__ == "__main__":
    main()
