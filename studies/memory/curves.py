"""What optimizers of less memory and frozen weights in 8 bits cost: held-out losses of the tiny Wan pipeline, on a CPU.

python studies/memory/curves.py

Every run adapts MHLA from the same model, on the same data and noise, by the diffusion loss. Held-out losses go to
curves.csv and curves.md. Runs that are finished are kept, so the command goes on where it was stopped.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from mhla_diffusers import MHLAConfig
from studies.adaptation.adaptation import DIFFUSION, Adaptation, held_out_curve
from studies.adaptation.digits import TINY
from studies.tables import write_table

_LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 8, "lora_layers": "blocks"}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "adafactor, rate 1e-2": {"learning_rate": 1e-2, "optimizer": "adafactor"},
    "schedule-free": {"optimizer": "schedule-free"},
    "lora float32": _LORA,
    "lora int8": {**_LORA, "base_dtype": "int8"},
}
"""Name → settings that differ."""


def main() -> None:
    """Run all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/memory"))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="updates between two measurements")
    arguments = parser.parse_args()
    adaptation = Adaptation(TINY["wan"], arguments.samples, arguments.held_out, validate_every=arguments.every)
    curves = {}
    for name, changes in RUNS.items():
        settings = {"trainable": "attention", "learning_rate": 1e-3, "mixing_learning_rate": 5e-3, **changes}
        settings |= {"steps": arguments.steps, "objectives": DIFFUSION, "batch_size": 4, "gradient_checkpointing": True}
        folder = arguments.output / name.replace(",", "").replace(" ", "-")
        if not (folder / "result").is_dir():
            pipe = adaptation.patched(MHLAConfig(blocks=TINY["wan"].blocks))
            with torch.compiler.set_stance("force_eager"):  # compiling torchao's update would take longer than the run
                adaptation.adapt(pipe, (settings,), folder)
        curves[name] = dict(held_out_curve(folder))
    steps = sorted(next(iter(curves.values())))
    rows = [[name, *(f"{curve[step]:.4f}" for step in steps)] for name, curve in curves.items()]
    sys.stdout.write(write_table(["run", *map(str, steps)], rows, arguments.output, "curves"))


if __name__ == "__main__":
    main()
