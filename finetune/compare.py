"""How fast each kind of attention adapts: the tiny Wan pipeline on clips of moving digits, on a CPU.

python finetune/compare.py --output outputs/compare

Every variant starts from the same trained softmax model, adapts for as many steps on the same data, once with the
diffusion loss alone, once with distillation, and once with attention transfer first; held-out losses go to table.csv.
Variants that are finished are kept, so the command goes on where it was stopped.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.evaluation.results import write_text
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.tiny.latents import digit_latents
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    read_metrics,
    train,
)

BLOCKS = (3, 4, 4)
VARIANTS: dict[str, MHLAConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False),
    "MHLA": MHLAConfig(blocks=BLOCKS),
    "MHLA hybrid 2/3": MHLAConfig(blocks=BLOCKS, layers="2/3"),
    "MHLA, near field": MHLAConfig(blocks=BLOCKS, near_field="softmax"),
}
DIFFUSION = ObjectiveWeights(diffusion=1.0)
BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)


@dataclass(frozen=True)
class Recipe:
    """Which losses, and how many cheap steps of attention transfer come first."""

    objectives: ObjectiveWeights
    transfer_steps: int = 0


def adapt(
    data: InMemoryData,
    held_out: int,
    patch: MHLAConfig | None,
    recipe: Recipe,
    output: Path,
    steps: int,
    batch_size: int,
) -> dict[int, float]:
    """Held-out loss by steps of end-to-end training."""
    if not (output / "result").is_dir():
        transformer = load_tiny("wan").transformer
        stages = [StageConfig(steps, 5e-4, "all", recipe.objectives, mixing_learning_rate=5e-3)]
        if recipe.transfer_steps:
            transfer = ObjectiveWeights(transfer=1.0)
            stages.insert(0, StageConfig(recipe.transfer_steps, 2e-3, "attention", transfer, mixing_learning_rate=5e-3))
        config = TrainingConfig(
            output=str(output),
            stages=tuple(stages),
            patch=patch,
            batch_size=batch_size,
            prompt_dropout=0.1,
            seed=1,
            validation=ValidationConfig(held_out, every=50),
        )
        if patch is not None:
            apply_mhla(transformer, patch)
        train(transformer, data, config, resume="latest" if (output / "checkpoints").is_dir() else None)
    records = read_metrics(output / "metrics.jsonl")
    return {
        record["step"] - recipe.transfer_steps: record["validation_loss"]
        for record in records
        if "validation_loss" in record
    }


def main() -> None:
    """Run all variants and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--transfer-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args()
    data = digit_latents(load_tiny("wan"), "wan", arguments.samples, arguments.held_out, seed=1)
    recipes = {
        "diffusion": Recipe(DIFFUSION),
        "distillation": Recipe(BOTH),
        "transfer first": Recipe(BOTH, arguments.transfer_steps),
    }
    columns = [0, 50, 100, 200, 300]
    rows = []
    for recipe_name, recipe in recipes.items():
        for name, patch in VARIANTS.items():
            if patch is None and recipe_name != "diffusion":
                continue
            folder = arguments.output / f"{recipe_name} {name}".replace(",", "").replace(" ", "-").replace("/", "-")
            losses = adapt(data, arguments.held_out, patch, recipe, folder, arguments.steps, arguments.batch_size)
            rows.append([recipe_name, name, *(f"{losses[step]:.4f}" if step in losses else "" for step in columns)])
            table = StringIO()
            csv.writer(table, lineterminator="\n").writerows([["objectives", "attention", *columns], *rows])
            write_text(table.getvalue(), arguments.output / "table.csv")
    sys.stdout.write((arguments.output / "table.csv").read_text())


if __name__ == "__main__":
    main()
