"""How fast each kind of attention adapts: the tiny Wan pipeline on clips of moving digits, on a CPU.

python finetune/compare.py recipes       # the diffusion loss alone, with distillation, attention transfer first
python finetune/compare.py near-field    # softmax attention inside a block, by block size, and hybrids
python finetune/compare.py settings      # MHLA's own settings
python finetune/compare.py per-head      # a mixing matrix for every head, and what goes with it

Every variant starts from the same trained softmax model and adapts for as many steps on the same data; held-out losses
go to <table>.csv and <table>.md. Variants that are finished are kept, so a command goes on where it was stopped.
"""

import argparse
import csv
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.benchmark.timing import Budget, Variant, time_interleaved
from mhla_diffusers.files import write_text
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.demo.latents import digit_latents
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    read_metrics,
    train,
)
from mhla_diffusers.training.latents.data import stack_samples
from mhla_diffusers.families.processes import NoisedBatch, diffusion_process

FINE = (3, 4, 4)
"""Blocks on the token grid 9x8x8: 48 of 12 tokens."""
COARSE = (3, 2, 2)
"""12 of 48 tokens."""
ATTENTIONS: dict[str, MHLAConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False),
    "MHLA": MHLAConfig(blocks=FINE),
    "MHLA hybrid 2/3": MHLAConfig(blocks=FINE, layers="2/3"),
    "MHLA auto:2/3": MHLAConfig(blocks=FINE, layers="auto:2/3"),
    "MHLA, blocks of 48": MHLAConfig(blocks=COARSE),
    "near field, blocks of 12": MHLAConfig(blocks=FINE, near_field="softmax"),
    "near field, blocks of 48": MHLAConfig(blocks=COARSE, near_field="softmax"),
    "near field, blocks of 48, hybrid 2/3": MHLAConfig(blocks=COARSE, near_field="softmax", layers="2/3"),
    "near field, blocks of 48, auto:2/3": MHLAConfig(blocks=COARSE, near_field="softmax", layers="auto:2/3"),
    "MHLA, blocks of 4": MHLAConfig(blocks=(9, 4, 4)),
    "MHLA, elu+1": MHLAConfig(blocks=FINE, feature_map="elu+1"),
    "MHLA, softmax feature map": MHLAConfig(blocks=FINE, feature_map="softmax"),
    "MHLA, RoPE before": MHLAConfig(blocks=FINE, rope="before"),
    "MHLA, mixing per head": MHLAConfig(blocks=FINE, mixing_per_head=True),
    "MHLA, output norm and gate": MHLAConfig(blocks=FINE, output_norm=True, output_gate=True),
    "MHLA hybrid 2/3, per head": MHLAConfig(blocks=FINE, layers="2/3", mixing_per_head=True),
    "MHLA, per head, blocks of 4": MHLAConfig(blocks=(9, 4, 4), mixing_per_head=True),
}


@dataclass(frozen=True)
class Recipe:
    """How a variant adapts."""

    objectives: ObjectiveWeights
    """Of the steps end to end."""
    transfer_steps: int = 0
    """Cheap steps of attention transfer that come first."""
    mixing_learning_rate: float = 5e-3


BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
RECIPES = {
    "diffusion": Recipe(ObjectiveWeights(diffusion=1.0)),
    "distillation": Recipe(BOTH),
    "transfer first": Recipe(BOTH, transfer_steps=100),
    "mixing learns slowly": Recipe(BOTH, mixing_learning_rate=5e-4),
    "mixing learns fast": Recipe(BOTH, mixing_learning_rate=2e-2),
}
SETTINGS = (
    "MHLA",
    "MHLA, blocks of 4",
    "MHLA, elu+1",
    "MHLA, softmax feature map",
    "MHLA, RoPE before",
    "MHLA, mixing per head",
    "MHLA, output norm and gate",
)
_FOUR = ("softmax, trained on", "plain linear", "MHLA", "MHLA hybrid 2/3")
TABLES: dict[str, list[tuple[str, str]]] = {
    "recipes": [
        *(("diffusion", attention) for attention in _FOUR),
        *((recipe, attention) for recipe in ("distillation", "transfer first") for attention in _FOUR[1:]),
    ],
    "near-field": [
        ("distillation", name)
        for name in (*_FOUR[1:], *(name for name in ATTENTIONS if "auto" in name or "of 12" in name or "of 48" in name))
    ],
    "per-head": [
        ("distillation", "MHLA, mixing per head"),
        ("transfer first", "MHLA, mixing per head"),
        ("transfer first", "MHLA hybrid 2/3, per head"),
        ("transfer first", "MHLA, per head, blocks of 4"),
    ],
    "settings": [
        *(("distillation", name) for name in SETTINGS),
        ("mixing learns slowly", "MHLA"),
        ("mixing learns fast", "MHLA"),
    ],
}
COLUMNS = (0, 25, 50, 100, 200, 300)


@dataclass(frozen=True)
class Comparison:
    """What all variants have in common."""

    data: InMemoryData
    held_out: int
    steps: int
    batch_size: int
    timing_seconds: float
    output: Path

    def adapt(self, recipe_name: str, attention: str) -> dict[int, float]:
        """Held-out loss by steps end to end."""
        recipe, patch = RECIPES[recipe_name], ATTENTIONS[attention]
        folder = self.output / f"{recipe_name} {attention}".translate({ord(","): None, ord(" "): "-", ord("/"): "-"})
        if not (folder / "result").is_dir():
            transformer = load_tiny("wan").transformer
            config = self._config(recipe, patch, folder)
            self.patch(transformer, patch)
            train(transformer, self.data, config, resume="latest" if (folder / "checkpoints").is_dir() else None)
        records = read_metrics(folder / "metrics.jsonl")
        return {
            record["step"] - recipe.transfer_steps: record["validation_loss"]
            for record in records
            if "validation_loss" in record
        }

    def patch(self, transformer: Any, patch: MHLAConfig | None) -> None:
        """Replace the attention; automatic hybrids choose their layers on a fixed batch."""
        if patch is None:
            return
        if isinstance(patch.layers, str) and patch.layers.startswith("auto"):
            apply_mhla(transformer, patch, calibration=partial(self.batch(transformer, 8).predict, transformer))
        else:
            apply_mhla(transformer, patch)

    def batch(self, transformer: Any, samples: int) -> NoisedBatch:
        """The first samples, noised to equally spaced timesteps."""
        stacked = stack_samples([self.data[index] for index in range(samples)])
        latents = stacked.pop("latents")
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
        times = (torch.arange(samples) + 0.5) / samples
        return diffusion_process(transformer, 3.0).make_batch(latents, noise, times, stacked)

    def seconds(self, attentions: list[str]) -> dict[str, float]:
        """Median time of a forward and backward pass, all variants in turns."""

        def update(name: str) -> Callable[[], object]:
            transformer = load_tiny("wan").transformer
            self.patch(transformer, ATTENTIONS[name])
            batch = self.batch(transformer, self.batch_size)
            return lambda: batch.predict(transformer).square().mean().backward()

        variants: dict[str, Variant] = {name: update(name) for name in attentions}
        outcomes = time_interleaved(variants, torch.device("cpu"), Budget(seconds=self.timing_seconds))
        return {name: outcome.timing.median for name, outcome in outcomes.items() if outcome.timing}

    def _config(self, recipe: Recipe, patch: MHLAConfig | None, folder: Path) -> TrainingConfig:
        rate = recipe.mixing_learning_rate
        stages = [StageConfig(self.steps, 5e-4, "all", recipe.objectives, mixing_learning_rate=rate)]
        if recipe.transfer_steps:
            transfer = ObjectiveWeights(transfer=1.0)
            stages.insert(0, StageConfig(recipe.transfer_steps, 2e-3, "attention", transfer, mixing_learning_rate=rate))
        return TrainingConfig(
            output=str(folder),
            stages=tuple(stages),
            patch=patch,
            batch_size=self.batch_size,
            prompt_dropout=0.1,
            seed=1,
            checkpoint_every=100,
            keep_checkpoints=1,
            validation=ValidationConfig(self.held_out, every=25),
        )


def write_table(rows: list[list[str]], header: list[str], output: Path, name: str) -> None:
    """As CSV and Markdown."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    lines = [header, ["---"] * len(header), *rows]
    markdown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for suffix, content in ((".csv", text.getvalue()), (".md", markdown)):
        write_text(content, output / f"{name}{suffix}")


def main() -> None:
    """Run all variants of a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--timing-seconds", type=float, default=5.0, help="per attention, once all have adapted")
    arguments = parser.parse_args()
    data = digit_latents(load_tiny("wan"), "wan", arguments.samples, arguments.held_out, seed=1)
    comparison = Comparison(
        data, arguments.held_out, arguments.steps, arguments.batch_size, arguments.timing_seconds, arguments.output
    )
    columns = [column for column in COLUMNS if column <= arguments.steps]
    runs = TABLES[arguments.table]
    losses = {run: comparison.adapt(*run) for run in runs}
    seconds = comparison.seconds(sorted({attention for _, attention in runs}))
    rows = [
        [
            recipe,
            attention,
            *(f"{losses[recipe, attention][step]:.4f}" for step in columns),
            f"{1000 * seconds[attention]:.0f}",
        ]
        for recipe, attention in runs
    ]
    header = ["losses", "attention", *map(str, columns), "ms forward+backward"]
    write_table(rows, header, arguments.output, arguments.table)
    sys.stdout.write((arguments.output / f"{arguments.table}.md").read_text())


if __name__ == "__main__":
    main()
