"""How good a patch is without any training, and with softmax in the first steps: the tiny pipelines on a CPU.

python studies/fidelity/fidelity.py untrained             # all three pipelines
python studies/fidelity/fidelity.py untrained --family dit --scenes 200
python studies/fidelity/fidelity.py steps --family wan    # untrained and adapted, 0 to 30 % of the steps softmax

Every row is patched again, or it is an adapted patch that ships. All rows see the same held-out samples and noise.
Held-out loss, digits recognised, Fréchet distance to real digits, and the distance of every picture to the unpatched
pipeline's for the same noise, means with their standard error, go to <table>-<family>.csv and .md. Rows that are
finished are kept, so a command goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import MHLAConfig, SparseConfig, change_mhla, load_mhla
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.demo.adaptation import Adaptation
from mhla_diffusers.demo.judging import Yardstick
from mhla_diffusers.files import read_json, write_json, written_aside
from mhla_diffusers.generation.pipelines import family_named
from mhla_diffusers.reporting import write_table
from mhla_diffusers.tiny import TINY, TinyPipeline, load_tiny

DENSITIES = (0.025, 0.05, 0.15, 0.25)
STEPS = (0.0, 0.1, 0.2, 0.3)
"""Parts of the denoising steps that keep softmax."""
SCENES = {"wan": 32, "dit": 200, "sana": 200}
"""As many as one core generates in about a minute."""


HEADER = ("held-out loss ↓", "digits recognised ↑", "Fréchet distance ↓", "distance of the pictures ↓")


@dataclass(frozen=True)
class Fidelity:
    """What was measured of one pipeline."""

    losses: list[float]
    """Loss of every held-out sample."""
    right: list[float]
    """Part of the digits recognised, for every scene."""
    distances: list[float]
    """‖picture − unpatched‖ / ‖unpatched‖ for every scene, from the same noise; empty for the unpatched pipeline."""
    frechet_distance: float
    """Distance of the digits' features from those of the same scenes with real digits, over all scenes."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of ``HEADER``, means with their standard error."""
        return (
            mean_and_error(self.losses, ".4f"),
            mean_and_error([100 * part for part in self.right], ".1f") + " %",
            f"{self.frechet_distance:.1f}",
            mean_and_error(self.distances, ".3f") if self.distances else "–",
        )


def mean_and_error(values: Sequence[float], style: str) -> str:
    """Mean ± its standard error; the mean alone of a single value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:{style}}" if len(values) > 1 else ""
    return f"{fmean(values):{style}}{error}"


@dataclass(frozen=True)
class Row:
    """One way to patch."""

    name: str
    settings: dict[str, Any]
    """Fields of :class:`SparseConfig`, or of :class:`MHLAConfig` besides blocks; of an adapted patch what changes."""
    adapted: str | None = None
    """What comes after ``tiny-<family>-`` in the name of an adapted patch that ships."""

    def patched(self, adaptation: Adaptation) -> Any:
        """A fresh pipeline, patched, or with an adapted patch."""
        tiny = adaptation.tiny
        if self.adapted is not None:
            return change_mhla(load_mhla(load_tiny(tiny.family), f"tiny-{tiny.family}-{self.adapted}"), **self.settings)
        config: PatchConfig
        if "density" in self.settings:
            config = SparseConfig(block_size=tiny.block_size, **({"refresh": None} | self.settings))
        else:
            config = MHLAConfig(blocks=tiny.blocks, mixing_per_head=True, **self.settings)
        return adaptation.patched(config)


def rows_of(tiny: TinyPipeline) -> Iterator[Row]:
    """The rows of a pipeline. SANA's own attention is linear, so there is no softmax to be sparse."""
    yield Row("MHLA, every block alike", {"mixing_init": "uniform"})
    yield Row("MHLA", {})
    if family_named(tiny.family).own_attention != "softmax":
        return
    for density in DENSITIES:
        yield Row("sparse", {"density": density})
        yield Row("sparse, means alone", {"density": density, "far": "means"})
        if density == DENSITIES[1]:
            yield Row("sparse, blocks along the curve", {"density": density, "order": "curve"})
        yield Row("sparse, softmax in the first 20 % of steps", {"density": density, "softmax_steps": 0.2})


def rows_of_steps(tiny: TinyPipeline) -> Iterator[Row]:
    """The rows of a pipeline whose own attention is softmax, untrained and adapted."""
    for steps in STEPS:
        yield Row("MHLA, untrained", {"softmax_steps": steps})
        yield Row("sparse, untrained", {"density": DENSITIES[1], "softmax_steps": steps})
        yield Row("MHLA, adapted", {"softmax_steps": steps}, adapted="mhla")
        yield Row("sparse, adapted", {"softmax_steps": steps}, adapted="sparse")


TABLES: dict[str, tuple[Callable[[TinyPipeline], Iterator[Row]], str, str]] = {
    "untrained": (rows_of, "density", "density"),
    "steps": (rows_of_steps, "softmax in the first", "softmax_steps"),
}
"""Table → its rows, and header and setting of the column in which rows of one name differ."""


def percent(row: Row, setting: str) -> str:
    """A setting of a row as tables have it; empty where it has no density."""
    value = row.settings.get(setting, None if setting == "density" else 0)
    return "" if value is None else f"{value:.0%}"


def measure(tiny: TinyPipeline, rows: Iterable[Row], scenes: int, held_out: int, output: Path) -> Iterator[Fidelity]:
    """The unpatched pipeline, then every row; what was measured before is taken from its file."""
    adaptation = Adaptation(tiny, 1, held_out)
    yardstick = Yardstick(tiny, tiny.random_scenes(scenes, seed=1), seed=1)
    folder = output / f"{tiny.family}-{scenes}-{held_out}"
    unpatched: list[torch.Tensor] = []
    for row in (None, *rows):
        name, pictures = "unpatched", folder / "unpatched.safetensors"
        if row is not None:
            steps = percent(row, "softmax_steps")
            is_known = steps == "0%" or steps in row.name
            name = f"{row.name} {percent(row, 'density')} {'' if is_known else steps}".strip()
            name = name.translate({ord(","): None, ord(" "): "-", ord("%"): None})
        file = folder / f"{name}.json"
        if file.is_file() and (row is not None or pictures.is_file()):
            found = Fidelity(**read_json(file))
            unpatched = unpatched or list(load_file(pictures)["pictures"])
        else:
            pipe = load_tiny(tiny.family) if row is None else row.patched(adaptation)
            generated = yardstick.generate(pipe)
            found = Fidelity(
                losses=adaptation.held_out_losses(pipe),
                right=[float(one.double().mean()) for one in yardstick.recognised(generated)],
                distances=[float((one - o).norm() / o.norm()) for one, o in zip(generated, unpatched, strict=False)],
                frechet_distance=yardstick.distance(generated),
            )
            if row is None:
                unpatched = generated
                with written_aside(pictures) as aside:
                    save_file({"pictures": torch.stack(generated)}, aside)
            write_json(asdict(found), file)
        yield found


def main() -> None:
    """Measure all rows of a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--family", nargs="+", choices=list(TINY), default=list(TINY))
    parser.add_argument("--scenes", type=int, help=f"left out: {SCENES}")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("outputs/fidelity"))
    arguments = parser.parse_args()
    rows_of_table, header, setting = TABLES[arguments.table]
    if arguments.table == "steps" and "sana" in arguments.family:
        parser.error("steps is for pipelines whose own attention is softmax: --family wan dit")
    for family in arguments.family:
        rows, scenes = list(rows_of_table(TINY[family])), arguments.scenes or SCENES[family]
        measured = measure(TINY[family], rows, scenes, arguments.held_out, arguments.output)
        lines = [(f"own {family_named(family).own_attention} attention", "", *next(measured).cells)]
        for row, found in zip(rows, measured, strict=True):
            lines.append((row.name, percent(row, setting), *found.cells))
            sys.stdout.write(" | ".join(lines[-1]) + "\n")
        name = f"{arguments.table}-{family}"
        sys.stdout.write(write_table(["self-attention", header, *HEADER], lines, arguments.output, name))


if __name__ == "__main__":
    main()
