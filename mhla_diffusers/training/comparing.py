"""Trainings side by side: what is finished is kept, and only by the configuration that it was made with."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import check
from ..devices import launched_processes
from ..files import read_json, write_json
from .output import check_same, check_started, start
from .recipe import Recipe

Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One of the trainings of a comparison.

    Args:
        file: of its result, JSON.
        settings: what the result depends on, as JSON has it.
        run: makes the result, with a folder for checkpoints, which is deleted when the result is written.
    """

    file: Path
    settings: Mapping[str, Any]
    run: Callable[[Path], Result]

    @property
    def checkpoints(self) -> Path:
        """Folder beside the file."""
        return self.file.with_suffix("")

    def kept(self) -> Result | None:
        """The result of an earlier run; None if there is none.

        Raises:
            ValueError: the file is of another configuration.
        """
        if not self.file.is_file():
            return None
        result: Result = read_json(self.file)
        check_same(result.get("config", {}), self.settings, self.file)
        return result


def results_of(parts: Sequence[Part]) -> list[Result]:
    """The result of every part; those that are finished are kept, the others run one after the other.

    One that was stopped goes on from its last checkpoint. What is done is told on stderr.

    Raises:
        ValueError: a file or checkpoints are of another configuration; nothing was run then.
    """
    for part in parts:
        if part.kept() is None:
            check_started(part.checkpoints, part.settings)
    results = []
    for number, part in enumerate(parts, start=1):
        result = part.kept()
        if result is None:
            sys.stderr.write(f"{number} of {len(parts)}: {part.file.stem}\n")
            start(part.checkpoints, part.settings)
            result = part.run(part.checkpoints) | {"config": dict(part.settings)}
            write_json(result, part.file)
        shutil.rmtree(part.checkpoints, ignore_errors=True)
        results.append(result)
    return results


def settings_of(recipe: Recipe, leave_out: Sequence[str] = ("seeds",)) -> dict[str, Any]:
    """A configuration as JSON has it, without what a result does not depend on."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return {name: value for name, value in settings.items() if name not in leave_out}


def settings_of_one(recipe: Recipe, variant: Any, leave_out: Sequence[str]) -> dict[str, Any]:
    """What one variant trained with the first seed depends on: the rows of a step, not how they are split."""
    rows = recipe.batch_size * recipe.accumulate * launched_processes()
    settings = settings_of(recipe, ("seeds", "variants", "batch_size", "accumulate", *leave_out))
    return settings | {"variant": variant, "seed": recipe.seeds[0], "rows_of_a_step": rows}


def file_name_of(name: str) -> str:
    """Small letters, digits and hyphens, and "plus" for a plus."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("+", "plus")).strip("-")


def check_file_names(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Raise unless results by these names would be files of their own.

    Args:
        names: of variants, or of tables.
        taken: names of other files in their folder.

    Raises:
        ValueError: naming those that would share one.
    """
    owners = {file: f"the file {file!r}" for file in taken}
    for name in names:
        file = file_name_of(name)
        check(bool(file), f"{name!r} has no letter or digit to name a file by; give it a name that has.")
        check(file not in owners, f"{name!r} and {owners.get(file)} would both be written as {file!r}; rename one.")
        owners[file] = repr(name)


def parameters_of(model: torch.nn.Module) -> int:
    """How many numbers the parameters of a model hold, those that are not trained included."""
    return sum(parameter.numel() for parameter in model.parameters())


def where_it_ran() -> dict[str, str]:
    """What a table of times must tell: torch's version, threads and the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return {
        "cpu": name,
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }
