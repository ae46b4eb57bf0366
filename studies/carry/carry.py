"""How close sparse attention stays to the unpatched pipeline, per cost: density, dense steps, profiles and step caches.

    python studies/carry/carry.py --steps 50
    python studies/carry/carry.py --steps 50 --long outputs/tiny-wan-long/pipeline

Every row generates the same scenes from the same noise with an untrained patch, batches of ten. PSNR and SSIM to the
unpatched pipeline's frames (mean and standard error over scenes), digits recognised, and what ran: self-attention as
keys that a query attends to over N, listed and pooled, averaged over all steps, and the share of the attentions that a
step cache has not left out. Rows go to <pipeline>-<steps>.csv beside this file, and the PSNR of every scene to
<pipeline>-<steps>-clips.csv, one after the other: the same command goes on where it was stopped.
"""

import argparse
import csv
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig, WanPipeline

from mhla_diffusers import apply_mhla
from mhla_diffusers.config import NOTHING_DENSE, PROFILES
from mhla_diffusers.families import get_family
from mhla_diffusers.generation.similarity import psnr, ssim
from mhla_diffusers.patching import find_patched
from mhla_diffusers.patching.call import held
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.digits import LONG, TINY
from studies.adaptation.judging import Yardstick

HERE = Path(__file__).parent
POOLED = 1 / 32
"""Pooled keys over N: one for the 32 keys of a block."""
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
    profile: str = ""
    """In place of ``dense``."""

    @classmethod
    def of(cls, profile: str) -> "Row":
        """A profile as it is."""
        return cls(PROFILES[profile].density, profile=profile)

    @property
    def name(self) -> tuple[str, str, str, str]:
        """The first columns."""
        dense = self.profile or ", ".join(f"{key} {value}" for key, value in self.dense.items() if key != "correct")
        corrected = ("" if not dense else "yes") if self.dense.get("correct", True) else "no"
        return "" if self.density is None else f"{self.density:g}", dense, corrected, self.cache


def rows_of(steps: int) -> list[Row]:
    """What is compared: profiles, density alone, five or ten dense steps in all, and step caches."""
    five, ten = ({"dense_first": 1, "dense_every": steps // number} for number in (5, 10))
    rows = [*map(Row.of, PROFILES), Row(0.05), Row(0.05, five), Row(cache="First Block Cache 0.05"), Row(0.15)]
    rows += [Row(0.05, five | {"correct": False}), Row(0.15, five), Row(0.25), Row(cache=f"TaylorSeer {steps // 10}")]
    return [*rows, Row(0.025), Row(0.4), Row(0.025, five), Row(0.05, ten)]


def step_cache(name: str) -> Any:
    """Diffusers' configuration of a row's cache. TaylorSeer's own patterns match no module of Wan, so its lite form."""
    kind, number = name.rsplit(" ", 1)
    if kind == "TaylorSeer":
        return TaylorSeerCacheConfig(int(number), taylor_factors_dtype=torch.float32, use_lite_mode=True)
    return FirstBlockCacheConfig(float(number))


class Costs:
    """Counts what the self-attentions of a transformer compute while it samples."""

    def __init__(self, transformer: Any, density: float | None) -> None:
        self.transformer, self.density, self.ran = transformer, density, 0.0
        self.calls, self.forwards = 0, 0
        self.blocks = get_family(transformer).self_attentions(transformer)
        patched = {name for one in find_patched(transformer).values() for name in one.chosen}
        transformer.register_forward_pre_hook(self._count_forward)
        for name, attn in self.blocks.items():  # at the projection: a step cache puts itself around the forward
            attn.to_q.register_forward_pre_hook(partial(self._count, name in patched))

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def _count(self, is_patched: bool, *_: Any) -> None:
        call = held().call
        is_dense = not is_patched or call is None or call.is_dense
        is_sparse = not is_dense or (is_patched and call is not None and call.records_residual)
        self.calls += 1
        self.ran += is_dense + is_sparse * ((self.density or 0) + POOLED)  # both where it measures a residual

    @property
    def cost(self) -> float:
        """Keys that a query attends to over N, per attention and forward, those that were left out included."""
        return self.ran / (self.forwards * len(self.blocks))

    @property
    def share(self) -> float:
        """Share of the attentions that ran."""
        return self.calls / (self.forwards * len(self.blocks))


def pipeline(long: Path | None, row: Row) -> tuple[Any, Costs]:
    """A fresh pipeline of a row, and what counts what it does."""
    pipe = load_tiny("wan") if long is None else WanPipeline.from_pretrained(long)
    pipe.set_progress_bar_config(disable=True)
    if row.profile:
        apply_mhla(pipe, row.profile)
    elif row.density is not None:
        apply_mhla(pipe, density=row.density, **NOTHING_DENSE | row.dense)
    costs = Costs(pipe.transformer, row.density)
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
    parser.add_argument("--long", type=Path, help="pipeline of tools/make_tiny.py wan-long; tiny-wan without it")
    parser.add_argument("--steps", type=int, choices=(20, 50), default=50)
    parser.add_argument("--scenes", type=int, default=10)
    arguments = parser.parse_args()
    tiny, steps = LONG if arguments.long else TINY["wan"], arguments.steps
    yardstick = Yardstick(tiny, tiny.random_scenes(arguments.scenes, seed=1), seed=1)
    files = [HERE / f"{tiny.name}-{steps}{ending}.csv" for ending in ("", "-clips")]
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
        for row in [Row(), *rows_of(steps)]:
            if unpatched is not None and row.name in done & done_by_clip:
                continue
            pipe, costs = pipeline(arguments.long, row)
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
