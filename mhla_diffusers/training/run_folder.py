"""The folder of a run: checkpoints that are complete or absent, the metrics so far, and the result.

::

    output/
      metrics.jsonl                     one line per update and per validation
      checkpoints/step-00000500/        weights.safetensors of what is trained, and of its moving average, the
                                        optimizer's state, and state.json, which holds the SHA-256 of both
      samples/step-00000500/            what a validation generated
      result/                           what load_mhla (or from_pretrained) loads after the last step

Random numbers need no state: they follow from the seed and the step.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import check
from ..files import file_hash, read_json, write_json, write_tensors, write_text, write_whole_folder
from ..settings import differences
from .config import MAY_CHANGE, TrainingConfig

FORMAT_VERSION = 4
WEIGHTS, AVERAGE, OPTIMIZER = "weights.safetensors", "average/", "optimizer.bin"
"""Files of a checkpoint, and what names of the moving average begin with in the first."""
_STATE = "state.json"


class TrainingDivergedError(ValueError):
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

        ValueError for a new run in a folder that holds one, FileNotFoundError for no such checkpoint.
        """
        checkpoints = self.checkpoints()
        if resume == "latest":
            chosen = checkpoints[-1] if checkpoints else None
        else:
            chosen = None if resume is None else find_checkpoint(Path(resume))
        check(
            not checkpoints or (chosen is not None and step_of(chosen) >= step_of(checkpoints[-1])),
            f"{self.path} already holds a run, up to {', '.join(one.name for one in checkpoints[-1:])}. Resume it with "
            "--resume latest, or choose another folder: output=….",
        )
        return chosen

    def save(self, state: Mapping[str, Any], weights: Mapping[str, Any], optimizer: Any, keep: int) -> None:
        """Write a checkpoint of ``state["step"]``, then remove all but the ``keep`` latest; OSError if that fails."""

        def write(aside: Path) -> None:
            torch.save(optimizer, aside / OPTIMIZER)
            write_tensors(weights, aside / WEIGHTS)
            hashes = {file.name: file_hash(file) for file in sorted(aside.iterdir())}
            write_json({"format_version": FORMAT_VERSION, **state, "files": hashes}, aside / _STATE)

        folder = self.path / "checkpoints" / f"step-{state['step']:08d}"
        try:
            write_whole_folder(folder, write)
        except RuntimeError as error:  # of torch.save, on a full disk
            raise OSError(f"{folder} could not be written: {error}") from error
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def begin_at(self, step: int) -> None:
        """Drop the metrics after a step, which are made again, and the unfinished line of a killed run."""
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
            f"{path} is neither a checkpoint nor a run with one; give outputs/…/checkpoints/step-…, or latest."
        )
    return checkpoints[-1]


def read_state(folder: Path, with_files: bool = False) -> dict[str, Any]:
    """Read ``state.json``, and compare the other files with their hashes if asked to.

    ValueError for a checkpoint that is damaged, lacks a file, or is of an earlier version.
    """
    try:
        state = read_json(folder / _STATE)
        check(
            isinstance(state, dict) and state.get("format_version") == FORMAT_VERSION,
            f"{_STATE} is from an earlier version; start a new run from its result (patch: …/result).",
        )
        for name, expected in state["files"].items() if with_files else ():
            check(file_hash(folder / name) == expected, f"{folder / name} was changed: its SHA-256 differs.")
        return {**state, "config": TrainingConfig.read(state["config"]).to_dict()}
    except (ValueError, OSError) as error:
        raise ValueError(
            f"Checkpoint {folder} cannot be read: {error} Remove it; --resume latest then uses the one before."
        ) from error


def find_changes(folder: Path, state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed since a checkpoint, such as "learning_rate: 0.0001 → 5e-05".

    ``now`` has settings, and what else identifies the run. ValueError if something has changed that may not.
    """
    before = {**state["config"], **state}
    found = list(differences({name: before[name] for name in now}, now))
    refused = [f"{name}={new!r}, which was {old!r}" for name, old, new in found if name.split(".")[0] not in MAY_CHANGE]
    if refused:
        raise ValueError(
            f"{folder} cannot resume with {'; '.join(refused[:4])}; restore these values, and large files' "
            "modification times, or start a new run from its result (patch: …/result). Only these may change: "
            f"{', '.join(MAY_CHANGE)}."
        )
    return [f"{name}: {old} → {new}" for name, old, new in found]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``, without an unfinished last line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
