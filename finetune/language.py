"""Language models with MHLA: kinds of attention side by side, or one of them trained.

python finetune/language.py compare --config finetune/configs/language-tiny.yaml --output outputs/language
python finetune/language.py train --config finetune/configs/language-tiny.yaml --variant MHLA --output outputs/one
"""

import argparse
import sys
from pathlib import Path

from mhla_diffusers.training.language.comparison import compare
from mhla_diffusers.training.language.run import LanguageConfig, build, load_language_config, train
from mhla_diffusers.training.recipe import save_result


def main() -> None:
    """Read the arguments and do what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "train"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variant", help="which one is trained")
    arguments = parser.parse_args()
    try:
        config = load_language_config(arguments.config)
        if arguments.command == "compare":
            sys.stdout.write(compare(config, arguments.output))
        else:
            train_one(config, arguments.variant, arguments.output)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(1, f"{error}\n")


def train_one(config: LanguageConfig, variant: str | None, output: Path) -> None:
    """Train one variant and save it: the patch with all weights, or the model as transformers saves it.

    Raises:
        ValueError: no such variant.
    """
    if variant not in config.variants:
        raise ValueError(f"--variant {variant} is unknown; allowed: {', '.join(config.variants)}.")
    seed = config.seeds[0]
    model = train(build(config, config.variants[variant], seed), config, seed, config.steps, output)
    save_result(model, output / "result")


if __name__ == "__main__":
    main()
