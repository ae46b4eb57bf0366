"""Training by transformers' ``Trainer``: what language models and classifiers share."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import nn

from ..config import check, check_choice, check_names
from ..files import read_text
from ..patching import is_patched, mhla_layers, register_mixing_clip, save_mhla
from .trainable import is_mixing


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Raises:
        ValueError: an unknown precision, no seed, or numbers that are not allowed.
    """

    steps: int
    """Of the optimizer."""
    batch_size: int
    """Rows or pictures of a batch and process."""
    accumulate: int = 1
    """Batches of an optimizer step."""
    learning_rate: float
    """At its peak: it grows during the warm-up and falls by a cosine to 0."""
    mixing_learning_rate: float | None = None
    """Of mixing matrices and far field weights; None for that of all others."""
    weight_decay: float = 0.01
    """Of matrices; norms, biases, positions and what is MHLA's own but for its projections do not decay."""
    clip: float = 1.0
    """Norm that gradients are clipped to; 0 for none."""
    warmup: int = 0
    """Steps in which the learning rate grows, at most a tenth of all; a shorter adaptation takes a tenth of its own."""
    seeds: tuple[int, ...] = (0,)
    precision: str = "no"
    """"no", "bf16" or "fp16"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        check(bool(self.seeds), "seeds is empty; give at least one, such as [0].")
        check_choice("precision", self.precision, ("no", "bf16", "fp16"))
        check_counts(self, 1, "steps", "batch_size", "accumulate")
        check_counts(self, 0, "warmup")
        most = self.steps // 10
        check(self.warmup <= most, f"warmup={self.warmup} is more than a tenth of steps={self.steps}; allowed: {most}.")
        for name in ("learning_rate", "mixing_learning_rate"):
            self._check_number(name, positive=True)
        for name in ("weight_decay", "clip"):
            self._check_number(name, positive=False)

    def _check_number(self, name: str, positive: bool) -> None:
        value = getattr(self, name)
        if value is None and name == "mixing_learning_rate":
            return
        allowed = "a positive number such as 1.0e-3" if positive else "a number of at least 0"  # 1e-3 is text in YAML
        number = isinstance(value, int | float) and value >= 0 and (value > 0 or not positive)
        also = "; leave it out for learning_rate" if name == "mixing_learning_rate" else ""
        check(number, f"{name}={value!r} must be {allowed}{also}.")


def check_counts(settings: object, least: int, *names: str) -> None:
    """Raise unless settings are whole numbers that are large enough.

    Raises:
        ValueError: naming one that is not.
    """
    for name in names:
        value = getattr(settings, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        check(whole and value >= least, f"{name}={value!r} must be a whole number of at least {least}.")


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def load_recipe(kind: type[AnyRecipe], file: Path) -> AnyRecipe:
    """Read a configuration.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML of one, unknown or missing names, or values that are not allowed.
    """
    content = yaml.safe_load(read_text(file))
    check(isinstance(content, Mapping), f"{file} holds no settings by name.")
    check_names(content, [entry.name for entry in fields(kind)], "setting", f"{file}: ")
    needed = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    missing = [name for name in needed if name not in content]
    check(not missing, f"{file} lacks {', '.join(missing)}.")
    return kind(**content)


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, and mixing matrices stay in (0, 1)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    mixing = [parameter for name, parameter in trained if is_mixing(name)]
    others = [(name.endswith("weight") and one.ndim > 1, one) for name, one in trained if not is_mixing(name)]
    rate = recipe.learning_rate if recipe.mixing_learning_rate is None else recipe.mixing_learning_rate
    groups: list[dict[str, Any]] = [
        {"params": [one for decays, one in others if decays], "weight_decay": recipe.weight_decay},
        {"params": [one for decays, one in others if not decays], "weight_decay": 0.0},
        {"params": mixing, "weight_decay": 0.0, "lr": rate},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.learning_rate)
    if mhla_layers(model):
        register_mixing_clip(optimizer, model)
    return optimizer


def run_trainer(
    model: Any,
    recipe: Recipe,
    data: Any,
    *,
    seed: int,
    steps: int,
    output: Path | None = None,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    **arguments: Any,
) -> Any:
    """Train a model in place, from the last checkpoint in the output folder if there is one.

    Args:
        model: of transformers, patched or not.
        recipe: of the training.
        data: data set of torch.
        seed: of the order of rows.
        steps: of the optimizer.
        output: folder of transformers' checkpoints; None for none.
        collate: makes a batch; None for Trainer's own.
        loss: of outputs, labels and the number of labels in a step (Trainer's ``compute_loss_func``); None for the
            model's own.
        arguments: further ones of transformers' ``TrainingArguments``.

    Returns:
        The model.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments, get_cosine_schedule_with_warmup
    from transformers.trainer_utils import get_last_checkpoint

    optimizer = optimizer_of(model, recipe)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(recipe.warmup, steps // 10), steps)
    with tempfile.TemporaryDirectory() as aside:
        settings: dict[str, Any] = {
            "output_dir": str(output or aside),
            "max_steps": steps,
            "per_device_train_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": recipe.accumulate,
            "max_grad_norm": recipe.clip,
            "seed": seed,
            "data_seed": seed,
            "bf16": recipe.precision == "bf16",
            "fp16": recipe.precision == "fp16",
            "save_strategy": "no" if output is None else "steps",
            "logging_steps": 100,
            "report_to": "none",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "disable_tqdm": True,
        }
        trainer = Trainer(
            model,
            TrainingArguments(**(settings | arguments)),
            data_collator=collate,
            train_dataset=data,
            compute_loss_func=loss,
            optimizers=(optimizer, schedule),
        )
        if output is None:
            trainer.remove_callback(PrinterCallback)
        last = None if output is None or not output.is_dir() else get_last_checkpoint(str(output))
        trainer.train(resume_from_checkpoint=last)
    return model.eval()


def save_result(model: Any, folder: Path) -> Path:
    """Save a model of transformers: of a patched one the patch with all weights and ``config.json``.

    Of several processes the first one writes.

    Returns:
        The folder.
    """
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return folder
    if is_patched(model):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        save_mhla(model, folder, weights="all")
    else:
        model.save_pretrained(folder)
    return folder
