"""Train the tiny pipelines: ``python -m mhla_diffusers.tiny.train wan --output outputs/tiny-wan``.

Everything comes from the seed: the autoencoder and the text encoder first, then the transformer, through the
project's own training loop with the loss that its family is trained with. An autoencoder that is already in the output
folder is taken as it is. ``--install`` copies the result to where the package keeps it.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, train
from .autoencoders import build_autoencoder, train_autoencoder
from .building import FAMILIES, build_pipeline
from .checksums import pipeline_folder, record_checksums
from .classifier import CLASSIFIER_FILE, train_classifier
from .latents import digit_latents

AUTOENCODER_STEPS = {"dit": 400, "sana": 400, "wan": 900}
TRANSFORMER_STEPS = {"dit": 4000, "sana": 4000, "wan": 3000}
BATCH_SIZES = {"dit": 32, "sana": 32, "wan": 8}
LEARNING_RATES = {"dit": 1e-3, "sana": 1e-3, "wan": 2e-3}
SAMPLES = {"dit": 6000, "sana": 6000, "wan": 2000}
HELD_OUT = 32


def training_config(family: str, output: Path, seed: int) -> TrainingConfig:
    """How the transformer of a tiny pipeline is trained."""
    steps = TRANSFORMER_STEPS[family]
    stage = StageConfig(
        steps=steps,
        learning_rate=LEARNING_RATES[family],
        trainable="all",
        objectives=ObjectiveWeights(diffusion=1.0),
        scheduler="cosine",
        warmup_steps=100,
    )
    return TrainingConfig(
        output=str(output),
        stages=(stage,),
        seed=seed,
        batch_size=BATCH_SIZES[family],
        ema_decay=0.995,
        prompt_dropout=0.1,
        checkpoint_every=250,
        validation=ValidationConfig(samples=HELD_OUT, every=500),
    )


def train_pipeline(family: str, output: Path, seed: int = 0, resume: str | None = None) -> Any:
    """Train all parts of one tiny pipeline.

    Args:
        family: dit, sana or wan.
        output: folder for the autoencoder, checkpoints and the finished ``pipeline``.
        seed: the same seed gives the same pipeline.
        resume: "latest" to go on with a run of the transformer that was interrupted.

    Returns:
        The pipeline, saved to ``output / "pipeline"`` as well.
    """
    autoencoder = _autoencoder(family, output / "autoencoder", seed)
    pipe = build_pipeline(family, autoencoder, seed)
    data = digit_latents(pipe, family, SAMPLES[family], HELD_OUT, seed)
    result = train(pipe.transformer, data, training_config(family, output / "transformer", seed), resume=resume)
    if result.result is None:
        raise SystemExit(f"Stopped after step {result.step}; go on with --resume latest.")
    pipe.transformer = type(pipe.transformer).from_pretrained(result.result)
    pipe.save_pretrained(output / "pipeline")
    return pipe


def _autoencoder(family: str, folder: Path, seed: int) -> Any:
    if folder.is_dir():
        return type(build_autoencoder(family)).from_pretrained(folder).eval()
    from tqdm.auto import tqdm

    steps = AUTOENCODER_STEPS[family]
    with tqdm(total=steps, desc="autoencoder", unit="step") as progress:

        def report(step: int, error: float) -> None:
            progress.update(step - progress.n)
            progress.set_postfix(error=f"{error:.4g}")

        autoencoder = train_autoencoder(family, steps, report, seed)
    autoencoder.save_pretrained(folder)
    return autoencoder


def install_pipeline(family: str, output: Path) -> None:
    """Copy a trained pipeline to where the package keeps it, and record the checksums."""
    shutil.rmtree(pipeline_folder(family), ignore_errors=True)
    shutil.copytree(output / "pipeline", pipeline_folder(family))
    record_checksums()


def install_classifier(seed: int = 0) -> None:
    """Train the classifier and put it where the package keeps it."""
    from safetensors.torch import save_file

    CLASSIFIER_FILE.parent.mkdir(exist_ok=True)
    save_file(train_classifier(seed).state_dict(), CLASSIFIER_FILE)
    record_checksums()


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*FAMILIES, "classifier"])
    parser.add_argument("--output", type=Path, help="folder for everything; outputs/tiny-<family> if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", choices=["latest"])
    parser.add_argument("--install", action="store_true", help="make it the one that the package ships")
    arguments = parser.parse_args()
    if arguments.what == "classifier":
        install_classifier(arguments.seed)
        return
    output = arguments.output or Path("outputs") / f"tiny-{arguments.what}"
    train_pipeline(arguments.what, output, arguments.seed, arguments.resume)
    if arguments.install:
        install_pipeline(arguments.what, output)


if __name__ == "__main__":
    main()
