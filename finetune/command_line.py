"""Arguments of language.py, which reads them before it imports PyTorch: --help answers at once."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def read_language(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of language.py, the command's own if None; exits for --help and for mistakes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "train"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variant", help="which one is trained")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(arguments)
