"""The folder of a run: checkpoints that are complete or absent, the metrics so far, and the result.

::

    output/
      metrics.jsonl                     one line per update and per validation
      checkpoints/step-00000500/        weights.safetensors and average.safetensors of what is trained, accelerate's
                                        state, and state.json, which holds the SHA-256 of each of them
      samples/step-00000500/            what a validation generated
      result/                           what load_mhla (or from_pretrained) loads after the last step

Random numbers need no state: they follow from the seed and the step.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..files import (
    file_hash,
    read_json,
    write_json,
    write_text,
    write_whole_folder,
)
from ..settings import differences
from .config import MAY_CHANGE, TrainingConfig

FORMAT_VERSION = 3
_STATE = "state.json"


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or weights are not finite, and the run cannot recover."""


class RunFolder:
    """The output folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.result = self.path / "metrics.jsonl", self.path / "result"

    def checkpoints(self) -> list[Path]:
        """Return complete checkpoints, oldest first, without copies such as ``step-00000500.bak``."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(path for path in found if path.name.removeprefix("step-").isdigit())

    def find(self, resume: str | None) -> Path | None:
        """Return the checkpoint to resume from: of a path, or the latest; None for a run from its beginning.

        ValueError for a new run in a folder that holds one, or as :func:`read_state`.
        """
        checkpoints = self.checkpoints()
        if resume == "latest":
            chosen = checkpoints[-1] if checkpoints else None
        elif resume is not None and not (Path(resume) / _STATE).is_file():
            raise FileNotFoundError(f"{resume} is not a checkpoint; give outputs/…/checkpoints/step-…, or latest.")
        else:
            chosen = None if resume is None else Path(resume)
        if checkpoints and (chosen is None or step_of(chosen) < step_of(checkpoints[-1])):
            raise ValueError(
                f"{self.path} already holds a run, up to {checkpoints[-1].name}. Go on there with --resume latest, or "
                "choose another folder: output=…."
            )
        if chosen is not None:
            read_state(chosen)
        return chosen

    def save(self, state: Mapping[str, Any], write: Callable[[Path], None], keep: int) -> None:
        """Write a checkpoint of ``state["step"]``, then remove all but the ``keep`` latest.

        ``write`` fills the folder that it gets. If that fails, none is removed, and CheckpointError raised.
        """

        def write_all(aside: Path) -> None:
            write(aside)
            hashes = {file.name: file_hash(file) for file in sorted(aside.iterdir())}
            write_json({"format_version": FORMAT_VERSION, **state, "files": hashes}, aside / _STATE)

        write_whole(self.path / "checkpoints" / f"step-{state['step']:08d}", write_all)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def begin_at(self, step: int) -> None:
        """Drop the metrics after a step, which are made again, and the unfinished line of a killed run."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.metrics.is_file():
            kept = [json.dumps(record) for record in read_metrics(self.metrics) if record["step"] <= step]
            write_text("".join(f"{line}\n" for line in kept), self.metrics)

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a line."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def step_of(checkpoint: Path) -> int:
    """Return the step of a folder such as ``step-00000500``."""
    return int(checkpoint.name.removeprefix("step-"))


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


def read_state(folder: Path, with_files: bool = False) -> dict[str, Any]:
    """Read ``state.json``, and compare the other files with their hashes if asked to.

    ValueError for a checkpoint that is damaged or of an earlier version, FileNotFoundError for one that lacks a file.
    """
    try:
        state = read_json(folder / _STATE)
        if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{_STATE} is of an earlier version, whose result/ a new run can begin with (patch: …/result)."
            )
        state = {**state, "config": TrainingConfig.read(state["config"]).to_dict()}
        missing = [name for name in state["files"] if not (folder / name).is_file()]
        for name in state["files"] if with_files and not missing else ():
            if file_hash(folder / name) != state["files"][name]:
                raise ValueError(f"{name} is damaged or was changed: its SHA-256 is not the one in {_STATE}.")
    except ValueError as error:
        raise ValueError(f"Checkpoint {folder} cannot be read: {error} {_instead_of(folder)}") from error
    if missing:
        raise FileNotFoundError(f"Checkpoint {folder} lacks {', '.join(missing)}. {_instead_of(folder)}")
    return state


def read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return name → tensor of a file of a checkpoint, on the CPU; none where it has no such file."""
    file = folder / f"{name}.safetensors"
    return load_file(file) if file.is_file() else {}


def _instead_of(checkpoint: Path) -> str:
    """Say what to do instead of resuming from an unusable checkpoint."""
    earlier = [path for path in RunFolder(checkpoint.parents[1]).checkpoints() if path.name < checkpoint.name]
    if earlier:
        return f"Remove it, and --resume latest goes on from {earlier[-1].name}."
    return "There is no earlier one beside it to resume from; start again in another output folder."


def find_changes(folder: Path, state: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Return what has changed since a checkpoint, such as "learning_rate: 0.0001 → 5e-05".

    ``run`` has ``config`` and other things that identify the run. ValueError if something has changed that may not.
    """
    before = {**state["config"], **{name: state[name] for name in run if name != "config"}}
    now = {**run.get("config", {}), **{name: value for name, value in run.items() if name != "config"}}
    found = list(differences({name: before[name] for name in now}, now))
    refused = [f"{name}={new!r}, which was {old!r}" for name, old, new in found if name.split(".")[0] not in MAY_CHANGE]
    if refused:
        raise ValueError(
            f"{folder} cannot be resumed with {'; '.join(refused[:4])}. Restore them, or start a new run in another "
            f"output folder from its result (patch: …/result). These may change: {', '.join(MAY_CHANGE)}."
        )
    return [f"{name}: {old} → {new}" for name, old, new in found]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``, without an unfinished last line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder atomically, as :func:`write_whole_folder`; CheckpointError if it cannot be written."""
    try:
        write_whole_folder(folder, write)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises the last one on a full disk
        raise CheckpointError(f"{folder} could not be written: {str(error).rstrip('.')}.") from error
