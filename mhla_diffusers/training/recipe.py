"""Training by transformers' ``Trainer``: what language models and classifiers share."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..config import check
from ..devices import launched_on_cpus, precision_name
from ..patching import mhla_layers, register_mixing_clip
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
    """Of mixing matrices, λ and β; None for that of all others."""
    weight_decay: float = 0.01
    """Of matrices; norms, biases, positions and what is MHLA's own but for its projections do not decay."""
    clip: float = 1.0
    """Norm that gradients are clipped to; 0 for none."""
    warmup: int = 0
    """Steps in which the learning rate grows, at most a tenth of all; a shorter adaptation takes a tenth of its own."""
    seeds: tuple[int, ...] = (0,)
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Or float32, bfloat16 and float16, which are kept as the former."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        check(bool(self.seeds), "seeds is empty; give at least one, such as [0].")
        object.__setattr__(self, "precision", precision_name(self.precision))
        check_counts(self, 1, "steps", "batch_size", "accumulate")
        check_counts(self, 0, "warmup")
        most = self.steps // 10
        check(self.warmup <= most, f"warmup={self.warmup} is more than a tenth of steps={self.steps}; allowed: {most}.")
        for name in ("learning_rate", "mixing_learning_rate"):
            value = getattr(self, name)
            also = "; leave it out for learning_rate" if name == "mixing_learning_rate" else ""
            check(value is None or value > 0, f"{name}={value} must be a positive number such as 1e-3{also}.")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            check(value >= 0, f"{name}={value} must be a number of at least 0.")


def check_counts(settings: object, least: int, *names: str) -> None:
    """Raise unless settings are whole numbers that are large enough.

    Raises:
        ValueError: naming one that is not.
    """
    for name in names:
        value = getattr(settings, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        check(whole and value >= least, f"{name}={value!r} must be a whole number of at least {least}.")


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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one training by a recipe is given: pictures or rows, their order, and for how long."""

    data: Any
    """Data set of torch."""
    seed: int
    """Of the order of rows."""
    steps: int
    """Of the optimizer."""
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    """Makes a batch; None for Trainer's own."""
    loss: Callable[..., torch.Tensor] | None = None
    """Of outputs, labels and the number of labels in a step (``compute_loss_func``); None for the model's own."""
    workers: int = 0
    """Processes that read data."""
    save_every: int = 500
    """Steps between two checkpoints."""


def run_trainer(model: Any, recipe: Recipe, job: Job, output: Path | None = None) -> float:
    """Train a model in place, from the last checkpoint in the output folder if there is one; then it is in eval mode.

    Steps done and loss are told on stderr.

    Args:
        model: of transformers, patched or not.
        recipe: of the training.
        job: what it is trained on.
        output: folder of transformers' checkpoints, of which the last two are kept; None for none.

    Returns:
        CPU seconds of the training, those before the checkpoint among them.

    Raises:
        ValueError: several GPUs and no launcher.
    """
    from transformers import PrinterCallback, Trainer, get_cosine_schedule_with_warmup

    from .watching import Watch

    optimizer = optimizer_of(model, recipe)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(recipe.warmup, job.steps // 10), job.steps)
    watch = Watch()
    with tempfile.TemporaryDirectory() as aside:
        trainer = Trainer(
            model,
            _arguments(recipe, job, output or Path(aside), saves=output is not None),
            data_collator=job.collate,
            train_dataset=job.data,
            compute_loss_func=job.loss,
            optimizers=(optimizer, schedule),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        last = None if output is None else last_checkpoint(output)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    model.eval()
    return watch.seconds


def _arguments(recipe: Recipe, job: Job, folder: Path, saves: bool) -> Any:
    """Transformers' ``TrainingArguments``; raises what :func:`run_trainer` raises."""
    from transformers import TrainingArguments

    found = TrainingArguments(
        output_dir=str(folder),
        use_cpu=launched_on_cpus(),
        max_steps=job.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulate,
        max_grad_norm=recipe.clip,
        seed=job.seed,
        data_seed=job.seed,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        save_strategy="steps" if saves else "no",
        save_steps=job.save_every,
        save_total_limit=2,
        logging_steps=100,
        report_to="none",
        dataloader_num_workers=job.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    check(
        found.n_gpu <= 1,
        f"One process sees {found.n_gpu} GPUs, among which Trainer would share every batch as nn.DataParallel, with "
        "another batch size and loss. Start a process for each: accelerate launch …; or show it one of them: "
        "CUDA_VISIBLE_DEVICES=0 …",
    )
    return found


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one that is whole; None if there is none. Trainer writes ``trainer_state.json`` last."""
    whole = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
