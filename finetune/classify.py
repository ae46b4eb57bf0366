"""Image classifiers with MHLA: one trained, kinds of attention side by side, ablations, and accuracy over a folder.

python finetune/classify.py compare --config finetune/configs/classify-digits.yaml --output outputs/digits
python finetune/classify.py ablate --config finetune/configs/classify-digits.yaml --output outputs/digits
python finetune/classify.py train --config finetune/configs/classify-digits.yaml --variant MHLA --output outputs/one
python finetune/classify.py evaluate --model facebook/deit-tiny-patch16-224 --pictures imagenet/val
Settings of a configuration are overridden by key=value, for example: steps=100 batch_size=32
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from mhla_diffusers.analysis.classifiers import draw_classifiers, look_at_classifier
from mhla_diffusers.devices import choose_device
from mhla_diffusers.reporting import require_matplotlib
from mhla_diffusers.training.classify.comparison import ablate, compare
from mhla_diffusers.training.classify.config import load_classify_config
from mhla_diffusers.training.classify.evaluation import evaluate
from mhla_diffusers.training.classify.run import train_one


def main() -> None:
    """Read the arguments and do what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "compare", "ablate"):
        command = commands.add_parser(name)
        command.add_argument("--config", type=Path, required=True)
        command.add_argument("--output", type=Path, required=True)
        if name == "train":
            command.add_argument("--variant", required=True, help="which one is trained")
    command = commands.add_parser("evaluate")
    command.add_argument("--model", required=True, help="Hub id or folder of a classifier")
    command.add_argument("--patch", type=Path, help="folder of a patch")
    command.add_argument("--pictures", type=Path, required=True, help="folder with a subfolder per class")
    command.add_argument("--size", type=int, help="pixels; the model's own if left out")
    command.add_argument("--crop", type=float, default=0.875, help="part of the shorter side that is kept")
    command.add_argument("--batch-size", type=int, default=64)
    command.add_argument("--workers", type=int, default=0, help="processes that read pictures")
    command.add_argument("--device", default="auto")
    # not an argument of the commands: argparse finds none that stand behind their options
    arguments, overrides = parser.parse_known_args()
    unknown = [word for word in overrides if arguments.command == "evaluate" or word[0] == "-" or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        sys.stdout.write(done(arguments, overrides))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


def done(given: argparse.Namespace, overrides: list[str]) -> str:
    """Do what was asked for; what there is to print."""
    if given.command == "evaluate":
        found = evaluate(
            given.model,
            given.pictures,
            patch=given.patch,
            size=given.size,
            crop=given.crop,
            batch_size=given.batch_size,
            workers=given.workers,
            device=choose_device(given.device),
        )
        return json.dumps(asdict(found)) + "\n"
    config = load_classify_config(given.config, overrides)
    if given.command == "train":
        return f"{train_one(config, given.variant, given.output)}\n"
    if given.command == "compare":
        require_matplotlib()  # which draws the result, after all the training
    compared = (compare if given.command == "compare" else ablate)(config, given.output, look_at_classifier)
    if given.command == "compare":
        draw_classifiers(compared.results, given.output)
    return compared.tables


if __name__ == "__main__":
    main()
