"""Cards whose times ship with this package: folders of results of ``mhla bench``, found by a part of their name."""

import csv
from pathlib import Path

from .results import read_run

_HELD = "held.csv"
"""Forecasts of whole forwards beside what was measured; ``python -m tests.benchmark.compare_forecast`` prints them."""


def known_cards() -> dict[str, Path]:
    """Name → folder, such as nvidia-h100-80gb-hbm3; inside an installed package, or in a checkout's ``assets/``."""
    package = Path(__file__).parents[1]
    installed = package / "cards"
    folder = installed if installed.is_dir() else package.parent / "assets" / "benchmarks"
    return {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{_HELD}"))}


def find_card(device: str | Path) -> Path:
    """Folder of a known card.

    Args:
        device: a part of its name, such as h100.

    Raises:
        ValueError: a part of the names of several cards.
        FileNotFoundError: of none, and there is no such file either.
    """
    cards = known_cards()
    found = [name for name in cards if str(device).lower() in name]
    if len(found) > 1:
        raise ValueError(f"--device {device} is a part of {' and of '.join(found)}; give more of the name.")
    if not found:
        raise FileNotFoundError(
            f"--device {device} is no file and no card whose times ship; those are {', '.join(cards)} (a part of the "
            "name will do). Else give the JSON that mhla bench transformer has written, such as "
            "outputs/benchmark/DEVICE/transformer.json."
        )
    return cards[found[0]]


def what_was_measured(card: Path) -> tuple[str, str]:
    """Date of a known card's measurements, and the models that forecasts are made of."""
    run = read_run(card / "transformer.json")
    with (card / _HELD).open(encoding="utf-8", newline="") as file:
        names = dict.fromkeys(row["size"].split()[0] for row in csv.DictReader(file))
    return run.conditions.date, ", ".join(names)


def held_against(card: Path) -> str:
    """How near forecasts came to whole forwards on a known card, as a line for people."""
    with (card / _HELD).open(encoding="utf-8", newline="") as file:
        ratios = [float(row["ratio"]) for row in csv.DictReader(file)]
    return (
        f"Held against {len(ratios)} whole forwards on this card that they do not know (cuDNN's softmax, MHLA, hybrid, "
        f"and the earlier sparse branch at 5 %), forecasts were {min(ratios):.2f} to {max(ratios):.2f} times the "
        "measured. No whole forward with FlashAttention-3 or with blocks chosen by content was measured."
    )
