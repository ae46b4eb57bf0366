"""How fast each kind of attention adapts: the tiny Wan pipeline on clips of moving digits, on a CPU.

python studies/adaptation/compare.py sparse    # block size, density, means alone
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
from pathlib import Path
from typing import Any, Literal

import torch

from mhla_diffusers import MHLAConfig, SparseConfig, apply_mhla, audit, remove_mhla
from mhla_diffusers.benchmark.measure import Row, time_interleaved
from mhla_diffusers.config import NOTHING_DENSE, PatchConfig
from mhla_diffusers.demo.adaptation import DIFFUSION, TRANSFER_STEPS, Adaptation, held_out_curve
from mhla_diffusers.families import predict
from mhla_diffusers.reporting import mean_and_spread, write_table
from mhla_diffusers.tiny import TINY
from mhla_diffusers.training import ObjectiveWeights

FINE = (3, 4, 4)
"""Blocks on the token grid 9x8x8: 48 of 12 tokens."""
_SPARSE = SparseConfig(density=0.05, block_size=4, **NOTHING_DENSE)
ATTENTIONS: dict[str, PatchConfig | None] = {
    "softmax, trained on": None,
    "plain linear": MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False),
    "MHLA": MHLAConfig(blocks=FINE),
    "MHLA hybrid 2/3": MHLAConfig(blocks=FINE, layers="2/3"),
    "MHLA auto:2/3": MHLAConfig(blocks=FINE),
    "MHLA, blocks of 4": MHLAConfig(blocks=(9, 4, 4)),
    "MHLA, elu+1": MHLAConfig(blocks=FINE, feature_map="elu+1"),
    "MHLA, softmax feature map": MHLAConfig(blocks=FINE, feature_map="softmax"),
    "MHLA, RoPE before": MHLAConfig(blocks=FINE, rope="before"),
    "MHLA, mixing per head": MHLAConfig(blocks=FINE, mixing_per_head=True),
    "MHLA, output norm and gate": MHLAConfig(blocks=FINE, output_norm=True, output_gate=True),
    "MHLA hybrid 2/3, per head": MHLAConfig(blocks=FINE, layers="2/3", mixing_per_head=True),
    "MHLA, per head, blocks of 4": MHLAConfig(blocks=(9, 4, 4), mixing_per_head=True),
    "sparse": _SPARSE,
    "sparse, means alone": _SPARSE.replace(far="means"),
    "sparse, blocks of 8": _SPARSE.replace(block_size=8),
    "sparse, 2.5 %": _SPARSE.replace(density=0.025),
    "sparse, 10 %": _SPARSE.replace(density=0.1),
}
RECIPES: dict[str, dict[str, Any]] = {
    "diffusion": {"objectives": DIFFUSION},
    "distillation": {},
    "transfer first": {"transfer": True},
    "transfer first, gentle": {"transfer": True, "scheduler": "cosine", "learning_rate": 2e-4},
    "mixing learns slowly": {"mixing": 5e-4},
    "mixing learns fast": {"mixing": 2e-2},
}
"""Arguments of :func:`runs_of`."""
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
_BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
COLUMNS = (0, 25, 50, 100, 200, 300)
"""Updates end to end after which the held-out loss is shown; 0 is after attention transfer, if there is any."""


def runs_of(
    steps: int,
    transfer_steps: int,
    transfer: bool = False,
    objectives: ObjectiveWeights = _BOTH,
    learning_rate: float = 5e-4,
    mixing: float = 5e-3,
    scheduler: Literal["constant", "cosine"] = "constant",
) -> tuple[dict[str, Any], ...]:
    """Return the settings of the run end to end, of the whole transformer, after attention transfer where asked for."""
    end_to_end = {
        "steps": steps,
        "learning_rate": learning_rate,
        "mixing_learning_rate": mixing,
        "trainable": "all",
        "objectives": objectives,
        "scheduler": scheduler,
    }
    first = {
        "steps": transfer_steps,
        "learning_rate": 2e-3,
        "mixing_learning_rate": mixing,
        "trainable": "attention",
        "objectives": ObjectiveWeights(transfer=1.0),
    }
    return (first, end_to_end) if transfer else (end_to_end,)


def patched(adaptation: Adaptation, attention: str) -> Any:
    """Return a fresh pipeline; "auto" patches those layers that move the output least on a fixed batch."""
    config = ATTENTIONS[attention]
    pipe = adaptation.patched(config)
    if config is not None and "auto" in attention:
        found = audit(pipe, lambda: predict(pipe.transformer, first_samples(adaptation, pipe, 16))).layers
        least = sorted(range(len(found)), key=lambda layer: found[layer].moves)[: len(found) * 2 // 3]
        apply_mhla(remove_mhla(pipe), config, layers=sorted(least))
    return pipe


def first_samples(adaptation: Adaptation, pipe: Any, samples: int) -> Any:
    """Return the first samples of the data, noised to equally spaced timesteps."""
    samples = min(samples, len(adaptation.data) - adaptation.held_out)
    return adaptation.batch(pipe.transformer, range(samples), (torch.arange(samples) + 0.5) / samples)


def main() -> None:
    """Run all variants of a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--transfer-steps", type=int, default=TRANSFER_STEPS)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of training; the data are always the same")
    parser.add_argument("--timing-seconds", type=float, default=5.0, help="per attention, once all have adapted")
    arguments = parser.parse_args()
    adaptation = Adaptation(TINY["wan"], arguments.samples, arguments.held_out, validate_every=25)
    variants, curves = TABLES[arguments.table], {}
    for name, attention in variants:
        runs = runs_of(arguments.steps, arguments.transfer_steps, **RECIPES[name])
        words = f"{name} {attention}".translate({ord(","): None, ord(" "): "-", ord("/"): "-", ord("%"): None})
        before = sum(settings["steps"] for settings in runs[:-1])
        curves[name, attention] = []
        for seed in arguments.seeds:
            folder = arguments.output / f"{words}-{seed}"
            if not (folder / "result").is_dir():
                pipe, changes = patched(adaptation, attention), {"seed": seed, "batch_size": arguments.batch_size}
                adaptation.adapt(pipe, runs, folder, **changes)
            curves[name, attention].append({step - before: loss for step, loss in held_out_curve(folder)})

    def update(attention: str) -> Callable[[], object]:
        pipe = patched(adaptation, attention)
        batch = first_samples(adaptation, pipe, arguments.batch_size)
        return lambda: predict(pipe.transformer, batch).square().mean().backward()

    updates = {Row(attention): update(attention) for attention in sorted({attention for _, attention in variants})}
    timed = {row.variant: row for row in time_interleaved(updates, torch.device("cpu"), arguments.timing_seconds)}
    columns, rows = [column for column in COLUMNS if column <= arguments.steps], []
    for (name, attention), found in curves.items():
        cells = [mean_and_spread([curve[min(curve)] for curve in found], ".4f")]
        for step in columns:
            reached = step in found[0]
            cells.append(mean_and_spread([curve[step] for curve in found], ".4f") if reached else "–")
        seconds = timed[attention].median
        rows.append([name, attention, *cells, f"{1000 * seconds:.0f}" if seconds else "–"])
    header = ["losses", "attention", "untrained", *map(str, columns), "ms forward+backward"]
    sys.stdout.write(write_table(header, rows, arguments.output, arguments.table))


if __name__ == "__main__":
    main()
