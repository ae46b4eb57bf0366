"""What each kind of attention does to quality: the tiny DiT pipeline adapted, sampled and compared on a CPU.

python finetune/quality.py --output outputs/quality

Every variant starts from the same trained softmax model and is adapted with the same data, noise, loss and number of
steps; softmax itself is trained on as well, because adapting improves any model on data that it can still learn from.
Then each generates the same samples from the same noise, and one report compares them in the eyes of the digit
classifier: Fréchet distance to real held-out digits, digits recognised, and the loss on held-out digits, with paired
differences. What is finished is kept, so the command goes on where it was stopped.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mhla_diffusers import MHLAConfig
from mhla_diffusers.demo.adaptation import DIFFUSION, Adaptation, Recipe
from mhla_diffusers.demo.judging import digit_shown, picture_features, real_scenes
from mhla_diffusers.demo.latents import digit_latents
from mhla_diffusers.evaluation.compare import Comparison, compare_sets
from mhla_diffusers.evaluation.report import difference_table, score_table, write_report
from mhla_diffusers.evaluation.samples import SampleConfig, generate_samples, prepare_folder
from mhla_diffusers.evaluation.sets import Sample, class_samples
from mhla_diffusers.files import write_json
from mhla_diffusers.generation import load_result
from mhla_diffusers.reporting import require_matplotlib, text_table
from mhla_diffusers.tiny import TINY, load_tiny
from mhla_diffusers.tiny.digits import Scene, load_digits

TINY_DIT = TINY["dit"]
CLASSES = 10
UNTOUCHED = "softmax-untouched"
BLOCKS = TINY_DIT.blocks
VARIANTS: dict[str, MHLAConfig | None] = {
    "softmax": None,
    "MHLA-hybrid": MHLAConfig(blocks=BLOCKS, layers="2/3"),
    "MHLA-auto": MHLAConfig(blocks=BLOCKS, layers="auto:2/3"),
    "MHLA": MHLAConfig(blocks=BLOCKS),
    "MHLA-exact": MHLAConfig(blocks=BLOCKS, mixing_per_head=True, exact="content"),
    "linear": MHLAConfig(blocks=(1, 1), mixing_learnable=False, mixing_clip=False),
}
"""The first one is what all others are compared with."""
PAIRS = (("MHLA", "linear"), ("MHLA-hybrid", "MHLA-auto"))
"""Further differences that the report is asked for."""


def adapt(adaptation: Adaptation, patch: MHLAConfig | None, steps: int, output: Path) -> Path:
    """Folder with the adapted weights."""
    result = output / "result"
    if not result.is_dir():
        adaptation.adapt(adaptation.patched(patch, few_steps), Recipe(steps, objectives=DIFFUSION), output)
    return result


def few_steps(pipe: Any) -> None:
    """Generate every class, for automatic hybrids to choose their layers on."""
    generators = [torch.Generator().manual_seed(label) for label in range(CLASSES)]
    pipe(class_labels=list(range(CLASSES)), generator=generators, num_inference_steps=4)


def held_out_losses(adaptation: Adaptation, weights: Path | None) -> list[float]:
    """Loss of every held-out sample."""
    pipe = load_tiny(TINY_DIT.family)
    if weights is not None:
        load_result(pipe, weights)
    return adaptation.held_out_losses(pipe)


def sample(weights: Path | None, samples: list[Sample], output: Path, arguments: argparse.Namespace) -> None:
    """The sample set of one variant, as ``mhla eval samples`` makes it."""
    config = SampleConfig(
        TINY_DIT.family,
        weights=None if weights is None else str(weights),
        samples=samples,
        output=output,
        seed=arguments.seed,
        batch_size=50,
        settings={"num_inference_steps": arguments.inference_steps, "guidance_scale": arguments.guidance},
    )
    prepare_folder(config)
    for done in generate_samples(config):
        sys.stdout.write(f"{output.name}: {done} of {len(samples)} samples\n")


def draw_real_digits(count: int, folder: Path) -> Path:
    """Pictures of held-out digits, as many of each class."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = [Scene((number % CLASSES,)) for number in range(count)]
    for number, picture in enumerate(real_scenes(scenes, TINY_DIT, load_digits("held-out"), seed=0)):
        pixels = (255 * picture[0]).round().to(torch.uint8)
        Image.fromarray(pixels.numpy()).convert("RGB").save(folder / f"{number:06d}.png")
    return folder


def draw_samples(comparison: Comparison, file: Path) -> None:
    """One row per variant: a digit of every class, from the same noise."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(len(comparison.rows), CLASSES, figsize=(10, 1.02 * len(comparison.rows)))
    for line, row in zip(axes, comparison.rows, strict=True):
        for axis, shown in zip(line, row.variant.samples, strict=False):
            axis.imshow(Image.open(row.variant.folder / shown.file))
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(row.variant.name, rotation=0, horizontalalignment="right", verticalalignment="center")
    figure.tight_layout(pad=0.3)
    figure.savefig(file, dpi=80)
    plt.close(figure)


def main() -> None:
    """Adapt, sample, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/quality"))
    parser.add_argument("--scenes", type=int, default=2000, help="digits to adapt on")
    parser.add_argument("--held-out", type=int, default=500, help="digits for the held-out loss")
    parser.add_argument("--steps", type=int, default=400, help="updates that adapt each variant")
    parser.add_argument("--samples", type=int, default=1000, help="generated by each variant")
    parser.add_argument("--inference-steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    output: Path = arguments.output
    adaptation = Adaptation(
        TINY_DIT,
        digit_latents(
            load_tiny(TINY_DIT.family), TINY_DIT, arguments.scenes, arguments.held_out, seed=arguments.seed + 1
        ),
        held_out=arguments.held_out,
        seed=arguments.seed,
        validate_every=arguments.steps,
        batch_size=TINY_DIT.batch_size,
    )
    samples = class_samples(arguments.samples, CLASSES)
    for name, patch in {**VARIANTS, UNTOUCHED: None}.items():
        training = output / "training" / name
        weights = None if name == UNTOUCHED else adapt(adaptation, patch, arguments.steps, training)
        sample(weights, samples, output / "samples" / name, arguments)
        write_json({"held_out_loss": held_out_losses(adaptation, weights)}, output / "samples" / name / "scores.json")
    compare(output, draw_real_digits(arguments.samples, output / "real"))


def compare(output: Path, reference: Path) -> None:
    """What ``mhla eval compare`` does: the report of all, and one of each further pair."""
    for names in ((*VARIANTS, UNTOUCHED), *PAIRS):
        comparison = compare_sets(
            [output / "samples" / name for name in names],
            reference=reference,
            extractor=picture_features,
            extractor_name="mhla_diffusers.demo.judging:picture_features",
            sample_scores={"digits recognised": digit_shown},
        )
        folder = output / ("report" if len(names) > 2 else f"report-{'-and-'.join(names)}")
        page = write_report(comparison, folder, CLASSES)
        for header, rows in (score_table(comparison), difference_table(comparison)):
            sys.stdout.write(f"\n{text_table(header, rows)}\n")
        sys.stdout.write(f"Wrote {page}\n")
        if len(names) > 2:
            draw_samples(comparison, folder / "samples.png")


if __name__ == "__main__":
    main()
