"""What every kind of attention does to DINOv2-S without training, on twelve photographs.

    python studies/real_weights/untrained.py measure --pixels 518 1036 1554
    python studies/real_weights/untrained.py time        # on a machine that does nothing else

Rows go to untrained-<pixels>.csv and times-<pixels>.csv beside this file; rows that are there are kept, so a command
goes on where it was stopped.
"""

import argparse
import csv
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dinov2 import Measured, Saliency, attend_with, measure, open_model, see
from fetch import PATCH, photographs, pixels_of

from mhla_diffusers import SparseConfig
from mhla_diffusers.attention.blocks import list_length

HERE = Path(__file__).parent
DENSITIES = (0.025, 0.05, 0.1, 0.15, 0.25)
_MEANS = {"far": "means"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "plain linear": {"blocks": (1, 1)},
    "MHLA": {"blocks": (4, 4)},
    **{f"sparse {density:.1%}": {"density": density} for density in DENSITIES},
    **{f"sparse {density:.1%}, means alone": {"density": density, **_MEANS} for density in DENSITIES},
    **{
        f"sparse {density:.1%}, means alone, along the curve": {"density": density, "order": "curve", **_MEANS}
        for density in DENSITIES
    },
}
LARGEST = ("softmax", "plain linear", "MHLA", "sparse 5.0%", "sparse 15.0%", "sparse 2.5%", "sparse 5.0%, means alone")
"""Rows at the largest size, where second views are left out too, and rows that are timed."""
ROUNDS = 3


def cost(name: str, pixels: int) -> float:
    """Return keys that a query attends to, listed and pooled, over N; 0 for linear attention, 1 for softmax."""
    settings, side = VARIANTS[name], pixels // PATCH
    if settings is None or "blocks" in settings:
        return 1.0 if settings is None else 0.0
    rule, tokens = SparseConfig(**settings).rule_on((side, side)), side**2
    blocks = -(-tokens // rule.key_block_size)
    listed = list_length(rule.density, blocks)
    return (listed * rule.key_block_size + blocks - listed) / tokens


def write_measured(pixels: int) -> None:
    """Write untrained-<pixels>.csv."""
    file, header = HERE / f"untrained-{pixels}.csv", ["self-attention", "cost", *list(Measured.__annotations__)[:-2]]
    header += [f"layer {index}" for index in range(1, 13)] + [x.stem for x in photographs()]
    done = {row["self-attention"] for row in csv.DictReader(file.open())} if file.is_file() else set()
    model, saliency = open_model(), Saliency()
    names = LARGEST if pixels > 1100 else tuple(VARIANTS)
    if done.issuperset(names):
        return
    seen = see(model, pixels)
    with file.open("a", newline="") as output:
        table = csv.writer(output)
        if not done:
            table.writerow(header)
        for name in names:
            if name in done:
                continue
            attend_with(model, VARIANTS[name])
            found = measure(model, seen, saliency, views=pixels < 1100)
            numbers = list(vars(found).values())[:-2]
            row = cost(name, pixels), *numbers, *found.layers, *found.photographs
            table.writerow([name, *(f"{x:.4f}" for x in row)])
            output.flush()
            sys.stdout.write(f"{pixels} {name}: {found.features:.3f}\n")
            sys.stdout.flush()


@torch.no_grad()
def write_times(pixels: int) -> None:
    """Write times-<pixels>.csv: seconds per photograph, all variants in turns, median of the rounds."""
    names = list(LARGEST)
    models = {name: open_model() for name in names}
    picture = pixels_of(photographs()[0], pixels)
    for name, model in models.items():
        attend_with(model, VARIANTS[name])
        model(picture)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            model(picture)
            seconds[name].append(time.perf_counter() - start)
    with (HERE / f"times-{pixels}.csv").open("w", newline="") as output:
        table = csv.writer(output)
        table.writerow(["self-attention", "seconds", "times as fast as softmax"])
        for name, found in seconds.items():
            table.writerow([name, f"{median(found):.3f}", f"{median(seconds['softmax']) / median(found):.2f}"])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "time"))
    parser.add_argument("--pixels", type=int, nargs="+", default=[518, 1036, 1554], help="sides, multiples of 14")
    arguments = parser.parse_args()
    for pixels in arguments.pixels:
        (write_measured if arguments.what == "measure" else write_times)(pixels)


if __name__ == "__main__":
    main()
