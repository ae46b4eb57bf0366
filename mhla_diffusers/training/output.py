"""The output folder of one training: of which configuration its checkpoints are, and the result.

::

    output/
      training.json       what is trained
      checkpoint-500/     transformers', the last two
      result/             what was trained, and nothing else
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import check
from ..files import read_json, write_json, write_whole_folder
from ..patching import is_patched, save_mhla

_STARTED = "training.json"


def check_same(found: Mapping[str, Any], settings: Mapping[str, Any], place: Path) -> None:
    """Raise unless a result or a folder has the settings that are asked for.

    Raises:
        ValueError: naming those that differ.
    """
    others = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    check(
        not others,
        f"{place} is of another configuration, which differs in {', '.join(others)}; give another output folder, or "
        "delete it to train again.",
    )


def check_started(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise unless a folder has no checkpoints, or those of a configuration.

    Raises:
        ValueError: they are of another one, or nothing tells of which.
    """
    started = folder / _STARTED
    if started.is_file():
        check_same(read_json(started), settings, folder)
    else:
        check(
            not any(folder.glob("checkpoint-*")),
            f"{folder} has checkpoints and no {_STARTED} that tells of what; give another output folder.",
        )


def start(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note what is trained in a folder; raises what :func:`check_started` raises."""
    check_started(folder, settings)
    write_json(settings, folder / _STARTED)


def train_into(
    output: Path,
    settings: Mapping[str, Any],
    train: Callable[[Path], Any],
    beside: Mapping[str, Any] | None = None,
) -> Path:
    """Train a model, from the last checkpoint in the folder if there is one, and save it.

    Args:
        output: folder of checkpoints and of ``result``, which is written anew.
        settings: what the result depends on, as JSON has it.
        train: gives the trained model, its checkpoints in the folder.
        beside: name → content of JSON files beside the model.

    Returns:
        The folder of the result.

    Raises:
        ValueError: the folder has checkpoints of another configuration.
    """
    start(output, settings)
    return save_result(train(output), output / "result", beside or {})


def save_result(model: Any, folder: Path, beside: Mapping[str, Any]) -> Path:
    """Save a model of transformers: of a patched one the patch with all weights and ``config.json``.

    Of several processes the first one writes. The folder is whole or absent; what it held before is gone.

    Returns:
        The folder.
    """
    from accelerate import PartialState

    def write(aside: Path) -> None:
        if is_patched(model):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(aside)
            save_mhla(model, aside, weights="all")
        else:
            model.save_pretrained(aside)
        for name, content in beside.items():
            write_json(content, aside / name)

    if PartialState().is_main_process:
        write_whole_folder(folder, write)
    return folder
