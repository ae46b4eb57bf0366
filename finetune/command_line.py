"""Arguments of classify.py, which reads them before it imports PyTorch: --help answers at once."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def read_classify(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of classify.py, the command's own if None; exits for --help and for mistakes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    given, given.overrides = parser.parse_known_args(arguments)
    is_evaluation = given.command == "evaluate"
    unknown = [word for word in given.overrides if is_evaluation or word[0] == "-" or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return given
