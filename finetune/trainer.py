"""Training with transformers' ``Trainer``, for ``finetune/language.py``.

The output folder of a training::

    output/
      training.json       what is trained
      checkpoint-500/     transformers', the last two
      result/             the trained weights, and nothing else

A comparison has such a folder for every running training, and a JSON file for every finished one.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from mhla_diffusers.devices import launched_on_cpus, launched_processes, precision_name
from mhla_diffusers.files import read_json, read_text, write_json, write_whole_folder
from mhla_diffusers.patching import is_patched, save_mhla
from mhla_diffusers.settings import Settings, allow, check, read_yaml
from mhla_diffusers.training.optimizer import make_optimizer

_STARTED = "training.json"


COUNT, ZERO_OR_MORE = allow(at_least=1), allow(at_least=0)
_RATE = allow(above=0, example="1e-3")


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """How a model is trained.

    Raises:
        ValueError: an unknown precision, no seed, or numbers that are not allowed.
    """

    steps: int = field(metadata=COUNT)
    """Optimizer steps."""
    batch_size: int = field(metadata=COUNT)
    """Rows or pictures per batch and process."""
    accumulate: int = field(default=1, metadata=COUNT)
    """Batches of an optimizer step."""
    learning_rate: float = field(metadata=_RATE)
    """Peak value; rises during warm-up and decays by a cosine to 0."""
    mixing_learning_rate: float | None = field(default=None, metadata=_RATE)
    """For mixing matrices and λ; None for ``learning_rate``."""
    weight_decay: float = field(default=0.01, metadata=ZERO_OR_MORE)
    """For matrices; norms, biases, positions and MHLA's own parameters except projections do not decay."""
    clip: float = field(default=1.0, metadata=ZERO_OR_MORE)
    """Maximum gradient norm; 0 for no clipping."""
    warmup: int = field(default=0, metadata=ZERO_OR_MORE)
    """Steps of learning rate warm-up, at most a tenth of all; a shorter adaptation uses a tenth of its own."""
    seeds: tuple[int, ...] = field(default=(0,), metadata=allow(is_filled=True))
    precision: Literal["no", "bf16", "fp16"] = field(default="no", metadata=allow(convert=precision_name))
    """Also float32, bfloat16 and float16, stored as the former."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.steps // 10
        check(self.warmup <= most, f"warmup={self.warmup} is more than a tenth of steps={self.steps}; allowed: {most}.")

    @classmethod
    def from_yaml(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a file, with ``key=value`` overrides."""
        return read_yaml(cls, read_text(path), path, overrides)


class Watch(TrainerCallback, ExportableState):
    """Writes steps and loss to stderr, and counts CPU seconds, which checkpoints store."""

    def __init__(self) -> None:
        self._before = 0.0
        self._begin = time.process_time()

    @property
    def seconds(self) -> float:
        """CPU seconds of this process, plus those of the checkpoint that it resumed from."""
        return self._before + time.process_time() - self._begin

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the seconds when training resumes from a checkpoint."""
        if state.global_step:
            self._before = state.stateful_callbacks[type(self).__name__]["attributes"]["seconds"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Write the progress; Trainer's last log has no loss."""
        if state.is_world_process_zero and "loss" in logs:
            sys.stderr.write(f"{state.global_step} of {state.max_steps} steps, loss {float(logs['loss']):.4f}\n")


def run_trainer(
    model: Any,
    recipe: Recipe,
    data: Any,
    *,
    seed: int,
    steps: int | None = None,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    workers: int = 0,
    save_every: int = 500,
    output: Path | None = None,
) -> float:
    """Train a model in place, from the last checkpoint in the output folder if there is one, and put it in eval mode.

    Args:
        model: of transformers, patched or not.
        recipe: of the training.
        data: data set of torch.
        seed: of the order of the data.
        steps: of the optimizer; None for the recipe's.
        collate: makes a batch; None for Trainer's default.
        loss: function of outputs, labels and number of labels in a step (``compute_loss_func``); None for the model's
            own.
        workers: processes that read data.
        save_every: steps between two checkpoints.
        output: folder of transformers' checkpoints, which keeps the last two; None for no checkpoints.

    Returns:
        CPU seconds of the training, including those before the checkpoint.

    Raises:
        ValueError: several GPUs without a launcher.
    """
    steps = recipe.steps if steps is None else steps
    optimizer = make_optimizer(
        model,
        {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad},
        learning_rate=recipe.learning_rate,
        mixing_learning_rate=recipe.mixing_learning_rate,
        weight_decay=recipe.weight_decay,
        matrices_alone=True,
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as aside:
        arguments = TrainingArguments(
            output_dir=str(output or aside),
            use_cpu=launched_on_cpus(),
            max_steps=steps,
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.accumulate,
            lr_scheduler_type="cosine",
            warmup_steps=min(recipe.warmup, steps // 10),
            max_grad_norm=recipe.clip,
            seed=seed,
            data_seed=seed,
            bf16=recipe.precision == "bf16",
            fp16=recipe.precision == "fp16",
            save_strategy="no" if output is None else "steps",
            save_steps=save_every,
            save_total_limit=2,
            logging_steps=100,
            report_to="none",
            dataloader_num_workers=workers,
            dataloader_pin_memory=torch.cuda.is_available(),
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        check(
            arguments.n_gpu <= 1,
            f"One process sees {arguments.n_gpu} GPUs, over which Trainer would split every batch with "
            "nn.DataParallel, with another batch size and loss. Start a process for each: accelerate launch …; or "
            "make one visible: CUDA_VISIBLE_DEVICES=0 …",
        )
        trainer = Trainer(
            model,
            arguments,
            data_collator=collate,
            train_dataset=data,
            compute_loss_func=loss,
            optimizers=(optimizer, None),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        # Trainer writes trainer_state.json last, so a checkpoint with it is complete
        whole = [file.parent for file in Path(output or aside).glob("checkpoint-*/trainer_state.json")]
        last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    model.eval()
    return watch.seconds


def save_result(model: Any, folder: Path, beside: Mapping[str, Any] | None = None) -> Path:
    """Save a model of transformers; for a patched one the patch with all weights, and ``config.json``.

    Only the first process writes. The folder is complete or absent, and replaces an earlier one.

    Args:
        model: patched or not.
        folder: where to.
        beside: name → content of JSON files beside the model.

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
        for name, content in (beside or {}).items():
            write_json(content, aside / name)

    if PartialState().is_main_process:
        write_whole_folder(folder, write)
    return folder


def settings_of(recipe: Recipe, leave_out: Sequence[str] = ("seeds",)) -> dict[str, Any]:
    """A configuration as JSON, without settings that do not affect the result."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return {name: value for name, value in settings.items() if name not in leave_out}


def settings_of_one(recipe: Recipe, variant: Any, leave_out: Sequence[str]) -> dict[str, Any]:
    """Settings that the result of one training depends on: the rows of a step, not how they are split."""
    rows = recipe.batch_size * recipe.accumulate * launched_processes()
    settings = settings_of(recipe, ("seeds", "variants", "batch_size", "accumulate", *leave_out))
    return settings | {"variant": variant, "seed": recipe.seeds[0], "rows_of_a_step": rows}


def _check_same(found: Mapping[str, Any], settings: Mapping[str, Any], place: Path) -> None:
    others = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    check(
        not others,
        f"{place} belongs to another configuration, which differs in {', '.join(others)}; give another output folder, "
        "or delete it to train again.",
    )


def check_started(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless a folder has no checkpoints, or those of the same settings."""
    started = folder / _STARTED
    if started.is_file():
        _check_same(read_json(started), settings, folder)
    else:
        check(
            not any(folder.glob("checkpoint-*")),
            f"{folder} has checkpoints but no {_STARTED} with their settings; give another output folder.",
        )


def start(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record what is trained in a folder; raises as :func:`check_started`."""
    check_started(folder, settings)
    write_json(settings, folder / _STARTED)


@dataclass(frozen=True)
class Part:
    """One training of a comparison.

    Args:
        file: JSON file of the result; checkpoints are in the folder of the same name.
        settings: what the result depends on, as JSON.
        run: returns the result, given a folder for checkpoints, which is deleted once the result is written.
    """

    file: Path
    settings: Mapping[str, Any]
    run: Callable[[Path], dict[str, Any]]


def results_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The result of every part: finished ones are read, the others run one after the other.

    A stopped part resumes from its last checkpoint.

    Raises:
        ValueError: a file or checkpoints belong to another configuration; nothing is run then.
    """
    for part in parts:
        if part.file.is_file():
            _check_same(read_json(part.file).get("config", {}), part.settings, part.file)
        else:
            check_started(part.file.with_suffix(""), part.settings)
    for number, part in enumerate(parts, start=1):
        checkpoints = part.file.with_suffix("")
        if not part.file.is_file():
            sys.stderr.write(f"{number} of {len(parts)}: {part.file.stem}\n")
            start(checkpoints, part.settings)
            write_json(part.run(checkpoints) | {"config": dict(part.settings)}, part.file)
        _remove(checkpoints)
    return [read_json(part.file) for part in parts]


def _remove(folder: Path) -> None:
    """Remove what a training wrote into its folder, and the folder if nothing else is in it."""
    if not (folder / _STARTED).is_file():
        return
    for made in (*folder.glob("checkpoint-*"), folder / "result"):
        shutil.rmtree(made, ignore_errors=True)
    (folder / _STARTED).unlink()
    with suppress(OSError):  # not empty
        folder.rmdir()


def file_name_of(name: str) -> str:
    """Lower-case letters, digits and hyphens, with "plus" for a plus sign."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("+", "plus")).strip("-")


def check_file_names(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Raise ValueError unless these names give file names that are distinct and not taken."""
    owners = {file: f"the file {file!r}" for file in taken}
    for name in names:
        file = file_name_of(name)
        check(bool(file), f"{name!r} has no letter or digit to name a file by; give it a name that has.")
        check(file not in owners, f"{name!r} and {owners.get(file)} would both be written as {file!r}; rename one.")
        owners[file] = repr(name)
