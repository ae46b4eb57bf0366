"""How close sparse attention stays to the unpatched pipeline, per cost: density, dense steps and step caches.

    python studies/carry/carry.py --family wan --steps 50 --scenes 10
    python studies/carry/carry.py --key-block-size 16

Every row generates the same scenes from the same noise with an untrained patch, batches of ten. PSNR and SSIM to the
unpatched pipeline's frames (mean and standard error over scenes), digits recognised, and what ran: self-attention as
keys that a query attends to over N, listed and pooled, averaged over all steps, and the share of the attentions that a
step cache has not left out. Rows go to <family>-<steps>.csv beside this file, and the PSNR of every scene to
<family>-<steps>-clips.csv, one after the other: the same command goes on where it was stopped.
"""

import argparse
import csv
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

from mhla_diffusers import apply_mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.families import get_family
from mhla_diffusers.generation.similarity import psnr, ssim
from mhla_diffusers.patching.call import held
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.digits import TINY
from studies.adaptation.judging import Yardstick

HERE = Path(__file__).parent
POOLED = 1 / 32
"""Pooled keys over N as at the sizes that sparse attention is for, whose key blocks have 32 tokens; here 4."""
HEADER = (
    "density",
    "dense steps",
    "corrected",
    "cache",
    "cost",
    "ran",
    "psnr",
    "psnr error",
    "ssim",
    "digits",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """One way to sample."""

    density: float | None = None
    """None leaves the model as it is."""
    dense: dict[str, Any] = field(default_factory=dict)
    """``dense_first`` and so on."""
    cache: str = ""
    """Such as "First Block Cache 0.05", with its threshold, or "TaylorSeer 5", with its interval."""

    @property
    def name(self) -> tuple[str, str, str, str]:
        """The first columns."""
        dense = ", ".join(f"{key} {value}" for key, value in self.dense.items() if key != "correct")
        corrected = ("" if not dense else "yes") if self.dense.get("correct", True) else "no"
        return "" if self.density is None else f"{self.density:g}", dense, corrected, self.cache


def rows_of(steps: int) -> list[Row]:
    """What is compared: density alone, five or ten dense steps in all, and step caches."""
    five, ten = ({"dense_first": 1, "dense_every": steps // number} for number in (5, 10))
    rows = [Row(density) for density in (0.025, 0.05, 0.15, 0.25, 0.4)]
    rows += [Row(density, five) for density in (0.025, 0.05, 0.15)]
    rows += [Row(0.05, five | {"correct": False}), Row(0.05, ten)]
    return [*rows, Row(cache="First Block Cache 0.05"), Row(cache=f"TaylorSeer {steps // 10}")]


def coarse_rows(steps: int) -> list[Row]:
    """Rows whose blocks of keys hold as many tokens as --key-block-size says."""
    dense = {"dense_first": 1, "dense_every": steps // 5}
    return [Row(0.025), Row(0.15), Row(0.025, dense), Row(0.05, dense)]


def step_cache(name: str) -> Any:
    """Diffusers' configuration of a row's cache. TaylorSeer's own patterns match no module of Wan, so its lite form."""
    kind, number = name.rsplit(" ", 1)
    if kind == "TaylorSeer":
        return TaylorSeerCacheConfig(int(number), taylor_factors_dtype=torch.float32, use_lite_mode=True)
    return FirstBlockCacheConfig(float(number))


class Costs:
    """Counts what the self-attentions of a transformer compute while it samples."""

    def __init__(self, transformer: Any, density: float | None, pooled: float) -> None:
        self.transformer, self.density, self.pooled, self.ran = transformer, density, pooled, 0.0
        self.calls, self.forwards = 0, 0
        self.blocks = get_family(transformer).self_attentions(transformer)
        transformer.register_forward_pre_hook(self._count_forward)
        for attn in self.blocks.values():  # at the projection: a step cache puts itself around the attention's forward
            attn.to_q.register_forward_pre_hook(self._count)

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def _count(self, *_: Any) -> None:
        call = held().call
        is_dense = self.density is None or call is None or call.is_dense
        is_sparse = not is_dense or (call is not None and call.records_residual)  # both where it measures a residual
        self.calls += 1
        self.ran += is_dense + is_sparse * ((self.density or 0) + self.pooled)

    @property
    def cost(self) -> float:
        """Keys that a query attends to over N, per attention and forward, those that were left out included."""
        return self.ran / (self.forwards * len(self.blocks))

    @property
    def share(self) -> float:
        """Share of the attentions that ran."""
        return self.calls / (self.forwards * len(self.blocks))


def pipeline(family: str, row: Row, key_block_size: int | None) -> tuple[Any, Costs]:
    """A fresh pipeline of a row, and what counts what it does."""
    pipe, settings = load_tiny(family), NOTHING_DENSE | row.dense
    if key_block_size is not None:
        settings |= {"block_size": 2 * key_block_size, "key_block_size": key_block_size}
    if row.density is not None:
        apply_mhla(pipe, density=row.density, **settings)
    costs = Costs(pipe.transformer, row.density, 1 / key_block_size if key_block_size else POOLED)
    if row.cache:
        pipe.transformer.enable_cache(step_cache(row.cache))
    return pipe, costs


def frames(pictures: list[torch.Tensor]) -> torch.Tensor:
    """uint8 (scenes, F, 3, H, W)."""
    stacked = torch.stack(pictures)
    stacked = stacked.view(len(pictures), -1, 1, *stacked.shape[-2:]).expand(-1, -1, 3, -1, -1)
    return (stacked * 255).round().to(torch.uint8)


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("wan", "dit"), default="wan")
    parser.add_argument("--steps", type=int, choices=(20, 50), default=50)
    parser.add_argument("--scenes", type=int, default=10)
    parser.add_argument("--only", type=int, help="as many rows as this alone")
    parser.add_argument(
        "--key-block-size", type=int, help="tokens of a block of keys, of some rows; the cost is theirs"
    )
    arguments = parser.parse_args()
    tiny, steps = TINY[arguments.family], arguments.steps
    yardstick = Yardstick(tiny, tiny.random_scenes(arguments.scenes, seed=1), seed=1)
    keys = arguments.key_block_size
    name = f"{arguments.family}-{steps}{f'-keys-{keys}' if keys else ''}"
    files = [HERE / f"{name}{ending}.csv" for ending in ("", "-clips")]
    done, done_by_clip = (
        {tuple(line[:4]) for line in csv.reader(file.open())} if file.is_file() else set() for file in files
    )
    unpatched: torch.Tensor | None = None
    with files[0].open("a", newline="") as output, files[1].open("a", newline="") as output_by_clip:
        table, clips = csv.writer(output), csv.writer(output_by_clip)
        if not done:
            table.writerow(HEADER)
        if not done_by_clip:
            clips.writerow([*HEADER[:4], *(f"psnr {scene}" for scene in range(arguments.scenes))])
        for row in [Row(), *(coarse_rows(steps) if keys else rows_of(steps))][: arguments.only]:
            if row.cache and arguments.family == "dit":  # to which diffusers gives no step caches
                continue
            if unpatched is not None and row.name in done & done_by_clip:
                continue
            pipe, costs = pipeline(arguments.family, row, keys)
            start = time.perf_counter()
            pictures = yardstick.generate(pipe, num_inference_steps=steps)
            seconds = time.perf_counter() - start
            shown = frames(pictures)
            unpatched = shown if unpatched is None else unpatched
            ratios = [float(psnr(one, other).mean()) for one, other in zip(shown, unpatched, strict=True)]
            alike = fmean(float(ssim(one, other).mean()) for one, other in zip(shown, unpatched, strict=True))
            numbers = costs.cost, costs.share, fmean(ratios), stdev(ratios) / len(ratios) ** 0.5, alike
            cells = [*(f"{number:.3f}" for number in (*numbers, yardstick.accuracy(pictures))), f"{seconds:.1f}"]
            if row.name not in done:
                table.writerow([*row.name, *cells])
                output.flush()
            if row.name not in done_by_clip:
                clips.writerow([*row.name, *(f"{ratio:.2f}" for ratio in ratios)])
                output_by_clip.flush()
            sys.stdout.write(f"{steps} | {' | '.join([*row.name, *cells])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
