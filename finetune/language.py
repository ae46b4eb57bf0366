"""Language models with MHLA: kinds of attention side by side, or one of them trained.

python finetune/language.py compare --config finetune/configs/language-tiny.yaml --output outputs/language
python finetune/language.py train --config finetune/configs/language-tiny.yaml --variant MHLA --output outputs/one
Settings of a configuration are overridden by key=value, for example: steps=100 batch_size=32
"""

import argparse
import sys
from pathlib import Path

from mhla_diffusers.training.language.comparison import compare
from mhla_diffusers.training.language.run import load_language_config, train_one


def main() -> None:
    """Read the arguments and do what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "train"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variant", help="which one is trained")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    try:
        config = load_language_config(arguments.config, arguments.overrides)
        if arguments.command == "compare":
            sys.stdout.write(compare(config, arguments.output))
        else:
            sys.stdout.write(f"{train_one(config, arguments.variant, arguments.output)}\n")
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
