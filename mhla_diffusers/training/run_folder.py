"""The folder of a run: checkpoints that are complete or absent, the metrics so far, and the result.

::

    output/
      metrics.jsonl                     one line per update and per validation
      changes.jsonl                     one line per resumption with other settings: the step, and name → [before, now]
      checkpoints/step-00000500/        weights.safetensors, optimizer.safetensors, ema.safetensors, and
                                        state.json, which holds the SHA-256 of each of them and of itself
      samples/step-00000500/            what a validation generated
      exports/step-00000500/            what the result would be if the run had ended there
      result/                           what load_mhla (or from_pretrained) loads after the last stage
      aside-1/                          what an earlier run made after the step that a later one resumed from

``state.json`` holds the updates done and what identifies the run. Random numbers need no state: they follow from the
seed and the step.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..files import (
    check_hash,
    file_hash,
    read_checked_json,
    write_checked_json,
    write_tensors,
    write_text,
    write_whole_folder,
)
from .changes import Change
from .config import TrainingConfig

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

_STATE = "state.json"


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or weights are not finite, and the run cannot recover."""


class RunFolder:
    """The output folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.changes = self.path / "metrics.jsonl", self.path / "changes.jsonl"
        self.result = self.path / "result"

    def checkpoints(self) -> list[Path]:
        """Return complete checkpoints, oldest first."""
        return _steps(self.path / "checkpoints")

    def find(self, resume: str | None) -> Path | None:
        """Return the checkpoint to resume from: "latest", a path, or None for a new run.

        Raises:
            ValueError: a new run in a folder with checkpoints, or a damaged checkpoint state.
            FileNotFoundError: no checkpoint to resume from, or one that lacks files.
        """
        checkpoints = self.checkpoints()
        if resume is None:
            if checkpoints:
                raise ValueError(
                    f"{self.path} already holds a run, up to {checkpoints[-1].name}. Resume it with resume='latest' "
                    "(--resume latest), or choose another output folder."
                )
            return None
        chosen = Path(resume) if resume != "latest" else checkpoints[-1] if checkpoints else None
        if chosen is None or not (chosen / _STATE).is_file():
            where = chosen or self.path / "checkpoints"
            hint = " Did you mean 'latest'?" if resume != "latest" and get_close_matches(resume, ["latest"]) else ""
            raise FileNotFoundError(f"{where} holds no checkpoint to resume from.{hint}")
        read_state(chosen)
        return chosen

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensors], keep: int) -> None:
        """Write a checkpoint, then remove all but the ``keep`` latest; a failed write removes none.

        Args:
            state: as JSON holds it, with ``step``.
            tensors: file name without suffix → its tensors.
            keep: how many.

        Raises:
            CheckpointError: it could not be written.
        """

        def write(aside: Path) -> None:
            hashes = {}
            for name, part in tensors.items():
                file = aside / f"{name}.safetensors"
                write_tensors(part, file)
                hashes[file.name] = file_hash(file)
            write_checked_json({**state, "files": hashes}, aside / _STATE)

        write_whole(self.path / "checkpoints" / f"step-{state['step']:08d}", write)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def go_back_to(self, step: int) -> None:
        """Move what was made after a step into ``aside-1``, ``aside-2``, …, with a copy of all metrics.

        Only metrics after the last checkpoint are dropped, and the unfinished line of a killed run.
        """
        newer = [path for path in self.checkpoints() if step_of(path) > step]
        if newer:
            made = [*_steps(self.path / "samples"), *_steps(self.path / "exports")]
            newer += [path for path in made if step_of(path) > step]
            newer += [self.result] if self.result.is_dir() else []
            aside = next(place for number in count(1) if not (place := self.path / f"aside-{number}").exists())
            aside.mkdir()
            for file in filter(Path.is_file, (self.metrics, self.changes)):
                shutil.copy(file, aside)
            for path in newer:
                target = aside / path.relative_to(self.path)
                target.parent.mkdir(exist_ok=True)
                path.rename(target)
            logger.warning("What this folder held of the steps after %d was moved into %s.", step, aside)
        # changes at this step are found again, since it was saved before them
        for file, last in ((self.metrics, step), (self.changes, step - 1)):
            if file.is_file():
                kept = [json.dumps(record) for record in read_metrics(file) if record["step"] <= last]
                write_text("".join(f"{line}\n" for line in kept), file)

    def add_changes(self, step: int, changes: Sequence[Change]) -> None:
        """Append the settings that have changed after a step, if any."""
        if changes:
            with self.changes.open("a", encoding="utf-8") as file:
                changed = {name: [before, now] for name, before, now in changes}
                file.write(json.dumps({"step": step, "changed": changed}) + "\n")

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def step_of(folder: Path) -> int:
    """Return the step that a folder such as ``step-00000500`` is of."""
    return int(folder.name.removeprefix("step-"))


def _steps(folder: Path) -> list[Path]:
    """Return the folders of steps in a folder, in order, without others such as a user's copy ``step-00000500.bak``."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint by its folder, or the latest one by the folder of its run; FileNotFoundError for none."""
    if (path / _STATE).is_file():
        return path
    checkpoints = RunFolder(path).checkpoints()
    if not checkpoints:
        raise FileNotFoundError(
            f"{path} is neither a checkpoint nor a run with one; give outputs/…/checkpoints/step-…."
        )
    return checkpoints[-1]


def read_tensors(folder: Path, state: Mapping[str, Any], *names: str) -> dict[str, Tensors]:
    """Return file name without suffix → tensors of a checkpoint: of these files that it has, or of all.

    Raises:
        ValueError: a damaged file.
    """
    files = {name: digest for name, digest in state["files"].items() if not names or Path(name).stem in names}
    try:
        for name, expected in files.items():
            check_hash(folder / name, expected, _STATE)
        return {Path(name).stem: load_file(folder / name) for name in sorted(files)}
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"Checkpoint {folder} is damaged: {error} {_way_out(folder)}") from error


def read_state(folder: Path) -> dict[str, Any]:
    """Read ``state.json``; settings that are newer than the checkpoint get their defaults.

    Raises:
        ValueError: it is damaged.
        FileNotFoundError: a file that it names is missing.
    """
    try:
        state = read_checked_json(folder / _STATE)
        state = {**state, "config": TrainingConfig.read(state["config"]).to_dict()}
        missing = [name for name in state["files"] if not (folder / name).is_file()]
    except ValueError as error:
        raise ValueError(f"Checkpoint {folder} is damaged: {error} {_way_out(folder)}") from error
    if missing:
        raise FileNotFoundError(f"Checkpoint {folder} lacks {', '.join(missing)}. {_way_out(folder)}")
    return state


def _way_out(checkpoint: Path) -> str:
    """Say what to do instead of resuming from an unusable checkpoint."""
    earlier = [path for path in _steps(checkpoint.parent) if path.name < checkpoint.name]
    if earlier:
        return f"Resume from an earlier one: --resume {earlier[-1]}"
    return "There is no earlier one beside it to resume from; start again in another output folder."


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``, without an unfinished last line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder atomically, as :func:`write_whole_folder`; CheckpointError if it cannot be written."""
    try:
        write_whole_folder(folder, write)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {str(error).rstrip('.')}.") from error
