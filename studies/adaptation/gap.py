"""How much of the way from plain linear attention back to softmax each attention closes, update by update.

python studies/adaptation/gap.py wan outputs/adapted-wan outputs/adapted-wan-2 outputs/adapted-wan-3

Reads what tools/adapt_tiny.py recorded, one folder for every seed. The gap is that between plain linear
attention and the control after as many updates, of the same seed; shown as mean ± standard deviation over the seeds.
"""

import argparse
import sys
from pathlib import Path

from mhla_diffusers.demo.adaptation import ADAPTED_RECORD, END_TO_END_STEPS, TRANSFER_STEPS, variants
from mhla_diffusers.files import read_json
from mhla_diffusers.reporting import mean_and_spread, write_table
from mhla_diffusers.tiny import TINY

COLUMNS = {
    "untrained": 0,
    "after transfer": TRANSFER_STEPS,
    "100 end to end": TRANSFER_STEPS + 100,
    f"{END_TO_END_STEPS} end to end": TRANSFER_STEPS + END_TO_END_STEPS,
}


def read_curves(folder: Path, family: str) -> dict[str, dict[int, float]]:
    """Held-out loss by update, of every variant that the folder has."""
    curves = {}
    for variant in variants(TINY[family]):
        file = folder / "patches" / f"tiny-{family}-{variant.short}" / ADAPTED_RECORD
        if file.is_file():
            curves[variant.name] = dict(read_json(file)["held-out loss by update"])
    return curves


def gap_closed(seeds: list[dict[str, dict[int, float]]], names: list[str], name: str, step: int) -> list[float]:
    """Percent of the way from the second of the names, plain linear attention, to the first, for every seed."""
    found = []
    for curves in seeds:
        control, linear = (curves[end][step] for end in names[:2])
        found.append(100 * (linear - curves[name][step]) / (linear - control))
    return found


def main() -> None:
    """Print the table, and write it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=["dit", "wan"])
    parser.add_argument("folders", type=Path, nargs="+", help="outputs of tools/adapt_tiny.py")
    parser.add_argument("--output", type=Path, default=Path("outputs/gap"))
    arguments = parser.parse_args()
    missing = [str(folder) for folder in arguments.folders if not (folder / "patches").is_dir()]
    if missing:
        parser.error(f"no output of tools/adapt_tiny.py: {', '.join(missing)}")
    seeds = [read_curves(folder, arguments.family) for folder in arguments.folders]
    names = [variant.name for variant in variants(TINY[arguments.family]) if all(variant.name in s for s in seeds)]
    if len(names) < 3 or names[1] != "plain linear":
        parser.error(f"every folder must hold the control, plain linear attention and one more; all hold {names}.")
    after = list(COLUMNS)[1:]
    rows = []
    for name in names:
        losses = [mean_and_spread([curves[name][step] for curves in seeds], ".4f") for step in COLUMNS.values()]
        gaps = [""] * len(after)
        if name not in names[:2]:
            gaps = [f"{mean_and_spread(gap_closed(seeds, names, name, COLUMNS[at]), '.1f')} %" for at in after]
        rows.append([name, *losses, *gaps])
    header = ["self-attention", *COLUMNS, *(f"gap closed, {column}" for column in after)]
    sys.stdout.write(write_table(header, rows, arguments.output, "gap"))


if __name__ == "__main__":
    main()
