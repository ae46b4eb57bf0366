"""What each kind of attention does to quality: the adapted patches of a tiny pipeline, judged on a CPU.

python finetune/quality.py wan --scenes 100
python finetune/quality.py wan --scenes 100 --adapted outputs/adapted-wan-2    # another seed of the adaptation

Each attention of mhla_diffusers/demo/adaptation.py, adapted, generates the same scenes from the same noise, and so does
the control: the pipeline's own attention, trained on for as long. Held-out loss, digits that the classifier recognises
and Fréchet distance to the same scenes of real digits, each with its difference from the control and the 95 % interval
of that difference, bootstrapped over the scenes. What is generated is kept, so a command goes on where it was stopped.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import load_mhla
from mhla_diffusers.demo.adaptation import (
    ADAPTED_CONTROL,
    Adaptation,
    Variant,
    digit_latents,
    load_variant,
    variants,
)
from mhla_diffusers.demo.judging import digit_accuracy, digit_features, generate_scenes, load_classifier, real_scenes
from mhla_diffusers.evaluation.compare import Interval, bootstrap
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.files import write_json, write_text, written_aside
from mhla_diffusers.tiny import TINY, TinyPipeline, load_tiny
from mhla_diffusers.tiny.digits import load_digits
from mhla_diffusers.tiny.loading import load_control

HELD_OUT = 64
_RESAMPLES = 1000
_FRECHET_RESAMPLES = 200
UNTOUCHED = "as shipped"


@dataclass(frozen=True)
class Judged:
    """What was measured of one attention, sample by sample."""

    name: str
    losses: torch.Tensor
    """(held-out samples,)."""
    right: torch.Tensor
    """(scenes,): part of the digits that is recognised."""
    features: torch.Tensor
    """(scenes, digits and frames, 64); of a scene with one digit the digit twice."""


def open_variant(tiny: TinyPipeline, variant: Variant, adapted: Path | None) -> Any:
    """The pipeline with a patch that ships, or with one that ``assets/adapt_tiny.py`` made."""
    if adapted is None:
        return load_variant(tiny, variant, "cpu")
    pipe, folder = load_tiny(tiny.family), adapted / "patches" / f"tiny-{tiny.family}-{variant.short}"
    if variant.patch is None:
        load_control(pipe.transformer, folder / ADAPTED_CONTROL)
        return pipe
    return load_mhla(pipe, folder)


class Judge:
    """Generates and measures; everything is the same for all attentions but the attention."""

    def __init__(self, tiny: TinyPipeline, scenes: int, output: Path) -> None:
        chance = random.Random("scenes")
        self.tiny, self.output, self.classifier = tiny, output, load_classifier()
        self.scenes = [tiny.random_scene(chance) for _ in range(scenes)]
        data = digit_latents(load_tiny(tiny.family), tiny, 1, HELD_OUT, seed=1)
        self.adaptation = Adaptation(tiny, data, HELD_OUT, seed=1, validate_every=1, batch_size=tiny.batch_size)
        self.real = self._features(real_scenes(self.scenes, tiny, load_digits("held-out"), seed=0))

    def _features(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for picture, scene in zip(pictures, self.scenes, strict=True):
            features = digit_features([picture], [scene], self.tiny, self.classifier)
            # as many of every scene, so that scenes can be drawn anew
            found.append(features.repeat(self.tiny.most_digits // len(scene.labels), 1))
        return torch.stack(found)

    def judge(self, name: str, open_pipe: Callable[[], Any]) -> Judged:
        """Measure one attention; what it generated before is taken from its file."""
        file, pipe = self.output / f"{name.replace(' ', '-').replace('/', '-')}.safetensors", open_pipe()
        pictures: list[torch.Tensor] = list(load_file(file)["pictures"]) if file.is_file() else []
        if len(pictures) != len(self.scenes):
            pictures = generate_scenes(pipe, self.tiny, self.scenes, seed=0)
            with written_aside(file) as aside:
                save_file({"pictures": torch.stack(pictures)}, aside)
        right = [
            digit_accuracy([picture], [scene], self.tiny, self.classifier)
            for picture, scene in zip(pictures, self.scenes, strict=True)
        ]
        losses = torch.tensor(self.adaptation.held_out_losses(pipe), dtype=torch.float64)
        sys.stdout.write(f"{name}: {fmean(right):.1%} of the digits\n")
        return Judged(name, losses, torch.tensor(right, dtype=torch.float64), self._features(pictures))

    def distance(self, judged: Judged, scenes: torch.Tensor) -> float:
        """Fréchet distance to the real digits, over some scenes."""
        return frechet_distance(self.real[scenes].flatten(0, 1), judged.features[scenes].flatten(0, 1))

    def differences(self, judged: Judged, control: Judged) -> dict[str, Interval]:
        """From the control, over the same samples."""

        def mean(name: str) -> Callable[[torch.Tensor], float]:
            paired = getattr(judged, name) - getattr(control, name)
            return lambda chosen: float(paired[chosen].mean())

        def distance(chosen: torch.Tensor) -> float:
            return self.distance(judged, chosen) - self.distance(control, chosen)

        return {
            "held-out loss": bootstrap(mean("losses"), len(judged.losses), _RESAMPLES),
            "digits recognised": bootstrap(mean("right"), len(self.scenes), _RESAMPLES),
            "Fréchet distance": bootstrap(distance, len(self.scenes), _FRECHET_RESAMPLES),
        }


def table(judge: Judge, all_judged: list[Judged]) -> tuple[str, dict[str, Any]]:
    """As Markdown and as JSON."""
    control, results = all_judged[0], {}
    lines = [
        "| self-attention | held-out loss ↓ | digits recognised ↑ | Fréchet distance ↓ |",
        "| --- | --- | --- | --- |",
    ]
    for judged in all_judged:
        found = {
            "held-out loss": float(judged.losses.mean()),
            "digits recognised": float(judged.right.mean()),
            "Fréchet distance": judge.distance(judged, torch.arange(len(judge.scenes))),
        }
        differences = judge.differences(judged, control) if judged is not control else {}
        cells = [
            f"{found['held-out loss']:.4f}",
            f"{found['digits recognised']:.1%}",
            f"{found['Fréchet distance']:.1f}",
        ]
        for index, (score, style) in enumerate(zip(found, (".4f", ".1%", ".1f"), strict=True)):
            if score in differences:
                interval = differences[score]
                cells[index] += f" ({interval.low:+{style}} to {interval.high:+{style}})"
        lines.append(f"| {judged.name} | {' | '.join(cells)} |")
        results[judged.name] = {**found, "differences": {name: asdict(value) for name, value in differences.items()}}
    return "\n".join([*lines, ""]), results


def main() -> None:
    """Generate, measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(TINY))
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--adapted", type=Path, help="output of assets/adapt_tiny.py; what ships if left out")
    parser.add_argument("--only", nargs="+", help="such as exact hybrid, beside the control; all if left out")
    parser.add_argument("--output", type=Path, help="outputs/quality-<family> if left out")
    arguments = parser.parse_args()
    tiny = TINY[arguments.family]
    known = [variant.short for variant in variants(tiny)]
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: allowed: {', '.join(known)}")
    if arguments.scenes < 2:
        parser.error(f"--scenes {arguments.scenes}: at least 2, to tell how they spread")
    if arguments.adapted is not None and not (arguments.adapted / "patches").is_dir():
        parser.error(f"--adapted {arguments.adapted}: no output of assets/adapt_tiny.py")
    output: Path = arguments.output or Path("outputs") / f"quality-{tiny.family}"
    judge = Judge(tiny, arguments.scenes, output)
    chosen = [v for v in variants(tiny) if not arguments.only or v.short in ("control", *arguments.only)]
    judged = [judge.judge(v.name, lambda v=v: open_variant(tiny, v, arguments.adapted)) for v in chosen]
    judged.append(judge.judge(f"{chosen[0].name}, {UNTOUCHED}", lambda: load_tiny(tiny.family)))
    text, results = table(judge, judged)
    write_text(text, output / "quality.md")
    write_json(results, output / "quality.json")
    sys.stdout.write(f"\n{text}")


if __name__ == "__main__":
    main()
