"""Held-out loss of the untrained tiny-wan under sparse attention, over that of softmax attention.

python studies/order/tiny_wan.py > studies/order/tiny_wan.csv
"""

import csv
import sys
from statistics import fmean
from typing import Any

from mhla_diffusers import apply_mhla, remove_mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.adaptation import Adaptation
from studies.adaptation.digits import TINY

SETTINGS: list[dict[str, Any]] = [
    *({"density": density, "far": far} for density in (0.025, 0.05, 0.15) for far in ("second-order", "means")),
    {"density": 0.05, "order": "curve"},
    *({"density": 0.05, "block_size": size, "key_block_size": 4} for size in (4, 16)),
    *({"density": 0.05, "block_size": size} for size in (8, 16, 64)),
]
"""Settings of each row; blocks that are not given are 8 for queries and 4 for keys."""


def main() -> None:
    """Write one CSV row per setting to standard output."""
    adaptation, pipe = Adaptation(TINY["wan"], 16, 16), load_tiny("wan")
    table = csv.writer(sys.stdout)
    table.writerow(["settings", "loss", "over softmax"])
    softmax = fmean(adaptation.held_out_losses(pipe))
    table.writerow(["softmax", f"{softmax:.4f}", "1.000"])
    for settings in SETTINGS:
        apply_mhla(pipe, **NOTHING_DENSE, **settings)
        loss = fmean(adaptation.held_out_losses(pipe))
        remove_mhla(pipe)
        words = ", ".join(f"{name}={value}" for name, value in settings.items()) or "default"
        table.writerow([words, f"{loss:.4f}", f"{loss / softmax:.3f}"])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
