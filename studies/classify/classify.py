"""Train a small classifier with four kinds of attention on the sum of two handwritten digits, and look at each.

    OMP_NUM_THREADS=1 python studies/classify/classify.py
    python studies/classify/classify.py --steps 20 --seeds 0 --held-out 100 --output outputs/classify    # a minute

Writes a JSON file per training, comparison.md, comparison.csv and attention-maps.png. Finished trainings are kept.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pooled_vit import PooledViT
from torch.nn import functional
from transformers import get_cosine_schedule_with_warmup

from mhla_diffusers import apply_mhla
from mhla_diffusers.auditing import TransformerCall
from mhla_diffusers.files import write_json
from mhla_diffusers.patching import register_mixing_clip
from mhla_diffusers.reporting import require_matplotlib
from studies.adaptation.digits import Digits, load_digits
from studies.analysis.matrices import each_attention_matrix, entropy, rank
from studies.tables import mean_and_spread, write_table

SIZE, PATCH, DIGIT = 64, 8, 16
"""Pixels of a picture, a patch and a digit. Digits lie at multiples of a patch, so that a model learns in minutes."""
SUMS = 19
"""Classes: the sums from 0 to 18."""
BATCH, RATE, MIXING_RATE, DECAY, WARM_UP = 64, 2e-3, 1e-4, 0.05, 0.1
"""Entries of the mixing matrix are of the size of 1 / M; at 2e-3 they saturate and MHLA learns less."""
LOOKED_AT = 8
"""Held-out pictures whose attention matrices are formed."""
VARIANTS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    # all blocks weigh alike and stay so
    "plain linear": {"blocks": (4, 4), "mixing_init": "uniform", "mixing_learnable": False},
    "MHLA": {"blocks": (4, 4)},
    "MHLA + CPE": {"blocks": (4, 4), "convolution": 3},
}


def draw_pictures(digits: Digits, count: int, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pictures of two digits that do not overlap.

    Args:
        digits: of one split.
        count: B.
        key: what the pictures follow from.

    Returns:
        Pixels (B, 3, SIZE, SIZE) in [-1, 1], and labels (B,), the sums.
    """
    chance = random.Random(key)
    pictures, labels = torch.zeros(count, SIZE, SIZE), torch.zeros(count, dtype=torch.long)
    for index in range(count):
        while True:
            (top, left), (other_top, other_left) = places = [
                [chance.randrange(0, SIZE - DIGIT + 1, PATCH) for _ in "yx"] for _ in range(2)
            ]
            if abs(top - other_top) >= DIGIT or abs(left - other_left) >= DIGIT:
                break
        for y, x in places:
            label = chance.randrange(10)
            digit = digits.pick(label, chance)[None, None]
            drawn = functional.interpolate(digit, size=(DIGIT, DIGIT), mode="bilinear")[0, 0]
            pictures[index, y : y + DIGIT, x : x + DIGIT] = drawn
            labels[index] += label
    return (2 * pictures - 1)[:, None].expand(-1, 3, -1, -1), labels


def build(variant: str, seed: int) -> PooledViT:
    """Return an untrained model; all variants of a seed begin with the same weights, as far as they have them."""
    torch.manual_seed(seed)
    model = PooledViT(SIZE, PATCH, SUMS, width=96, layers=3, heads=8, inner=192, spread=0.1)
    settings = VARIANTS[variant]
    return model if settings is None else apply_mhla(model, **settings)


def train(model: PooledViT, steps: int, seed: int) -> float:
    """Train a model in place; return the CPU seconds that it took."""
    begin, digits = time.process_time(), load_digits("train")
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    mixing = [one for name, one in trained.items() if name.endswith((".mixing", ".linear_log_weight"))]
    matrices = [one for name, one in trained.items() if name.endswith("weight") and one.ndim > 1]
    used = {id(one) for one in (*mixing, *matrices)}
    others = [one for one in trained.values() if id(one) not in used]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
        {"params": mixing, "weight_decay": 0.0, "lr": MIXING_RATE},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE)
    if mixing:
        register_mixing_clip(optimizer, model)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(WARM_UP * steps), steps)
    for step in range(steps):
        pixels, labels = draw_pictures(digits, BATCH, f"train {seed} {step}")
        loss = functional.cross_entropy(model(pixels)[0], labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            sys.stderr.write(f"{step + 1} of {steps} steps, loss {loss.item():.3f}\n")
    model.eval()
    return time.process_time() - begin


@torch.no_grad()
def judge(model: PooledViT, held_out: int) -> dict[str, Any]:
    """Measure accuracy on held-out digits, and rank and entropy of attention (paper, Fig. 3b), means over all layers.

    ``map`` is what the token in the middle of the first picture gives to all tokens in the second layer.
    """
    pixels, labels = draw_pictures(load_digits("held-out"), held_out, "held-out")
    right = [
        model(some)[0].argmax(dim=1) == sums for some, sums in zip(pixels.split(64), labels.split(64), strict=True)
    ]
    matrices = dict(each_attention_matrix(model, TransformerCall((pixels[:LOOKED_AT],), {})))
    middle = (SIZE // PATCH) ** 2 // 2 + SIZE // PATCH // 2
    row = matrices["layers.1.attn"][0, :, middle].mean(dim=0)
    return {
        "top-1": torch.cat(right).float().mean().item(),
        "rank": fmean(map(rank, matrices.values())),
        "entropy": fmean(map(entropy, matrices.values())),
        "map": [round(weight, 6) for weight in row.tolist()],
    }


def result_of(variant: str, seed: int, steps: int, held_out: int, folder: Path) -> dict[str, Any]:
    """Return the result of a training, from its file if it is there; ValueError if that has other settings."""
    file = folder / f"{variant.replace('+', 'plus').replace(' ', '-').lower()}-seed-{seed}.json"
    settings = {"steps": steps, "held_out": held_out}
    if not file.is_file():
        sys.stderr.write(f"{variant}, seed {seed}\n")
        model = build(variant, seed)
        seconds = train(model, steps, seed)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        found = {**judge(model, held_out), "parameters": parameters, "seconds": seconds, "settings": settings}
        write_json(found, file)
    found = json.loads(file.read_text())
    if found["settings"] != settings:
        raise ValueError(f"{file} was trained with {found['settings']}, not {settings}; give another --output.")
    return found


def draw_maps(results: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw the attention map of every variant's first seed."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(1, len(results), figsize=(2.9 * len(results), 3.1), layout="constrained")
    for axis, (name, found) in zip(axes, results.items(), strict=True):
        image = axis.imshow(torch.tensor(found[0]["map"]).view(SIZE // PATCH, -1), cmap="magma", vmin=0)
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()
        figure.colorbar(image, ax=axis, shrink=0.8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def compare(seeds: Sequence[int], steps: int, held_out: int, folder: Path) -> str:
    """Train what is missing; write table and picture, and return the table as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: [result_of(name, seed, steps, held_out, folder) for seed in seeds] for name in VARIANTS}
    draw_maps(results, folder / "attention-maps.png")
    rows = []
    for name, found in results.items():
        cells = {"top-1": (100, ".1f"), "rank": (1, ".1f"), "entropy": (1, ".2f"), "seconds": (1, ".0f")}
        spreads = [mean_and_spread([by * one[key] for one in found], form) for key, (by, form) in cells.items()]
        rows.append([name, f"{found[0]['parameters']:,}", *spreads])
    header = ["attention", "parameters", "top-1, %", "rank", "entropy, nats", "CPU seconds"]
    return write_table(header, rows, folder, "comparison")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--held-out", type=int, default=1000, help="pictures that are judged")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    sys.stdout.write(compare(arguments.seeds, arguments.steps, arguments.held_out, arguments.output))


if __name__ == "__main__":
    main()
