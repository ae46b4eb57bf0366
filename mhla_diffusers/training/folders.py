"""The folder of a run: checkpoints that are complete or absent, and the metrics so far.

::

    output/
      metrics.jsonl                     one line per update and per validation
      checkpoints/step-00000500/        state.json, weights.safetensors, optimizer.safetensors, ema.safetensors
      result/                           what load_mhla (or from_pretrained) loads after the last stage
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_STATE = "state.json"
_FREE_TO_CHANGE = {
    "output",
    "batch_size",
    "gradient_accumulation",
    "gradient_checkpointing",
    "workers",
    "checkpoint_every",
    "keep_checkpoints",
    "max_skipped",
    "tracker",
    "validation",
}
"""Settings that a resumed run may have otherwise, since they do not change what is trained.
The number of samples per update and of training samples is compared by itself."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands and which run it is. Random numbers need no state: they follow from the seed and the step."""

    step: int
    """Updates done, over all stages, skipped ones included."""
    skipped_in_row: int
    """Updates skipped since the last one that was not."""
    samples_per_update: int
    training_samples: int
    config: dict[str, Any]
    """``TrainingConfig.to_dict()``."""

    def check_same_run(self, other: "RunState", folder: Path) -> None:
        """Raise unless ``other``, read from ``folder``, is a state of the same run.

        Raises:
            ValueError: naming what differs.
        """
        mine, saved = ({**_flat(state.config), **state._sizes()} for state in (self, other))
        different = [
            f"{name} is {mine.get(name)!r} here and {saved.get(name)!r} there"
            for name in sorted(mine.keys() | saved.keys())
            if mine.get(name) != saved.get(name) and name.split(".")[0] not in _FREE_TO_CHANGE
        ]
        if different:
            raise ValueError(
                f"{folder} belongs to another run: {'; '.join(different[:4])}. Resume with the configuration of that "
                "run, or start this one in another output folder."
            )

    def _sizes(self) -> dict[str, int]:
        return {"samples per update": self.samples_per_update, "training samples": self.training_samples}


class RunFolder:
    """The output folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def last_before(self, step: int) -> Path | None:
        """The latest checkpoint of fewer than ``step`` updates."""
        earlier = [path for path in self.checkpoints() if int(path.name.removeprefix("step-")) < step]
        return earlier[-1] if earlier else None

    def find(self, resume: str | None) -> Path | None:
        """The checkpoint to resume from.

        Args:
            resume: "latest", the path of a checkpoint, or None to begin anew.

        Raises:
            ValueError: to begin anew where there are checkpoints.
            FileNotFoundError: no checkpoint to resume from.
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
            raise FileNotFoundError(f"There is no checkpoint to resume from in {where}.")
        return chosen

    def save(self, state: RunState, tensors: Mapping[str, Tensors], keep: int) -> Path:
        """Write a checkpoint and remove all but the ``keep`` latest.

        Raises:
            CheckpointError: if it cannot be written; the earlier checkpoints stay.
        """
        folder = self.path / "checkpoints" / f"step-{state.step:08d}"

        def write(aside: Path) -> None:
            for name, part in tensors.items():
                save_file(part, aside / f"{name}.safetensors")
            (aside / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")

        write_whole_folder(folder, write)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)
        return folder

    def keep_metrics_until(self, step: int) -> None:
        """Drop the metrics after a step, and a line that a killed run left unfinished."""
        if not self.metrics.is_file():
            return
        kept = [json.dumps(record) for record in read_metrics(self.metrics) if record["step"] <= step]
        aside = self.metrics.with_suffix(".aside")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        aside.replace(self.metrics)


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def load_checkpoint(folder: Path) -> tuple[RunState, dict[str, Tensors]]:
    """State and tensors of a checkpoint.

    Raises:
        ValueError: if a file is damaged.
    """
    try:
        state = RunState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except (ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"Checkpoint {folder} is damaged ({error}); resume from an earlier one.") from error
    return state, tensors


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, but for an unfinished last line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_whole_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder so that it is complete or absent, whenever the process ends.

    Args:
        folder: is made, or replaced.
        write: puts the files into the folder that it is given.

    Raises:
        CheckpointError: if the files cannot be written, for example to a full disk; nothing is left behind.
    """
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        for file in aside.iterdir():
            _flush_to_disk(file)
        if folder.exists():
            shutil.rmtree(folder)
        aside.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"{folder} could not be written: {error}. Is the disk full?") from error


def _flush_to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, item in items for name, leaf in _flat(item, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value}
