"""Train the tiny pipelines: ``python -m mhla_diffusers.demo.making wan --output outputs/tiny-wan``.

Everything comes from the seed: the autoencoder and the text encoder first, then the transformer, through the
project's own training loop with the loss that its family is trained with. Run again, the command goes on where it was
interrupted. ``--install`` copies the result to where the package keeps it.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ..tiny import TINY, TinyPipeline
from ..tiny.base import Phase
from ..tiny.digits import FRAMES
from ..tiny.loading import pipeline_folder, record_checksums
from ..training import InMemoryData, ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
from .adaptation import train_or_go_on
from .autoencoders import train_autoencoder
from .judging import CLASSIFIER_FILE, train_classifier
from .latents import cut_clips, digit_latents
from .text import build_tokenizer, train_text_encoder

HELD_OUT = 32


def training_config(phase: Phase, output: Path, seed: int) -> TrainingConfig:
    """Settings of the training loop for one phase."""
    stage = StageConfig(
        steps=phase.steps,
        learning_rate=phase.learning_rate,
        trainable="all",
        objectives=ObjectiveWeights(diffusion=1.0),
        scheduler="cosine",
        warmup_steps=50,
    )
    return TrainingConfig(
        output=str(output),
        stages=(stage,),
        seed=seed,
        batch_size=phase.batch_size,
        ema_decay=0.99,
        prompt_dropout=0.1,
        checkpoint_every=250,
        validation=ValidationConfig(samples=HELD_OUT, every=500),
    )


def build_pipeline(tiny: TinyPipeline, autoencoder: Any, seed: int = 0) -> Any:
    """A pipeline with a trained autoencoder, a trained text encoder and an untrained transformer."""
    torch.manual_seed(seed)
    parts = {"transformer": tiny.build_transformer(), "vae": autoencoder, "scheduler": tiny.build_scheduler()}
    if tiny.text_marks:
        tokenizer = build_tokenizer(tiny)
        parts |= {"tokenizer": tokenizer, "text_encoder": train_text_encoder(tiny, tokenizer, seed)}
    return tiny.assemble(parts)


def train_pipeline(tiny: TinyPipeline, output: Path, seed: int = 0) -> Any:
    """Train all parts of one tiny pipeline; parts that are in the output folder already are taken from there.

    Args:
        tiny: which one.
        output: folder for the autoencoder, the runs of the training loop and the finished ``pipeline``.
        seed: the same seed gives the same pipeline.

    Returns:
        The pipeline, saved to ``output / "pipeline"`` as well.
    """
    pipe = build_pipeline(tiny, _autoencoder(tiny, output / "autoencoder", seed), seed)
    data = digit_latents(pipe, tiny, tiny.training_scenes, HELD_OUT, seed)
    for phase in tiny.phases:
        folder = output / phase.name
        if not (folder / "result").is_dir():
            _train_phase(pipe, data, phase, folder, seed)
        pipe.transformer = type(pipe.transformer).from_pretrained(folder / "result")
    pipe.save_pretrained(output / "pipeline")
    return pipe


def _train_phase(pipe: Any, data: InMemoryData, phase: Phase, folder: Path, seed: int) -> None:
    if phase.frames < FRAMES:
        data = cut_clips(data, phase.frames, HELD_OUT)
    result = train_or_go_on(pipe.transformer, data, training_config(phase, folder, seed))
    if result.result is None:
        raise SystemExit(f"Stopped after step {result.step}; the same command goes on.")


def _autoencoder(tiny: TinyPipeline, folder: Path, seed: int) -> Any:
    if folder.is_dir():
        return type(tiny.build_autoencoder()).from_pretrained(folder).eval()
    from tqdm.auto import tqdm

    with tqdm(total=tiny.autoencoder_steps, desc="autoencoder", unit="step") as progress:

        def report(step: int, error: float) -> None:
            progress.update(step - progress.n)
            progress.set_postfix(error=f"{error:.4g}")

        autoencoder = train_autoencoder(tiny, report, seed)
    autoencoder.save_pretrained(folder)
    return autoencoder


def install_pipeline(family: str, output: Path) -> None:
    """Copy a trained pipeline to where the package keeps it, and record the checksums."""
    shutil.rmtree(pipeline_folder(family), ignore_errors=True)
    shutil.copytree(output / "pipeline", pipeline_folder(family))
    for file in pipeline_folder(family).glob("*/config.json"):
        settings = json.loads(file.read_text())
        settings.pop("_name_or_path", None)  # the folder it was trained in
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    record_checksums()


def install_classifier(seed: int = 0) -> None:
    """Train the classifier and put it where the package keeps it."""
    from safetensors.torch import save_file

    save_file(train_classifier(seed).state_dict(), CLASSIFIER_FILE)
    record_checksums()


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TINY, "classifier"])
    parser.add_argument("--output", type=Path, help="folder for everything; outputs/tiny-<family> if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--install", action="store_true", help="make it the one that the package ships")
    arguments = parser.parse_args()
    if arguments.what == "classifier":
        install_classifier(arguments.seed)
        return
    output = arguments.output or Path("outputs") / f"tiny-{arguments.what}"
    train_pipeline(TINY[arguments.what], output, arguments.seed)
    if arguments.install:
        install_pipeline(arguments.what, output)


if __name__ == "__main__":
    main()
