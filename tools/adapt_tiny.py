"""Adapt the patches that ship for a tiny pipeline: ``python tools/adapt_tiny.py wan``.

Everything comes from the seed: each attention of ``studies/adaptation/adaptation.py`` is adapted from the same weights
on the same clips, and saved in half precision as far as it differs from the pipeline. Run again, the command goes on
where it was interrupted. ``--install`` copies the result to where the package keeps it.
"""

import argparse
import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mhla_diffusers.config import CausalConfig, patch_folder
from mhla_diffusers.files import write_json, write_tensors
from mhla_diffusers.generation.pipelines import put_on
from mhla_diffusers.patching import save_mhla
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.adaptation import (
    ADAPTED_CONTROL,
    ADAPTED_RECORD,
    DIFFUSION,
    END_TO_END_STEPS,
    TRANSFER_STEPS,
    Adaptation,
    Variant,
    control_file,
    held_out_curve,
    load_control,
    runs_of,
    variants,
)
from studies.adaptation.digits import TINY, DigitPipeline

SAMPLES, HELD_OUT = 512, 64


def variants_that_ship(tiny: DigitPipeline) -> dict[str, tuple[Variant, tuple[dict[str, Any], ...]]]:
    """Return the variants and, for clips, the causal patch, by their short names, with the settings of their runs.

    The causal patch generates a few frames after others. It has two rows of blocks: the own frames, and all that came
    before, which ``beyond="relative"`` makes one. So a clip of the usual length, which has three frame blocks, shows it
    what a longer one is made of. It learns from the data alone: the teacher sees later frames, and was never trained on
    frames with separate times.
    """
    found = {variant.short: (variant, runs_of(variant, tiny)) for variant in variants(tiny)}
    if tiny.is_video:
        patch = CausalConfig(
            blocks=(2, *tiny.blocks[1:]),
            mixing_per_head=True,
            causal="block",
            block_length=3,
            beyond="relative",
        )
        settings = {
            "steps": TRANSFER_STEPS + END_TO_END_STEPS,
            "learning_rate": 5e-4,
            "mixing_learning_rate": 5e-3,
            "trainable": "attention",
            "objectives": DIFFUSION,
            "scheduler": "cosine",
        }
        found["causal"] = Variant("MHLA, causal", "causal", patch), (settings,)
    return found


def adapt(adaptation: Adaptation, variant: Variant, runs: tuple[dict[str, Any], ...], output: Path) -> Path:
    """Adapt one variant, or go on with it, and save it.

    Returns:
        The folder that holds what ships.
    """
    run, name = output / f"run-{variant.short}", adaptation.tiny.name
    if not (run / "result").is_dir():
        adaptation.adapt(adaptation.patched(variant.patch), runs, run)
    folder = output / "patches" / f"tiny-{name}-{variant.short}"
    if (folder / ADAPTED_RECORD).is_file():
        return folder
    trained, base, saved, halved = (load_tiny(name) for _ in range(4))
    put_on(trained, str(run / "result"))
    if variant.patch is None:
        folder.mkdir(parents=True, exist_ok=True)
        state, before = trained.transformer.state_dict(), base.transformer.state_dict()
        changed = {name: x.half() for name, x in state.items() if not torch.equal(x, before[name])}
        write_tensors(changed, folder / ADAPTED_CONTROL)
        load_control(saved.transformer, folder / ADAPTED_CONTROL)
    else:
        put_on(halved, str(run / "result"))
        halved.transformer.half()
        save_mhla(halved, folder, base_model=f"tiny-{name}")
        put_on(saved, str(folder))
    *transfer, end_to_end = runs
    record = {
        "command": f"python tools/adapt_tiny.py {name} --seed {adaptation.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "updates of attention transfer": sum(settings["steps"] for settings in transfer),
        "updates end to end": end_to_end["steps"],
        "held-out loss": fmean(adaptation.held_out_losses(trained)),
        "held-out loss in half precision, as it ships": fmean(adaptation.held_out_losses(saved)),
        "held-out loss by update": held_out_curve(run),
    }
    write_json(record, folder / ADAPTED_RECORD)
    return folder


def install(tiny: DigitPipeline, output: Path) -> None:
    """Copy what was made to where the package, and of the control the studies, keep it."""
    for folder in sorted((output / "patches").glob(f"tiny-{tiny.name}-*")):
        if folder.name.endswith("-control"):
            shutil.copy(folder / ADAPTED_CONTROL, control_file(tiny))
            shutil.copy(folder / ADAPTED_RECORD, control_file(tiny).with_suffix(".json"))
            continue
        shutil.rmtree(patch_folder() / folder.name, ignore_errors=True)
        shutil.copytree(folder, patch_folder() / folder.name)


def main() -> None:
    """Adapt, and install if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(TINY))
    parser.add_argument("--output", type=Path, help="outputs/adapted-<name> if left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="such as sparse and control; all if left out")
    parser.add_argument("--install", action="store_true", help="make them those that the package ships")
    arguments = parser.parse_args()
    output: Path = arguments.output or Path("outputs") / f"adapted-{arguments.name}"
    tiny = TINY[arguments.name]
    known = variants_that_ship(tiny)
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: allowed: {', '.join(known)}")
    adaptation = Adaptation(tiny, SAMPLES, HELD_OUT, arguments.seed, validate_every=50)
    for short in arguments.only or known:
        adapt(adaptation, *known[short], output)
    if arguments.install:
        install(tiny, output)


if __name__ == "__main__":
    main()
