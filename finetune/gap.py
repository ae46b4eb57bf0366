"""How much of the way from plain linear attention back to softmax each attention closes, update by update.

python finetune/gap.py wan outputs/adapted-wan outputs/adapted-wan-2 outputs/adapted-wan-3

Reads what mhla_diffusers.demo.adapting recorded, one folder for every seed. The gap is that between plain linear
attention and the control after as many updates, of the same seed; shown as mean ± standard deviation over the seeds.
"""

import argparse
import csv
import io
import sys
from pathlib import Path
from statistics import fmean, stdev

from mhla_diffusers.demo.adapting import RECORD
from mhla_diffusers.demo.variants import END_TO_END_STEPS, TRANSFER_STEPS, variants
from mhla_diffusers.files import read_json, write_text
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
        file = folder / "patches" / f"tiny-{family}-{variant.short}" / RECORD
        if file.is_file():
            curves[variant.name] = dict(read_json(file)["held-out loss by update"])
    return curves


def spread(values: list[float], style: str) -> str:
    """Mean, and the standard deviation where there are several."""
    return f"{fmean(values):{style}}" + (f" ± {stdev(values):{style}}" if len(values) > 1 else "")


def main() -> None:
    """Print the table, and write it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=["dit", "wan"])
    parser.add_argument("folders", type=Path, nargs="+", help="outputs of mhla_diffusers.demo.adapting")
    parser.add_argument("--output", type=Path, default=Path("outputs/gap"))
    arguments = parser.parse_args()
    missing = [str(folder) for folder in arguments.folders if not (folder / "patches").is_dir()]
    if missing:
        parser.error(f"no output of mhla_diffusers.demo.adapting: {', '.join(missing)}")
    seeds = [read_curves(folder, arguments.family) for folder in arguments.folders]
    names = [variant.name for variant in variants(TINY[arguments.family]) if all(variant.name in s for s in seeds)]
    if len(names) < 3 or names[1] != "plain linear":
        parser.error(f"every folder must hold the control, plain linear attention and one more; all hold {names}.")
    rows = []
    for name in names:
        losses = [spread([curves[name][step] for curves in seeds], ".4f") for step in COLUMNS.values()]
        gaps = ["", ""]
        if name not in names[:2]:
            closed = [
                [
                    100
                    * (curves[names[1]][step] - curves[name][step])
                    / (curves[names[1]][step] - curves[names[0]][step])
                    for curves in seeds
                ]
                for step in list(COLUMNS.values())[1:]
            ]
            gaps = [f"{spread(values, '.1f')} %" for values in closed]
        rows.append([name, *losses, *gaps])
    header = ["self-attention", *COLUMNS, *(f"gap closed, {column}" for column in list(COLUMNS)[1:])]
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_text(text.getvalue(), arguments.output / "gap.csv")
    markdown = "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *rows])
    write_text(markdown, arguments.output / "gap.md")
    sys.stdout.write(markdown)


if __name__ == "__main__":
    main()
