"""How fast each kind of attention adapts: a small Wan on videos of bouncing digits, in minutes on a CPU.

python finetune/compare.py --output outputs/compare

A softmax teacher is trained once and kept in the output folder. From it each variant adapts for as many steps, on the
same data, with the same objectives; validation losses go to table.csv. Needs scikit-learn.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    read_metrics,
    train,
)

LATENTS = (1, 8, 16, 16)
VARIANTS: dict[str, MHLAConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1)),
    "MHLA 4x2x2": MHLAConfig(blocks=(4, 2, 2)),
    "MHLA 4x4x4": MHLAConfig(blocks=(4, 4, 4)),
    "MHLA 4x4x4, layer 0 softmax": MHLAConfig(blocks=(4, 4, 4), layers="2/3"),
}
DIFFUSION = ObjectiveWeights(diffusion=1.0)
BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)


@dataclass(frozen=True)
class Recipe:
    """Which losses, and how many cheap steps of attention transfer come first."""

    objectives: ObjectiveWeights
    transfer_steps: int = 0


def build_transformer() -> Any:
    """Three layers, two heads of 24, 512 tokens on an 8x8x8 grid."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=1,
        out_channels=1,
        text_dim=20,
        freq_dim=64,
        ffn_dim=192,
        num_layers=3,
        rope_max_seq_len=32,
    )


def bouncing_digits(count: int) -> InMemoryData:
    """Videos of two bouncing digits as latents; the conditioning says which two."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 8 - 1
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        video = torch.full(LATENTS, -1.0)
        chosen = torch.randint(len(images), (2,), generator=generator).tolist()
        for index in chosen:
            place, speed = torch.rand(2, generator=generator) * 8, torch.randn(2, generator=generator) * 1.5
            for frame in range(LATENTS[1]):
                top, left = (8 - (8 - (place + frame * speed).remainder(16)).abs()).round().int().tolist()
                window = video[0, frame, top : top + 8, left : left + 8]
                window.copy_(torch.maximum(window, images[index]))
        named = torch.nn.functional.one_hot(torch.from_numpy(digits.target[chosen]).long(), 10).float()
        samples.append({"latents": video, "encoder_hidden_states": torch.cat([named, named.flip(0)], dim=1)})
    return InMemoryData(samples)


def train_teacher(data: InMemoryData, held_out: int, output: Path, steps: int) -> None:
    """Train the softmax model unless it is there."""
    if (output / "result").is_dir():
        return
    stage = StageConfig(steps, 2e-3, "all", DIFFUSION, scheduler="cosine", warmup_steps=min(50, steps))
    config = TrainingConfig(
        output=str(output), stages=(stage,), batch_size=16, validation=ValidationConfig(held_out, every=200)
    )
    train(build_transformer(), data, config, resume="latest" if (output / "checkpoints").is_dir() else None)


def adapt(
    data: InMemoryData, held_out: int, teacher: Path, patch: MHLAConfig | None, recipe: Recipe, output: Path, steps: int
) -> dict[int, float]:
    """Validation loss by steps of end-to-end training."""
    if not (output / "result").is_dir():
        transformer = type(build_transformer()).from_pretrained(teacher / "result")
        stages = [StageConfig(steps, 5e-4, "all", recipe.objectives, mixing_learning_rate=5e-3)]
        if recipe.transfer_steps:
            transfer = ObjectiveWeights(transfer=1.0)
            stages.insert(0, StageConfig(recipe.transfer_steps, 2e-3, "attention", transfer, mixing_learning_rate=5e-3))
        config = TrainingConfig(
            output=str(output),
            stages=tuple(stages),
            patch=patch,
            batch_size=16,
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
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--teacher-steps", type=int, default=3000)
    parser.add_argument("--transfer-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    data = bouncing_digits(arguments.samples)
    teacher = arguments.output / "teacher"
    train_teacher(data, arguments.held_out, teacher, arguments.teacher_steps)
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
            folder = arguments.output / f"{recipe_name} {name}".replace(",", "").replace(" ", "-")
            losses = adapt(data, arguments.held_out, teacher, patch, recipe, folder, arguments.steps)
            rows.append([recipe_name, name, *(f"{losses[step]:.4f}" if step in losses else "" for step in columns)])
            with (arguments.output / "table.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["objectives", "attention", *columns], *rows])
    sys.stdout.write((arguments.output / "table.csv").read_text())


if __name__ == "__main__":
    main()
