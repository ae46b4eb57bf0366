"""Weights at any time: what the result of a run would be, had it ended at one of its checkpoints."""

import logging
from pathlib import Path
from typing import Any

from ..settings import check
from .config import TrainingConfig
from .finetune import NamedRun
from .loop import content_of_run
from .roles import prepare_for_training
from .run_folder import find_checkpoint, read_state, read_tensors, write_weights

logger = logging.getLogger(__name__)


def export_checkpoint(checkpoint: str | Path, output: str | Path, transformer: Any = None) -> Path:
    """Write the weights of a checkpoint in the form of a run's result, bit for bit what the run would have written.

    That is a patch for :func:`mhla_diffusers.load_mhla`, with the moving average of the weights where there is one; for
    a run without a patch a whole transformer.

    Args:
        checkpoint: its folder, or that of a run, whose latest one is meant.
        output: folder to write; it must not hold anything.
        transformer: for a run by :func:`train`: with the weights and the patch that the run began with; it is changed.
            None loads it by the names in the run's configuration.

    Returns:
        The checkpoint's folder.

    Raises:
        FileNotFoundError: no checkpoint, or one that lacks files; no model where the run found it.
        ValueError: a damaged checkpoint, an output that holds files, or a model or patch that has changed since.
        CheckpointError: the output cannot be written.
    """
    folder, output = find_checkpoint(Path(checkpoint)), Path(output)
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    check(not taken, f"{output} exists already; give the name of a new folder to export into.")
    state = read_state(folder)
    config = TrainingConfig.from_dict(state["config"])
    if transformer is None:
        check(
            config.model is not None,
            f"{folder} is of a run whose configuration names no model; pass the transformer that it began with: "
            "mhla_diffusers.training.export_checkpoint(checkpoint, output, transformer).",
        )
        for name, content in content_of_run(config).items():
            check(
                content == state["content"][name],
                f"The content of {name}={getattr(config, name)} is not what the run of {folder} began with; put it "
                "back to export. (Large files are compared by size and time: copy weights with "
                "cp --preserve=timestamps.)",
            )
        transformer = NamedRun(config).transformer(with_weights=True)
    prepare_for_training(transformer, config)
    saved = read_tensors(folder, state, "weights", "ema")
    average = {name: value for name, value in saved.get("ema", {}).items() if name != "updates"}
    parameters = dict(transformer.named_parameters())
    for name, value in (saved["weights"] | average).items():
        parameters[name].data = value  # in the checkpoint's type: trained weights are float32 also under bfloat16
    write_weights(transformer, config, output)
    logger.info(
        "Exported update %d of %d%s from %s.",
        *(state["step"], config.total_steps, ", its moving average," * bool(average), folder),
    )
    return folder
