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
from pathlib import Path
from typing import Any

import torch

from mhla_diffusers import MHLAConfig
from mhla_diffusers.benchmark.timing import Budget, Variant, time_interleaved
from mhla_diffusers.demo.adaptation import DIFFUSION, Adaptation, Recipe, held_out_curve
from mhla_diffusers.demo.latents import digit_latents
from mhla_diffusers.files import write_text
from mhla_diffusers.tiny import TINY, load_tiny

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


TRANSFER = 100
"""Steps of attention transfer, which come before those end to end."""
RECIPES: dict[str, dict[str, Any]] = {
    "diffusion": {"objectives": DIFFUSION},
    "distillation": {},
    "transfer first": {"transfer_steps": TRANSFER},
    "mixing learns slowly": {"mixing_learning_rate": 5e-4},
    "mixing learns fast": {"mixing_learning_rate": 2e-2},
}
"""What differs from the diffusion loss with distillation, see :class:`Recipe`."""
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

    adaptation: Adaptation
    steps: int
    """End to end."""
    timing_seconds: float
    output: Path

    def adapt(self, name: str, attention: str) -> dict[int, float]:
        """Held-out loss by steps end to end."""
        recipe = Recipe(self.steps, scheduler="constant", **RECIPES[name])
        folder = self.output / f"{name} {attention}".translate({ord(","): None, ord(" "): "-", ord("/"): "-"})
        if not (folder / "result").is_dir():
            self.adaptation.adapt(self.patched(attention), recipe, folder)
        return {step - recipe.transfer_steps: loss for step, loss in held_out_curve(folder)}

    def patched(self, attention: str) -> Any:
        """A fresh pipeline; automatic hybrids choose their layers on a fixed batch."""
        return self.adaptation.patched(
            ATTENTIONS[attention], lambda pipe: self.batch(pipe.transformer, 8).predict(pipe.transformer)
        )

    def batch(self, transformer: Any, samples: int) -> Any:
        """The first samples, noised to equally spaced timesteps."""
        return self.adaptation.batch(transformer, range(samples), (torch.arange(samples) + 0.5) / samples)

    def seconds(self, attentions: list[str]) -> dict[str, float]:
        """Median time of a forward and backward pass, all variants in turns."""

        def update(name: str) -> Callable[[], object]:
            transformer = self.patched(name).transformer
            batch = self.batch(transformer, self.adaptation.batch_size)
            return lambda: batch.predict(transformer).square().mean().backward()

        variants: dict[str, Variant] = {name: update(name) for name in attentions}
        outcomes = time_interleaved(variants, torch.device("cpu"), Budget(seconds=self.timing_seconds))
        return {name: outcome.timing.median for name, outcome in outcomes.items() if outcome.timing}


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
    tiny = TINY["wan"]
    adaptation = Adaptation(
        tiny,
        digit_latents(load_tiny(tiny.family), tiny, arguments.samples, arguments.held_out, seed=1),
        held_out=arguments.held_out,
        seed=1,
        validate_every=25,
        batch_size=arguments.batch_size,
    )
    comparison = Comparison(adaptation, arguments.steps, arguments.timing_seconds, arguments.output)
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
