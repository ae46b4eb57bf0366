"""The pictures of docs/trouble.md, one per step, from the tiny pipelines on a CPU.

python studies/fidelity/pictures.py                   # all of them, into studies/fidelity; minutes on one core
python studies/fidelity/pictures.py --only audit
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fidelity import Row

from mhla_diffusers import apply_mhla, audit
from mhla_diffusers.auditing import draw_audit
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.files import written_aside
from mhla_diffusers.reporting import require_matplotlib
from mhla_diffusers.tiny import TINY, load_tiny
from studies.adaptation.adaptation import Adaptation
from studies.adaptation.judging import generate_scenes

FOLDER = Path("studies/fidelity")
DENSITIES = (0.25, 0.15, 0.05, 0.025)
_SPARSE = {"density": 0.025, **NOTHING_DENSE}


def adaptation_of(family: str) -> Adaptation:
    """What patches a tiny pipeline."""
    return Adaptation(TINY[family], 1, held_out=1)


def scenes_of(family: str, count: int, seed: int = 5) -> Callable[[Any], list[torch.Tensor]]:
    """What generates some scenes with a pipeline."""
    tiny = TINY[family]
    scenes = tiny.random_scenes(count, seed)
    return lambda pipe: generate_scenes(pipe, tiny, scenes, seed)


def draw_untrained(plt: Any) -> Any:
    """The same noise unpatched and at several densities, nothing trained; of clips the middle frame."""
    families, count = ("wan", "dit"), 8
    figure, axes = plt.subplots(
        len(families) * (1 + len(DENSITIES)), count, figsize=(9, 11.4), layout="constrained", squeeze=False
    )
    rows = iter(axes)
    for family in families:
        adaptation, generate = adaptation_of(family), scenes_of(family, count)
        for density in (None, *DENSITIES):
            settings = _SPARSE | {"density": density}
            pipe = load_tiny(family) if density is None else Row("", settings).patched(adaptation)
            row = next(rows)
            name = "unpatched" if density is None else f"density {density:.0%}"
            row[0].set_ylabel(f"{family}, {name}", fontsize=8)
            for axis, picture in zip(row, generate(pipe), strict=True):
                axis.imshow(picture[len(picture) // 2], cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
    return figure


def draw_audit_of_wan(plt: Any) -> Any:
    """Audit a patch whose lists are chosen by content, on two clips."""
    generate, pipe = scenes_of("wan", 2), load_tiny("wan")
    run = partial(generate, pipe)
    tiny = TINY["wan"]
    found = audit(apply_mhla(pipe, block_size=tiny.block_size, **_SPARSE), run)
    sys.stdout.write(f"{found}\n")
    return found


PICTURES: dict[str, Callable[[Any], Any]] = {
    "untrained": draw_untrained,
    "audit": draw_audit_of_wan,
}


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), default=list(PICTURES))
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    plt = require_matplotlib()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        drawn = PICTURES[name](plt)
        with written_aside(arguments.output / f"{name}.png") as aside:
            if name == "audit":
                draw_audit(drawn, aside)
            else:
                drawn.savefig(aside, dpi=110, format="png")
                plt.close(drawn)
        sys.stdout.write(f"Wrote {arguments.output / f'{name}.png'}\n")


if __name__ == "__main__":
    main()
