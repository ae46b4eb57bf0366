"""What a finished run leaves for use."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..checkpoints import Weights, save_mhla
from .config import TrainingConfig
from .folders import write_whole_folder
from .trainable import is_adapter

LORA_FILE = "pytorch_lora_weights.safetensors"
"""Name under which diffusers looks for LoRA."""


def export_result(transformer: Any, config: TrainingConfig, folder: Path) -> None:
    """Write the trained weights for use.

    A patched transformer is saved for :func:`mhla_diffusers.load_mhla`: MHLA's own weights and, where a stage trained
    them, the model's. LoRA lies beside it for ``pipe.load_lora_weights(folder)``. An unpatched transformer is saved
    whole, for ``from_pretrained``.

    Args:
        transformer: trained.
        config: settings of the run.
        folder: is complete or absent.

    Raises:
        CheckpointError: if it cannot be written.
    """

    def write(aside: Path) -> None:
        if config.patch is None:
            transformer.save_pretrained(aside)
            return
        save_mhla(transformer, aside, weights=_weights(config), base_model=config.model)
        adapters = {
            f"{config.component}.{name.replace('.default.', '.')}": parameter.detach().cpu().contiguous()
            for name, parameter in transformer.named_parameters()
            if is_adapter(name)
        }
        if adapters:
            save_file(adapters, aside / LORA_FILE, metadata={"format": "pt"})

    write_whole_folder(folder, write)


def _weights(config: TrainingConfig) -> Weights:
    if all(stage.trainable in ("mhla", "lora") for stage in config.stages):
        return "mhla"
    return "changed" if config.model is not None else "all"
