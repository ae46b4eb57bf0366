"""How fast each kind of attention adapts: the tiny Wan pipeline on clips of moving digits, on a CPU.

python studies/adaptation/compare.py sparse    # block size, density, pooled keys, β fitted or learned
python studies/adaptation/compare.py recipes   # the diffusion loss alone, with distillation, attention transfer first
python studies/adaptation/compare.py settings  # MHLA's own settings
python studies/adaptation/compare.py per-head  # a mixing matrix for every head, and what goes with it

Every variant starts from the same trained softmax model and adapts for as many steps on the same data; held-out losses
go to <table>.csv and <table>.md, with several seeds of training as mean ± standard deviation. Runs that are finished
are kept, so a command goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mhla_diffusers import MHLAConfig
from mhla_diffusers.benchmark.timing import Budget, Variant, time_interleaved
from mhla_diffusers.demo.adaptation import DIFFUSION, Adaptation, Recipe, digit_latents, held_out_curve
from mhla_diffusers.families import predict
from mhla_diffusers.reporting import mean_and_spread, write_table
from mhla_diffusers.tiny import TINY, load_tiny

FINE = (3, 4, 4)
"""Blocks on the token grid 9x8x8: 48 of 12 tokens."""
_PER_HEAD = MHLAConfig(blocks=FINE, mixing_per_head=True)
_SPARSE = _PER_HEAD.replace(sparse="content", block_size=4)
ATTENTIONS: dict[str, MHLAConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False),
    "MHLA": MHLAConfig(blocks=FINE),
    "MHLA hybrid 2/3": MHLAConfig(blocks=FINE, layers="2/3"),
    "MHLA auto:2/3": MHLAConfig(blocks=FINE, layers="auto:2/3"),
    "MHLA, blocks of 4": MHLAConfig(blocks=(9, 4, 4)),
    "MHLA, elu+1": MHLAConfig(blocks=FINE, feature_map="elu+1"),
    "MHLA, softmax feature map": MHLAConfig(blocks=FINE, feature_map="softmax"),
    "MHLA, RoPE before": MHLAConfig(blocks=FINE, rope="before"),
    "MHLA, mixing per head": MHLAConfig(blocks=FINE, mixing_per_head=True),
    "MHLA, output norm and gate": MHLAConfig(blocks=FINE, output_norm=True, output_gate=True),
    "MHLA hybrid 2/3, per head": MHLAConfig(blocks=FINE, layers="2/3", mixing_per_head=True),
    "MHLA, per head, blocks of 4": MHLAConfig(blocks=(9, 4, 4), mixing_per_head=True),
    "sparse": _SPARSE,
    "sparse, no pooled keys": _SPARSE.replace(pooled=False),
    "sparse, β learned": _SPARSE.replace(fit_pooled_bias=False),
    "sparse, blocks of 8": _SPARSE.replace(block_size=8),
    "sparse, 2.5 %": _SPARSE.replace(density=0.025),
    "sparse, 10 %": _SPARSE.replace(density=0.1),
}


TRANSFER = {"transfer_steps": 100}
"""Steps of attention transfer, which come before those end to end, unless the command line says otherwise."""
RECIPES: dict[str, dict[str, Any]] = {
    "diffusion": {"objectives": DIFFUSION},
    "distillation": {},
    "transfer first": TRANSFER,
    "transfer first, gentle": {**TRANSFER, "scheduler": "cosine", "learning_rate": 2e-4},
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
    "sparse": [("transfer first, gentle", name) for name in ATTENTIONS if name.startswith("sparse")],
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
"""Updates end to end after which the held-out loss is shown; 0 is after attention transfer, if there is any."""


@dataclass(frozen=True)
class Comparison:
    """What all variants have in common."""

    adaptation: Adaptation
    steps: int
    """End to end."""
    transfer_steps: int
    """Of the recipes that have any."""
    seeds: tuple[int, ...]
    """Of training."""
    timing_seconds: float
    output: Path

    def adapt(self, name: str, attention: str) -> list[dict[int, float]]:
        """Held-out loss by steps end to end, for every seed."""
        settings = {"scheduler": "constant", **RECIPES[name]}
        if "transfer_steps" in settings:
            settings["transfer_steps"] = self.transfer_steps
        recipe = Recipe(self.steps, **settings)
        curves = []
        for seed in self.seeds:
            folder = self.folder(name, attention, seed)
            if not (folder / "result").is_dir():
                replace(self.adaptation, seed=seed).adapt(self.patched(attention), recipe, folder)
            curves.append({step - recipe.transfer_steps: loss for step, loss in held_out_curve(folder)})
        return curves

    def folder(self, name: str, attention: str, seed: int) -> Path:
        """Of one run."""
        words = f"{name} {attention}".translate({ord(","): None, ord(" "): "-", ord("/"): "-", ord("%"): None})
        return self.output / f"{words}-{seed}"

    def patched(self, attention: str) -> Any:
        """A fresh pipeline; automatic hybrids are chosen, and λ and β fitted, on a fixed batch."""
        return self.adaptation.patched(
            ATTENTIONS[attention], lambda pipe: predict(pipe.transformer, self.batch(pipe.transformer, 16))
        )

    def batch(self, transformer: Any, samples: int) -> Any:
        """The first samples, noised to equally spaced timesteps."""
        samples = min(samples, len(self.adaptation.data) - self.adaptation.held_out)
        return self.adaptation.batch(transformer, range(samples), (torch.arange(samples) + 0.5) / samples)

    def seconds(self, attentions: list[str]) -> dict[str, float]:
        """Median time of a forward and backward pass, all variants in turns."""

        def update(name: str) -> Callable[[], object]:
            transformer = self.patched(name).transformer
            batch = self.batch(transformer, self.adaptation.batch_size)
            return lambda: predict(transformer, batch).square().mean().backward()

        variants: dict[str, Variant] = {name: update(name) for name in attentions}
        outcomes = time_interleaved(variants, torch.device("cpu"), Budget(seconds=self.timing_seconds))
        return {name: outcome.timing.median for name, outcome in outcomes.items() if outcome.timing}


def main() -> None:
    """Run all variants of a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--transfer-steps", type=int, default=TRANSFER["transfer_steps"])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of training; the data are always the same")
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
    comparison = Comparison(
        adaptation,
        arguments.steps,
        arguments.transfer_steps,
        tuple(arguments.seeds),
        arguments.timing_seconds,
        arguments.output,
    )
    columns = [column for column in COLUMNS if column <= arguments.steps]
    runs = TABLES[arguments.table]
    losses = {run: comparison.adapt(*run) for run in runs}
    seconds = comparison.seconds(sorted({attention for _, attention in runs}))
    rows = []
    for recipe, attention in runs:
        curves = losses[recipe, attention]
        cells = [mean_and_spread([curve[min(curve)] for curve in curves], ".4f")]
        for step in columns:
            reached = step in curves[0]
            cells.append(mean_and_spread([curve[step] for curve in curves], ".4f") if reached else "–")
        rows.append([recipe, attention, *cells, f"{1000 * seconds[attention]:.0f}"])
    header = ["losses", "attention", "untrained", *map(str, columns), "ms forward+backward"]
    sys.stdout.write(write_table(header, rows, arguments.output, arguments.table))


if __name__ == "__main__":
    main()
