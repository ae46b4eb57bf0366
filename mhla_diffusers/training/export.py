"""What a finished run leaves for use."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..patching import CONFIG_NAME, Weights, load_mhla, save_mhla
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


def load_result(pipe: Any, result: str | Path) -> None:
    """Give a pipeline what a finished run has left: a trained patch, LoRA beside it, or a whole unpatched transformer.

    Args:
        pipe: unpatched, of the model that was trained.
        result: folder of a run, or the folder or Hub id of a patch.

    Raises:
        ValueError: another model's weights, LoRA for a pipeline that diffusers has no LoRA for, or what
            :func:`mhla_diffusers.load_mhla` raises.
        FileNotFoundError: nothing there.
    """
    folder = Path(result)
    if (folder / "config.json").is_file() and not (folder / CONFIG_NAME).is_file():
        pipe.transformer = _load_transformer(pipe.transformer, folder)
        return
    load_mhla(pipe, result)
    if (folder / LORA_FILE).is_file():
        if not hasattr(pipe, "load_lora_weights"):
            raise ValueError(f"{folder} holds LoRA, but {type(pipe).__name__} takes none; fuse it before saving.")
        pipe.load_lora_weights(folder)


def _load_transformer(untrained: Any, folder: Path) -> Any:
    """A whole transformer in place of the one that it was trained from."""
    made_for = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_class_name")
    if made_for != type(untrained).__name__:
        raise ValueError(f"{folder} holds a {made_for}, but the pipeline has a {type(untrained).__name__}.")
    return type(untrained).from_pretrained(folder, dtype=untrained.dtype).to(untrained.device)
