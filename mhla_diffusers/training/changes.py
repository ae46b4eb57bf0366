"""What may change when a run is resumed: one list; anything else raises with the reason."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..settings import differences
from .config import TrainingConfig

Change = tuple[str, Any, Any]
"""Dotted name of a setting, its value before and its value now."""

MAY_CHANGE = (
    # how a run is carried out; samples per update and those held out are compared by themselves
    *("output", "batch_size", "gradient_accumulation", "gradient_checkpointing", "context_parallel", "workers"),
    *("checkpoint_every", "keep_checkpoints", "export_every", "time_limit", "max_skipped", "tracker", "validation"),
    # how it goes on learning
    *("weight_decay", "max_gradient_norm", "ema_decay", "prompt_dropout"),
)
"""Settings of the run."""
MAY_CHANGE_IN_STAGE = (
    *("steps", "learning_rate", "mixing_learning_rate", "scheduler", "warmup_steps", "guidance"),
    *("objectives.diffusion", "objectives.distillation", "objectives.transfer"),
)
"""Settings of the stage that a checkpoint is of, finished or not. Later stages may be added, changed and removed."""
_WHY_NOT = {
    "model": "the checkpoint holds changes of its weights",
    "component": "the checkpoint holds changes of its weights",
    "patch": "the checkpoint's weights were trained with it",
    "data": "the run has a position in the order of its samples",
    "clip": "the run has a position in the order of its samples",
    "samples per update": "the order of samples is counted in updates, so batch_size * gradient_accumulation * groups "
    "of processes must stay",
    "training samples": "samples would move between training and validation (validation.samples)",
    "seed": "noise, timesteps and the order of samples follow from it",
    "precision": "frozen weights would be others",
    "base_dtype": "frozen weights would be others",
    "optimizer": "the checkpoint holds its state",
    "flow_shift": "losses at other timesteps cannot be compared with those so far",
}


def find_changes(folder: Path, state: Mapping[str, Any], run: Mapping[str, Any]) -> list[Change]:
    """Return what has changed since a checkpoint.

    Args:
        folder: the checkpoint's.
        state: its content.
        run: what identifies the run, or a part of that: ``config``, ``content`` of what it names,
            ``samples_per_update`` and ``training_samples``.

    Raises:
        ValueError: something has changed that may not, with its values and the reason.
    """
    config = TrainingConfig.read(state["config"])
    found = list(differences(_named({key: state[key] for key in run}), _named(run)))
    refused = [
        f"{name}={now!r}, which was {before!r}: {why}" for name, before, now, why in _refused(found, config, state)
    ]
    if refused:
        raise ValueError(
            f"{folder} cannot be resumed with {'; '.join(refused[:4])}. Put that back, or start a new run in another "
            f"output folder. What may change: {', '.join(MAY_CHANGE)}; of the stage at work "
            f"{', '.join(MAY_CHANGE_IN_STAGE)}; all of later stages."
        )
    return found


def _named(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a run, by the names that errors use."""
    content = {f"the content of {name}": value for name, value in run.get("content", {}).items()}
    counts = {key.replace("_", " "): value for key, value in run.items() if key not in ("config", "content")}
    return {**run.get("config", {}), **content, **counts}


def _refused(
    found: list[Change], config: TrainingConfig, state: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the changes that are not allowed, each with the reason."""
    step = state["step"]
    at_work = next(index for index in range(len(config.stages)) if step <= config.end_of(index))
    done = step - config.end_of(at_work - 1)
    for name, before, now in found:
        first, *rest = name.removeprefix("the content of ").split(".")
        if first != "stages":
            if first not in MAY_CHANGE:
                yield name, before, now, _WHY_NOT.get(first, "the checkpoint was made with it")
            continue
        index, setting = int(rest[0]), ".".join(rest[1:])
        if index < at_work:
            yield name, before, now, f"that stage ended with update {config.end_of(index)}"
        elif index == at_work and setting not in MAY_CHANGE_IN_STAGE:
            yield name, before, now, "the stage has begun with it; give it to a further stage"
        elif index == at_work and setting == "steps" and now < done:
            yield name, before, now, f"{done} updates of the stage are done"


def say(change: Change) -> str:
    """Return a change as a line of the log, such as "stages.0.learning_rate: 0.0001 → 5e-05"."""
    name, before, now = change
    if isinstance(before or now, dict) and None in (before, now):  # a stage, or settings that are left out otherwise
        given = ", ".join(f"{key}={one}" for key, _, one in differences({}, before or now) if one)
        return f"{name} {'removed' if now is None else 'added'}: {given}"
    return f"{name}: {before} → {now}"
