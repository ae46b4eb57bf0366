"""How good a patch is without any training, all steps alike: the tiny pipelines on a CPU.

python studies/fidelity/fidelity.py             # all three pipelines
python studies/fidelity/fidelity.py --family dit --scenes 200

All rows see the same held-out samples and noise.
Held-out loss, digits recognised, Fréchet distance to real digits, and the distance of every picture to the unpatched
pipeline's for the same noise, means with their standard error, go to untrained-<family>.csv and .md. Rows that are
finished are kept, so a command goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import MHLAConfig, SparseConfig
from mhla_diffusers.config import NOTHING_DENSE, PatchConfig
from mhla_diffusers.files import read_json, write_json, written_aside
from mhla_diffusers.generation.pipelines import family_named
from mhla_diffusers.reporting import write_table
from mhla_diffusers.tiny import TINY, TinyPipeline, load_tiny
from studies.adaptation.adaptation import Adaptation
from studies.adaptation.judging import Yardstick

DENSITIES = (0.025, 0.05, 0.15, 0.25)
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
    """Fields of :class:`SparseConfig`, or of :class:`MHLAConfig` besides blocks."""

    def patched(self, adaptation: Adaptation) -> Any:
        """A fresh pipeline, patched."""
        tiny = adaptation.tiny
        config: PatchConfig
        if "density" in self.settings:
            config = SparseConfig(block_size=tiny.block_size, **(NOTHING_DENSE | self.settings))
        else:
            config = MHLAConfig(blocks=tiny.blocks, mixing_per_head=True, **self.settings)
        return adaptation.patched(config)


def rows_of(tiny: TinyPipeline) -> Iterator[Row]:
    """The rows of a pipeline. SANA's own attention is linear, so there is no softmax to be sparse."""
    yield Row("MHLA, every block alike", {"mixing_init": "uniform"})
    yield Row("MHLA", {})
    if family_named(tiny.family).computes != "softmax":
        return
    for density in DENSITIES:
        yield Row("sparse", {"density": density})
        yield Row("sparse, means alone", {"density": density, "far": "means"})
        if density == DENSITIES[1]:
            yield Row("sparse, blocks along the curve", {"density": density, "order": "curve"})


def density_of(row: Row) -> str:
    """The density of a row as tables have it; empty where it has none."""
    value = row.settings.get("density")
    return "" if value is None else f"{value:.1%}"


def measure(tiny: TinyPipeline, rows: Iterable[Row], scenes: int, held_out: int, output: Path) -> Iterator[Fidelity]:
    """The unpatched pipeline, then every row; what was measured before is taken from its file."""
    adaptation = Adaptation(tiny, 1, held_out)
    yardstick = Yardstick(tiny, tiny.random_scenes(scenes, seed=1), seed=1)
    folder = output / f"{tiny.family}-{scenes}-{held_out}"
    unpatched: list[torch.Tensor] = []
    for row in (None, *rows):
        name, pictures = "unpatched", folder / "unpatched.safetensors"
        if row is not None:
            name = f"{row.name} {density_of(row)}".strip()
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
    """Measure all rows and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(TINY), default=list(TINY))
    parser.add_argument("--scenes", type=int, help=f"left out: {SCENES}")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("outputs/fidelity"))
    arguments = parser.parse_args()
    for family in arguments.family:
        rows, scenes = list(rows_of(TINY[family])), arguments.scenes or SCENES[family]
        measured = measure(TINY[family], rows, scenes, arguments.held_out, arguments.output)
        lines = [(f"own {family_named(family).computes} attention", "", *next(measured).cells)]
        for row, found in zip(rows, measured, strict=True):
            lines.append((row.name, density_of(row), *found.cells))
            sys.stdout.write(" | ".join(lines[-1]) + "\n")
        name = f"untrained-{family}"
        sys.stdout.write(write_table(["self-attention", "density", *HEADER], lines, arguments.output, name))


if __name__ == "__main__":
    main()
