"""Trainings side by side: what is finished is kept, and only by the configuration that it was made with."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import check
from ..files import read_json, write_json
from ..reporting import show_progress
from .recipe import Recipe

Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One of the trainings of a comparison.

    Args:
        file: of its result, JSON.
        settings: what the result depends on, as JSON has it.
        run: makes the result.
    """

    file: Path
    settings: Mapping[str, Any]
    run: Callable[[], Result]

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

    Raises:
        ValueError: a file is of another configuration; nothing was run then.
    """
    for part in parts:
        part.kept()
    results = []
    for done, part in enumerate(parts):
        show_progress(done, len(parts))
        result = part.kept()
        if result is None:
            result = part.run() | {"config": dict(part.settings)}
            write_json(result, part.file)
        results.append(result)
    show_progress(len(parts), len(parts))
    return results


def check_same(found: Mapping[str, Any], settings: Mapping[str, Any], file: Path) -> None:
    """Raise unless a result has the settings that are asked for.

    Raises:
        ValueError: naming those that differ.
    """
    others = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    check(
        not others,
        f"{file} is of another configuration, which differs in {', '.join(others)}; give another output folder, or "
        "delete that file to train it again.",
    )


def settings_of(recipe: Recipe, leave_out: Sequence[str] = ("seeds",)) -> dict[str, Any]:
    """A configuration as JSON has it, without what a result does not depend on."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return {name: value for name, value in settings.items() if name not in leave_out}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What something gives, and the CPU seconds that it took."""
    begin = time.process_time()
    return run(), time.process_time() - begin


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
