"""Weights for use: the result of a run, and what it would be, had the run ended at one of its checkpoints."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import check
from ..patching import Weights, find_patched, save_mhla
from .config import TrainingConfig
from .roles import STUDENT, lora_of, prepare_for_training
from .run_folder import find_checkpoint, read_state, read_tensors, write_whole

logger = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: str | Path, output: str | Path, begin: Callable[[TrainingConfig, dict[str, Any]], Any]
) -> None:
    """Write the weights of a checkpoint in the form of a run's result, bit for bit what the run would have written.

    That is a patch for :func:`mhla_diffusers.load_mhla`, with the moving average of the weights where there is one; for
    a run without a patch a whole transformer. ``mhla export`` finds the transformer by the names in the run's
    configuration.

    Args:
        checkpoint: its folder, or that of a run, whose latest one is meant.
        output: folder to write; it must not hold anything.
        begin: called with the run's configuration and what was recorded of the content of its patch and base weights;
            returns a transformer with the weights and the patch that the run began with, which is changed.

    Raises:
        FileNotFoundError: no checkpoint, or one that lacks files.
        ValueError: a damaged checkpoint, or an output that holds files.
        CheckpointError: the output cannot be written.
    """
    folder, output = find_checkpoint(Path(checkpoint)), Path(output)
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    check(not taken, f"{output} exists already; give the name of a new folder to export into.")
    state = read_state(folder)
    config = TrainingConfig.read(state["config"])
    transformer = begin(config, state["content"])
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


def write_weights(transformer: Any, config: TrainingConfig, folder: Path) -> None:
    """Write the trained weights for use, into a folder that is complete or absent.

    A patched transformer is saved for :func:`mhla_diffusers.load_mhla`: MHLA's own weights and, where a stage
    trained them, the model's, or its LoRA. An unpatched transformer is saved whole, for ``from_pretrained``.

    Raises:
        ValueError: a patch in diffusers' own form.
        CheckpointError: it cannot be written.
    """
    weights: Weights = "changed" if config.model is not None else "all"
    if all(stage.trainable in ("mhla", "lora") for stage in config.stages):
        weights = "mhla"

    def write(aside: Path) -> None:
        if config.patch is None:
            transformer.save_pretrained(aside)
            return
        (patched,) = find_patched(transformer).values()
        if not patched.is_attached:
            raise ValueError(
                "The transformer was patched with diffusers' own set_attn_processor, which keeps no record of a "
                "LoRA; patch it with apply_mhla() or mhla_diffusers.set_attn_processor() to train and export it."
            )
        has_lora = any(lora_of(name) == STUDENT for name, _ in transformer.named_parameters())
        before, patched.lora = patched.lora, STUDENT if has_lora else None
        try:
            save_mhla(transformer, aside, weights=weights, base_model=config.model)
        finally:  # training may go on
            patched.lora = before

    write_whole(folder, write)
