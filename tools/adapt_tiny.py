"""Adapt the patches that ship for a tiny pipeline: ``python tools/adapt_tiny.py wan``.

Everything comes from the seed: each attention of ``mhla_diffusers/demo/adaptation.py`` is adapted from the same weights
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

from mhla_diffusers.config import patch_folder
from mhla_diffusers.demo.adaptation import (
    ADAPTED_CONTROL,
    ADAPTED_RECORD,
    Adaptation,
    Variant,
    digit_latents,
    held_out_curve,
    recipe_of,
    streamed_variant,
    variants,
)
from mhla_diffusers.files import write_json, write_tensors
from mhla_diffusers.generation import load_result
from mhla_diffusers.patching import save_mhla
from mhla_diffusers.tiny import TINY, TinyPipeline, load_tiny
from mhla_diffusers.tiny.loading import control_file, load_control, record_checksums

HELD_OUT = 64


class Adapting:
    """Adapts and saves the variants of one tiny pipeline.

    Args:
        tiny: which.
        output: folder for the runs and the finished ``patches``.
        seed: of data and training.
        samples: scenes to adapt on.
    """

    def __init__(self, tiny: TinyPipeline, output: Path, seed: int = 1, samples: int = 512) -> None:
        self.tiny, self.output = tiny, output
        data = digit_latents(load_tiny(tiny.family), tiny, samples, HELD_OUT, seed)
        self.adaptation = Adaptation(tiny, data, HELD_OUT, seed, validate_every=50, batch_size=tiny.batch_size)

    def make(self, variant: Variant) -> Path:
        """Adapt one variant, or go on with it, and save it.

        Returns:
            The folder that holds what ships.
        """
        run = self.output / f"run-{variant.short}"
        if not (run / "result").is_dir():
            self.adaptation.adapt(self.adaptation.patched(variant.patch), recipe_of(variant, self.tiny), run)
        folder = self.output / "patches" / f"tiny-{self.tiny.family}-{variant.short}"
        if not (folder / ADAPTED_RECORD).is_file():
            self._save(variant, run, folder)
        return folder

    def _save(self, variant: Variant, run: Path, folder: Path) -> None:
        trained, base, saved = (load_tiny(self.tiny.family) for _ in range(3))
        load_result(trained, run / "result")
        if variant.patch is None:
            folder.mkdir(parents=True, exist_ok=True)
            state, before = trained.transformer.state_dict(), base.transformer.state_dict()
            changed = {name: x.half() for name, x in state.items() if not torch.equal(x, before[name])}
            write_tensors(changed, folder / ADAPTED_CONTROL)
            load_control(saved.transformer, folder / ADAPTED_CONTROL)
        else:
            name = f"tiny-{self.tiny.family}"
            save_mhla(trained, folder, weights="changed", base=base, base_model=name, dtype=torch.float16)
            load_result(saved, folder)
        write_json(self._record(variant, run, trained, saved), folder / ADAPTED_RECORD)

    def _record(self, variant: Variant, run: Path, trained: Any, saved: Any) -> dict[str, Any]:
        recipe = recipe_of(variant, self.tiny)
        return {
            "command": f"python tools/adapt_tiny.py {self.tiny.family} --seed {self.adaptation.seed}",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "updates of attention transfer": recipe.transfer_steps,
            "updates end to end": recipe.steps,
            "held-out loss": fmean(self.adaptation.held_out_losses(trained)),
            "held-out loss in half precision, as it ships": fmean(self.adaptation.held_out_losses(saved)),
            "held-out loss by update": held_out_curve(run),
        }


def install(family: str, output: Path) -> None:
    """Copy what was made to where the package keeps it, and record the checksums."""
    for folder in sorted((output / "patches").glob(f"tiny-{family}-*")):
        if folder.name.endswith("-control"):
            shutil.copy(folder / ADAPTED_CONTROL, control_file(family))
            shutil.copy(folder / ADAPTED_RECORD, control_file(family).with_suffix(".json"))
            continue
        shutil.rmtree(patch_folder() / folder.name, ignore_errors=True)
        shutil.copytree(folder, patch_folder() / folder.name)
    record_checksums()


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(TINY))
    parser.add_argument("--output", type=Path, help="outputs/adapted-<family> if left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="such as exact and control; all if left out")
    parser.add_argument("--install", action="store_true", help="make them those that the package ships")
    arguments = parser.parse_args()
    output: Path = arguments.output or Path("outputs") / f"adapted-{arguments.family}"
    tiny = TINY[arguments.family]
    known = {variant.short: variant for variant in (*variants(tiny), streamed_variant(tiny)) if variant is not None}
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: allowed: {', '.join(known)}")
    adapting = Adapting(tiny, output, arguments.seed)
    for short in arguments.only or known:
        adapting.make(known[short])
    if arguments.install:
        install(arguments.family, output)


if __name__ == "__main__":
    main()
