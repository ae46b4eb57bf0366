"""How fast each kind of attention adapts: the tiny Wan pipeline on clips of moving digits, on a CPU.

python studies/adaptation/compare.py recipes   # the diffusion loss alone, with distillation, attention transfer first
python studies/adaptation/compare.py settings  # MHLA's own settings
python studies/adaptation/compare.py per-head  # a mixing matrix for every head, and what goes with it
python studies/adaptation/compare.py gap outputs/adapted-wan outputs/adapted-wan-2 outputs/adapted-wan-3

Every variant starts from the same trained softmax model and adapts for as many steps on the same data; held-out losses
go to <table>.csv and <table>.md. Runs that are finished are kept, so a command goes on where it was stopped.

The last command tells how much of the way from plain linear attention back to softmax each attention closes, as
mean ± standard deviation over seeds. It reads a folder of ``python tools/adapt_tiny.py wan`` for every seed, whose gap
is that between plain linear attention and the control after as many updates.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhla_diffusers import MHLAConfig
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.files import read_json
from mhla_diffusers.training import ObjectiveWeights
from studies.adaptation.adaptation import (
    ADAPTED_RECORD,
    DIFFUSION,
    END_TO_END_STEPS,
    TRANSFER_STEPS,
    Adaptation,
    held_out_curve,
    variants,
)
from studies.adaptation.digits import TINY
from studies.tables import mean_and_spread, write_table

FINE = (3, 4, 4)
"""Blocks on the token grid 9x8x8: 48 of 12 tokens."""
ATTENTIONS: dict[str, PatchConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False),
    "MHLA": MHLAConfig(blocks=FINE),
    "MHLA hybrid 2/3": MHLAConfig(blocks=FINE, layers="2/3"),
    "MHLA, blocks of 4": MHLAConfig(blocks=(9, 4, 4)),
    "MHLA, elu+1": MHLAConfig(blocks=FINE, feature_map="elu+1"),
    "MHLA, softmax feature map": MHLAConfig(blocks=FINE, feature_map="softmax"),
    "MHLA, RoPE before": MHLAConfig(blocks=FINE, rope="before"),
    "MHLA, mixing per head": MHLAConfig(blocks=FINE, mixing_per_head=True),
    "MHLA, output norm and gate": MHLAConfig(blocks=FINE, output_norm=True, output_gate=True),
    "MHLA hybrid 2/3, per head": MHLAConfig(blocks=FINE, layers="2/3", mixing_per_head=True),
    "MHLA, per head, blocks of 4": MHLAConfig(blocks=(9, 4, 4), mixing_per_head=True),
}
_BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
RECIPES: dict[str, dict[str, Any]] = {
    "diffusion": {"objectives": DIFFUSION},
    "distillation": {"objectives": _BOTH},
    "transfer first": {"objectives": _BOTH},
    "mixing learns slowly": {"objectives": _BOTH, "mixing_learning_rate": 5e-4},
    "mixing learns fast": {"objectives": _BOTH, "mixing_learning_rate": 2e-2},
}
"""Settings of the run end to end; "transfer first" has attention transfer before it."""
_FOUR = ("softmax, trained on", "plain linear", "MHLA", "MHLA hybrid 2/3")
TABLES: dict[str, list[tuple[str, str]]] = {
    "recipes": [
        *(("diffusion", attention) for attention in _FOUR),
        *((recipe, attention) for recipe in ("distillation", "transfer first") for attention in _FOUR[1:]),
    ],
    "per-head": [
        ("distillation", "MHLA, mixing per head"),
        ("transfer first", "MHLA, mixing per head"),
        ("transfer first", "MHLA hybrid 2/3, per head"),
        ("transfer first", "MHLA, per head, blocks of 4"),
    ],
    "settings": [
        ("distillation", "MHLA"),
        ("distillation", "MHLA, blocks of 4"),
        ("distillation", "MHLA, elu+1"),
        ("distillation", "MHLA, softmax feature map"),
        ("distillation", "MHLA, RoPE before"),
        ("distillation", "MHLA, mixing per head"),
        ("distillation", "MHLA, output norm and gate"),
        ("mixing learns slowly", "MHLA"),
        ("mixing learns fast", "MHLA"),
    ],
}
UPDATES = (0, 25, 50, 100, 200, 300)
"""Updates end to end after which the held-out loss is shown; 0 is after attention transfer, if there is any."""
GAPS = {
    "untrained": 0,
    "after transfer": TRANSFER_STEPS,
    "100 end to end": TRANSFER_STEPS + 100,
    f"{END_TO_END_STEPS} end to end": TRANSFER_STEPS + END_TO_END_STEPS,
}
"""Column of the table of gaps → updates."""


def runs_of(recipe: str, steps: int, transfer_steps: int) -> tuple[dict[str, Any], ...]:
    """Return the settings of the run end to end, of the whole transformer, after attention transfer where asked for."""
    common = {"mixing_learning_rate": 5e-3}
    end_to_end = {**common, "steps": steps, "learning_rate": 5e-4, "trainable": "all", **RECIPES[recipe]}
    if recipe != "transfer first":
        return (end_to_end,)
    transfer = {"steps": transfer_steps, "learning_rate": 2e-3, "trainable": "attention"}
    return {**common, **transfer, "objectives": ObjectiveWeights(transfer=1.0)}, end_to_end


def adapt(table: str, adaptation: Adaptation, steps: int, transfer_steps: int, output: Path) -> list[list[str]]:
    """Adapt every variant of a table; returns its rows, losses after so many updates."""
    rows = []
    for recipe, attention in TABLES[table]:
        runs = runs_of(recipe, steps, transfer_steps)
        folder = output / f"{recipe} {attention}".translate({ord(","): None, ord(" "): "-", ord("/"): "-"})
        if not (folder / "result").is_dir():
            adaptation.adapt(adaptation.patched(ATTENTIONS[attention]), runs, folder, batch_size=4)
        before = sum(settings["steps"] for settings in runs[:-1])
        curve = {step - before: loss for step, loss in held_out_curve(folder)}
        rows.append([recipe, attention, *(f"{curve[step]:.4f}" for step in UPDATES if step <= steps)])
    return rows


def gaps(folders: Sequence[Path]) -> list[list[str]]:
    """Return a row for every attention that all folders have: losses, and percent of the gap that is closed."""
    seeds = [read_curves(folder) for folder in folders]
    control, linear, *names = [one.name for one in variants(TINY["wan"]) if all(one.name in seed for seed in seeds)]
    rows = []
    for name in (control, linear, *names):
        losses = [mean_and_spread([curves[name][step] for curves in seeds], ".4f") for step in GAPS.values()]
        closed = []
        for step in list(GAPS.values())[1:] if name in names else ():
            ends = [(curves[linear][step], curves[control][step], curves[name][step]) for curves in seeds]
            percent = [100 * (start - own) / (start - goal) for start, goal, own in ends]
            closed.append(f"{mean_and_spread(percent, '.1f')} %")
        rows.append([name, *losses, *(closed or [""] * (len(GAPS) - 1))])
    return rows


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """Held-out loss by update, of every variant that the folder has."""
    curves = {}
    for variant in variants(TINY["wan"]):
        file = folder / "patches" / f"tiny-wan-{variant.short}" / ADAPTED_RECORD
        if file.is_file():
            curves[variant.name] = dict(read_json(file)["held-out loss by update"])
    return curves


def main() -> None:
    """Run all variants of a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*sorted(TABLES), "gap"])
    parser.add_argument("folders", type=Path, nargs="*", help="of gap: outputs of tools/adapt_tiny.py, with all of wan")
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--transfer-steps", type=int, default=TRANSFER_STEPS)
    asked = parser.parse_args()
    if asked.table == "gap":
        rows = gaps(asked.folders)
        header = ["self-attention", *GAPS, *(f"gap closed, {column}" for column in list(GAPS)[1:])]
    else:
        adaptation = Adaptation(TINY["wan"], asked.samples, asked.held_out, validate_every=25)
        rows = adapt(asked.table, adaptation, asked.steps, asked.transfer_steps, asked.output)
        header = ["losses", "attention", *(str(step) for step in UPDATES if step <= asked.steps)]
    sys.stdout.write(write_table(header, rows, asked.output, asked.table))


if __name__ == "__main__":
    main()
