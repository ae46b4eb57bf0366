"""What each kind of attention does to quality: the adapted patches of a tiny pipeline, judged on a CPU.

python studies/quality/quality.py wan --scenes 48
python studies/quality/quality.py wan --scenes 48 --adapted outputs/adapted-wan-2    # another seed of the adaptation

Each attention of studies/adaptation/adaptation.py, adapted, generates the same scenes from the same noise, and so does
the control: the pipeline's own attention, trained on for as long. Held-out loss, digits that the classifier recognises
and Fréchet distance to the same scenes of real digits, each with its difference from the control and the 95 % interval
of that difference, bootstrapped over the scenes. What is generated is kept, so a command goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import load_mhla
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.files import write_json, write_text, written_aside
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.adaptation import ADAPTED_CONTROL, Adaptation, Variant, load_control, load_variant, variants
from studies.adaptation.digits import TINY, DigitPipeline
from studies.adaptation.judging import Yardstick

HELD_OUT = 64
SCORES = {
    "held-out loss": (".4f", "↓", 1000),
    "digits recognised": (".1%", "↑", 1000),
    "Fréchet distance": (".1f", "↓", 200),
}
"""Score → how it is written, which way is better, and how often its samples are drawn again."""

Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Losses of one attention (samples,), digits recognised (scenes,), features (scenes, digits and frames, 64)."""


def bootstrap(
    statistic: Callable[[torch.Tensor], float], count: int, resamples: int = 1000, seed: int = 0
) -> dict[str, float]:
    """Return a function of the indices of ``count`` samples, int64 (count,), with its 95 % basic bootstrap interval.

    A resample differs from the samples as these do from the population. So the interval reaches from θ - (q97.5 - θ) to
    θ + (θ - q2.5), with θ of the samples and quantiles q of the resamples. This takes off the bias of few samples,
    which a percentile interval has twice: the fewer the samples, the larger their Fréchet distance.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [statistic(torch.randint(count, (count,), generator=generator)) for _ in range(resamples)]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(ends).tolist()
    value = statistic(torch.arange(count))
    return {"value": value, "low": 2 * value - high, "high": 2 * value - low}


def open_variant(tiny: DigitPipeline, variant: Variant, adapted: Path | None) -> Any:
    """The pipeline with a patch that ships, or with one that ``tools/adapt_tiny.py`` made."""
    if adapted is None:
        return load_variant(tiny, variant)
    pipe, folder = load_tiny(tiny.name), adapted / "patches" / f"tiny-{tiny.name}-{variant.short}"
    if variant.patch is None:
        load_control(pipe.transformer, folder / ADAPTED_CONTROL)
        return pipe
    return load_mhla(pipe, folder)


def kept_pictures(file: Path, count: int, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What a pipeline generated, from its file if that has as many."""
    pictures = list(load_file(file)["pictures"]) if file.is_file() else []
    if len(pictures) != count:
        pictures = make()
        with written_aside(file) as aside:
            save_file({"pictures": torch.stack(pictures)}, aside)
    return pictures


def judge(tiny: DigitPipeline, pipelines: dict[str, Callable[[], Any]], count: int, output: Path) -> dict[str, Any]:
    """Measure each pipeline, the control first, on the same scenes and samples.

    Args:
        tiny: which.
        pipelines: name of an attention → opens the pipeline.
        count: of scenes.
        output: folder of what is generated.

    Returns:
        Name → scores, and the intervals of their differences from the control.
    """
    adaptation, yardstick = Adaptation(tiny, 1, HELD_OUT), Yardstick(tiny, tiny.random_scenes(count, "scenes"), 0)

    def features_of(pictures: list[torch.Tensor]) -> torch.Tensor:
        # as many of every scene, so that scenes can be drawn again: of a scene with one digit the digit twice
        found = zip(yardstick.features(pictures), yardstick.scenes, strict=True)
        return torch.stack([one.repeat(tiny.most_digits // len(scene.labels), 1) for one, scene in found])

    def measure(name: str, pipe: Any) -> Samples:
        file = output / f"{name.replace(' ', '-').replace('/', '-')}.safetensors"
        pictures = kept_pictures(file, count, lambda: yardstick.generate(pipe))
        right = torch.stack([found.double().mean() for found in yardstick.recognised(pictures)])
        sys.stdout.write(f"{name}: {right.mean():.1%} of the digits\n")
        return torch.tensor(adaptation.held_out_losses(pipe), dtype=torch.float64), right, features_of(pictures)

    real = features_of(yardstick.real)
    scores: list[Callable[[Samples, torch.Tensor], float]] = [
        lambda one, chosen: float(one[0][chosen].mean()),
        lambda one, chosen: float(one[1][chosen].mean()),
        lambda one, chosen: frechet_distance(real[chosen].flatten(0, 1), one[2][chosen].flatten(0, 1)),
    ]

    def difference(place: int, one: Samples, chosen: torch.Tensor) -> float:
        return scores[place](one, chosen) - scores[place](control, chosen)

    measured = {name: measure(name, open_pipe()) for name, open_pipe in pipelines.items()}
    control, results = next(iter(measured.values())), {}
    for name, one in measured.items():
        found: dict[str, Any] = {"differences": {}}
        for place, (score, (_, _, resamples)) in enumerate(SCORES.items()):
            samples = len(one[place])
            found[score] = scores[place](one, torch.arange(samples))
            if one is not control:
                found["differences"][score] = bootstrap(partial(difference, place, one), samples, resamples)
        results[name] = found
    return results


def table_of(results: dict[str, Any]) -> str:
    """As Markdown."""
    header = " | ".join(f"{score} {arrow}" for score, (_, arrow, _) in SCORES.items())
    lines = [f"| self-attention | {header} |", "| --- " * (1 + len(SCORES)) + "|"]
    for name, found in results.items():
        cells = []
        for score, (style, _, _) in SCORES.items():
            interval = found["differences"].get(score)
            between = f" ({interval['low']:+{style}} to {interval['high']:+{style}})" if interval else ""
            cells.append(f"{found[score]:{style}}{between}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Generate, measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(TINY))
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--adapted", type=Path, help="output of tools/adapt_tiny.py; what ships if left out")
    parser.add_argument("--only", nargs="+", help="such as sparse hybrid, beside the control; all if left out")
    parser.add_argument("--output", type=Path, help="outputs/quality-<name> if left out")
    arguments = parser.parse_args()
    tiny = TINY[arguments.name]
    known = [variant.short for variant in variants(tiny)]
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: allowed: {', '.join(known)}")
    if arguments.scenes < 2:
        parser.error(f"--scenes {arguments.scenes}: at least 2, to tell how they spread")
    if arguments.adapted is not None and not (arguments.adapted / "patches").is_dir():
        parser.error(f"--adapted {arguments.adapted}: no output of tools/adapt_tiny.py")
    output: Path = arguments.output or Path("outputs") / f"quality-{tiny.name}"
    chosen = [v for v in variants(tiny) if not arguments.only or v.short in ("control", *arguments.only)]
    pipelines: dict[str, Callable[[], Any]] = {
        variant.name: partial(open_variant, tiny, variant, arguments.adapted) for variant in chosen
    }
    pipelines[f"{chosen[0].name}, as shipped"] = partial(load_tiny, tiny.name)
    results = judge(tiny, pipelines, arguments.scenes, output)
    write_text(table_of(results), output / "quality.md")
    write_json(results, output / "quality.json")
    sys.stdout.write(f"\n{table_of(results)}")


if __name__ == "__main__":
    main()
