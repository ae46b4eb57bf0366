"""What a finished run leaves for use."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from .config import TrainingConfig
from .folders import Tensors, write_whole_folder


def export_result(transformer: Any, tensors: Tensors, config: TrainingConfig, folder: Path) -> None:
    """Write the trained weights.

    An unpatched transformer is saved whole, for ``from_pretrained``.

    Args:
        transformer: with the trained weights.
        tensors: the parameters that were trained, whole and on the CPU.
        config: settings of the run.
        folder: is complete or absent.

    Raises:
        CheckpointError: if it cannot be written.
    """

    def write(aside: Path) -> None:
        if config.patch is None:
            transformer.save_pretrained(aside)
        else:
            save_file(tensors, aside / "trained.safetensors")

    write_whole_folder(folder, write)
