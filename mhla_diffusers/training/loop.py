"""The training loop."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ..families import get_family
from ..patching import mhla_layers
from .latents.batches import NoisedBatches, ValidationLoss
from .checks import check_data_fits
from .config import StageConfig, TrainingConfig
from .latents.data import TrainingData
from ..families.processes import NoisedBatch
from .divergence import check_end, check_in_between
from .export import export_result
from .folders import CheckpointError, RunFolder, RunState, Tensors, load_checkpoint
from .interruption import StopRequest
from .sharding import gathered, meta_copy, own_part, placed_like, shard, sharding_is_asked_for
from .stage import StageTraining, Update
from .teacher import Teacher
from .trainable import add_adapters, changed_names, make_trainable
from .updates import AcceleratedUpdates, Updates
from .zero import ZeroUpdates, hidden_from_accelerate, zero_is_asked_for

logger = logging.getLogger(__name__)

Sampler = Callable[[nn.Module, Path], None]
"""Generates with the transformer into a folder."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    """Updates done."""
    finished: bool
    """False if SIGTERM stopped it; then its last checkpoint is of ``step``."""
    result: Path | None
    """Folder with the trained weights; None while unfinished."""


def train(
    transformer: nn.Module,
    data: TrainingData,
    config: TrainingConfig,
    *,
    resume: str | None = None,
    sampler: Sampler | None = None,
) -> TrainingResult:
    """Train a transformer, patched or not, through all stages.

    Settings of ``config`` that say what to load (``model``, ``patch``, ``data``) are not read here: transformer and
    data are those given. The transformer is trained in place; with FSDP2 it is left in parts over the processes.

    Args:
        transformer: with its original weights, patched where the configuration has a patch.
        data: samples; the last ``config.validation.samples`` are held out.
        config: settings.
        resume: "latest" or the path of a checkpoint; None for a new run.
        sampler: called at every validation with the transformer and a folder to generate into.

    Raises:
        ValueError: settings, data, transformer and the checkpoint to resume from do not fit each other, or a way of
            sharding that is not supported.
        FileNotFoundError: no checkpoint to resume from.
        ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``, or DeepSpeed where accelerate is to use it.
        TrainingDivergedError: more than ``config.max_skipped`` updates in a row were skipped, or the run ended with
            skipped updates, weights or a validation loss that are not finite; then there is no result.
        CheckpointError: the last checkpoint or the result could not be written.
    """
    if mhla_layers(transformer) and config.patch is None:
        raise ValueError("The transformer is patched, but the configuration says patch: null; set patch to its patch.")
    if not mhla_layers(transformer) and config.patch is not None:
        raise ValueError(f"The configuration has patch={config.patch!r}, but the transformer is not patched.")
    check_data_fits(transformer, data)
    return _Run(transformer, data, config, resume, sampler).train()


class _Run:
    """A run: what all stages share."""

    def __init__(
        self,
        transformer: nn.Module,
        data: TrainingData,
        config: TrainingConfig,
        resume: str | None,
        sampler: Sampler | None,
    ) -> None:
        self.config = config
        self.folder = RunFolder(config.output)
        checkpoint = self.folder.find(resume)
        sharded, zero = sharding_is_asked_for(config), zero_is_asked_for(config)
        with hidden_from_accelerate():
            self.accelerator = make_accelerator(config)
        # a process that was started without a launcher has nobody to share with
        launched = torch.distributed.is_initialized()
        self.sharded = sharded and launched
        self.make_updates: type[Updates] = ZeroUpdates if zero and launched else AcceleratedUpdates
        # whole weights may not fit on the device, so sharding brings them there part by part
        self.transformer: Any = transformer if self.sharded else transformer.to(self.accelerator.device)
        self.sampler = sampler
        self.process = get_family(transformer).process(transformer, config.flow_shift)
        place = (self.accelerator.process_index, self.accelerator.num_processes)
        self.batches = NoisedBatches(data, self.process, config, self.accelerator.device, *place)
        self.validation = ValidationLoss(data, self.process, config)
        self.state = RunState(
            step=0,
            skipped_in_row=0,
            samples_per_update=config.batch_size * config.gradient_accumulation * self.accelerator.num_processes,
            training_samples=self.batches.training_samples,
            config=config.to_dict(),
        )
        self._prepare_transformer()
        self.loaded: dict[str, Tensors] = {}
        if checkpoint is not None:
            self._load(checkpoint)
        self.stop = StopRequest()
        self.tokens = 0
        self.validation_loss: float | None = None

    def _prepare_transformer(self) -> None:
        stages = self.config.stages
        for stage in stages:
            if stage.lora_rank is not None:
                add_adapters(self.transformer, stage.lora_rank, self.config.seed)
        self.changed = changed_names(self.transformer, stages)
        # DiT's own label dropout draws numbers that would differ between processes; prompt_dropout replaces it
        self.transformer.train()
        for module in self.transformer.modules():
            if type(module).__name__ == "LabelEmbedding":
                module.eval()
        if self.config.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if self.sharded:
            self.unsharded = meta_copy(self.transformer)
            make_trainable(self.transformer, self.changed)
            shard(self.transformer, self.accelerator.device, self.accelerator.num_processes)
        needs_teacher = any(stage.objectives.need_teacher for stage in stages)
        self.teacher = Teacher(self.transformer, self.changed) if needs_teacher else None

    def _load(self, checkpoint: Path) -> None:
        saved, self.loaded = load_checkpoint(checkpoint)
        # settings that are younger than the checkpoint have their defaults there
        saved = replace(saved, config=TrainingConfig.from_dict(saved.config).to_dict())
        self.state.check_same_run(saved, checkpoint)
        self.state = RunState(**{**vars(self.state), "step": saved.step, "skipped_in_row": saved.skipped_in_row})
        parameters = dict(self.transformer.named_parameters())
        with torch.no_grad():
            for name, value in self.loaded["weights"].items():
                if self.sharded:
                    parameters[name].copy_(placed_like(value, parameters[name]))
                else:  # frozen so far, perhaps in bfloat16, while the trained values are float32
                    parameters[name].data = value.to(parameters[name].device)
        logger.info("Resuming from %s.", checkpoint)

    def train(self) -> TrainingResult:
        """Run the stages that are left."""
        if self.accelerator.is_main_process:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.keep_metrics_until(self.state.step)
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("mhla")
        try:
            with self.stop.listening(), self._progress() as progress:
                result = self._stages(progress)
        finally:
            self.accelerator.end_training()
        return TrainingResult(self.state.step, result is not None, result)

    def _stages(self, progress: Any) -> Path | None:
        end = 0
        for index, stage in enumerate(self.config.stages):
            first, end = end, end + stage.steps
            last = index == len(self.config.stages) - 1
            if self.state.step >= end and not last:
                continue
            training = self._begin(stage, self.state.step - first)
            try:
                if not self._steps(training, index, end, progress):
                    return None
                if last:
                    return self._export(training)
            finally:
                training.close()
        return None

    def _begin(self, stage: StageConfig, first_step: int) -> StageTraining:
        training = StageTraining(
            self.accelerator,
            self.transformer,
            self.teacher,
            self.process,
            self.config,
            stage,
            first_step,
            self.make_updates,
        )
        if first_step > 0:
            training.load_state(self.loaded)
        self.loaded = {}
        return training

    def _steps(self, training: StageTraining, index: int, end: int, progress: Any) -> bool:
        """The updates of one stage; False if a stop was asked for."""
        if self.state.step == 0:
            self._validate(training)
        batches = self.batches.from_step(self.state.step)
        while self.state.step < end:
            rate = training.learning_rate
            started = time.perf_counter()
            update = training.update(_count_tokens(batches, self), self.stop.made)
            self._count(update)
            self._record(update, index, rate, time.perf_counter() - started, progress)
            if self._due(self.config.validation.every):
                self._validate(training)
            if self.state.step == self.config.total_steps:
                self._check_end(training)  # before a last checkpoint takes the place of a good one
            stage_is_over = self.state.step == end
            if update.stop or stage_is_over or self.state.step % self.config.checkpoint_every == 0:
                self._save(training, must_succeed=update.stop or stage_is_over)
            if update.stop and self.state.step != self.config.total_steps:
                logger.warning("Stopped by SIGTERM after step %d; resume with --resume latest.", self.state.step)
                return False
        return True

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.total_steps

    def _count(self, update: Update) -> None:
        skipped = self.state.skipped_in_row + 1 if update.skipped else 0
        self.state = RunState(**{**vars(self.state), "step": self.state.step + 1, "skipped_in_row": skipped})
        if skipped:
            numbers = (self.state.step, update.losses["loss"], update.gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        check_in_between(self.state, self.folder, self.config.max_skipped)

    def _record(self, update: Update, stage: int, rate: float, seconds: float, progress: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        values = {**update.losses, "gradient_norm": update.gradient_norm, "learning_rate": rate}
        self._write_metrics({"step": self.state.step, "stage": stage, **values, "skipped": update.skipped})
        speed = self.tokens * self.accelerator.num_processes / seconds
        self.tokens = 0
        self.accelerator.log({**values, "tokens_per_second": speed}, step=self.state.step)
        progress.update(self.state.step - progress.n)
        progress.set_postfix(loss=f"{update.losses['loss']:.4g}", lr=f"{rate:.3g}", tokens_per_s=f"{speed:.3g}")

    def _write_metrics(self, record: dict[str, Any]) -> None:
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _validate(self, training: StageTraining) -> None:
        with training.averaged_weights(), self.accelerator.autocast():
            if self.config.validation.samples:
                self._record_validation(training)
            if self.sampler is not None:
                self._sample(self.sampler)
        self.accelerator.wait_for_everyone()

    def _sample(self, sampler: Sampler) -> None:
        if self.accelerator.is_main_process:
            sampler(self.transformer, self.folder.path / "samples" / f"step-{self.state.step:08d}")
        elif self.sharded:  # the first process needs the others' weights, so all generate
            with TemporaryDirectory() as folder:
                sampler(self.transformer, Path(folder))

    def _record_validation(self, training: StageTraining) -> None:
        place = (self.accelerator.process_index, self.accelerator.num_processes)
        total = self.validation.sum_over_samples(training.model, self.accelerator.device, *place)
        loss = float(self.accelerator.reduce(total, reduction="sum")) / self.config.validation.samples
        self.validation_loss = loss
        if self.accelerator.is_main_process:
            self._write_metrics({"step": self.state.step, "validation_loss": loss})
            self.accelerator.log({"validation_loss": loss}, step=self.state.step)
        logger.info("Validation loss %.5f after step %d.", loss, self.state.step)

    def _check_end(self, training: StageTraining) -> None:
        parameters = dict(self.transformer.named_parameters())
        with training.averaged_weights():
            finite = torch.stack([own_part(parameters[name]).isfinite().all() for name in self.changed]).all()
        broken = float(self.accelerator.reduce((~finite).float(), reduction="sum"))
        check_end(self.state, self.folder, broken == 0, self.validation_loss)

    def _save(self, training: StageTraining, must_succeed: bool) -> None:
        tensors: dict[str, Tensors] = {}
        if self.accelerator.is_main_process or training.in_parts:
            parameters = dict(self.transformer.named_parameters())
            tensors = {"weights": {name: gathered(parameters[name]) for name in self.changed}, **training.state()}
        if self.accelerator.is_main_process:
            try:
                self.folder.save(self.state, tensors, self.config.keep_checkpoints)
            except CheckpointError as error:
                if must_succeed:
                    raise
                logger.error("%s Training goes on; the earlier checkpoints are kept.", error)
        self.accelerator.wait_for_everyone()

    def _export(self, training: StageTraining) -> Path:
        folder = self.folder.path / "result"
        with training.averaged_weights():
            transformer = self._whole_transformer()
            if self.accelerator.is_main_process:
                export_result(transformer, self.config, folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _whole_transformer(self) -> Any:
        """The transformer with all its weights, on the first process."""
        if not self.sharded:
            return self.transformer
        state = {name: gathered(tensor) for name, tensor in self.transformer.state_dict().items()}
        if self.accelerator.is_main_process:
            self.unsharded.load_state_dict(state, assign=True)
        return self.unsharded

    def _progress(self) -> Any:
        from tqdm.auto import tqdm

        return tqdm(
            total=self.config.total_steps,
            initial=self.state.step,
            unit="step",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
        )


def _count_tokens(batches: Iterator[NoisedBatch], run: _Run) -> Iterator[NoisedBatch]:
    for batch in batches:
        grid = get_family(run.transformer).token_grid(run.transformer, batch.hidden_states)
        run.tokens += len(batch.latents) * torch.Size(grid).numel()
        yield batch


def make_accelerator(config: TrainingConfig) -> Any:
    """An ``Accelerator`` for the settings; where it runs is up to ``accelerate launch``.

    Raises:
        ValueError: if the tracker is not installed.
    """
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs, is_tensorboard_available, is_wandb_available

    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if config.tracker is not None and not available[config.tracker]():
        raise ValueError(
            f"tracker={config.tracker} is not installed: pip install {config.tracker}, or set tracker: null. "
            "metrics.jsonl holds the same numbers."
        )
    return Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation,
        mixed_precision=config.precision,
        log_with=config.tracker,
        project_dir=config.output,
        # a cache would hold a bfloat16 copy of all trained weights through the forward, where each is used once
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
