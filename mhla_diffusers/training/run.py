"""A training run: what all of its stages share, and what it does between two updates."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ..attention.blocks import check_layout
from ..config import MHLAConfig, check
from ..devices import launched_on_cpus, launched_processes
from ..families import get_family
from ..patching import mhla_layers
from .calibration import calibrate_fresh
from .config import TrainingConfig
from .latents.data import NoisedBatches, TrainingData
from .latents.times import frames_together
from .objectives import Objectives
from .run_folder import CheckpointError, RunFolder, RunState, Tensors, load_checkpoint
from .sharding import gathered, meta_copy, own_part, placed_like, shard, sharding_is_asked_for
from .splitting import Groups, check_splits, split
from .stage import StageTraining, Update, optimizer_class
from .teacher import Teacher
from .trainable import add_adapters, changed_names, make_trainable
from .validation import Sampler, ValidationLoss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """How a run begins, as far as the settings alone tell."""

    folder: RunFolder
    checkpoint: Path | None
    """To resume from; None for a new run."""
    sharded: bool
    """Whether FSDP2 is asked for."""

    @classmethod
    def of(cls, config: TrainingConfig, resume: str | None) -> "Start":
        """Check what needs neither the model nor the data.

        Raises:
            ValueError: a new run where there is one, a way of sharding that is not supported, or processes that are
                not whole groups of ``context_parallel``.
            FileNotFoundError: no checkpoint to resume from.
            ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``.
        """
        folder = RunFolder(config.output)
        checkpoint = folder.find(resume)
        sharded = sharding_is_asked_for(config)
        optimizer_class(config.optimizer)
        Groups.of(config.context_parallel, 0, launched_processes())
        return cls(folder, checkpoint, sharded)


def check_fits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise unless transformer, data and configuration belong together; values are not looked at.

    Raises:
        ValueError: patched or not, against the configuration; wrong number of channels or axes; fewer tokens than
            blocks on an axis, or no more than a uniform block holds; or what :func:`frames_together` and
            :func:`check_splits` raise.
    """
    layers = mhla_layers(transformer)
    if layers and config.patch is None:
        raise ValueError("The transformer is patched, but the configuration says patch: null; set patch to its patch.")
    if not layers and config.patch is not None:
        raise ValueError(f"The configuration has patch={config.patch!r}, but the transformer is not patched.")
    frames_together(transformer)  # raises where it cannot be trained
    family = get_family(transformer)
    channels, axes = family.channels(transformer.config), 4 if family.makes_videos else 3
    for shape in sorted(set(data.shapes)):
        if len(shape) != axes or shape[0] != channels:
            raise ValueError(
                f"The data holds latents of shape {shape}, but {type(transformer).__name__} takes {channels} channels "
                f"and {axes - 1} further axes. Was the data encoded for another model?"
            )
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        for layer in layers.values():
            layer.config.check_whole(grid)
            check_layout(grid, layer.config.blocks_on(grid), is_causal=layer.config.causal is not None)
            _check_blocks(math.prod(grid), layer.config)
    check_splits(transformer, data, config)


def _check_blocks(tokens: int, config: MHLAConfig) -> None:
    check(
        config.sparse != "content" or tokens > config.block_size,
        f"block_size={config.block_size} makes one block of the {tokens} tokens of a sample, which every query lists: "
        "that is softmax attention, and nothing of the patch would be trained. Choose a smaller block_size, or "
        "sparse='none'.",
    )


class Run:
    """A run from its first or its resumed update on.

    Args:
        transformer: with its original weights, patched where the configuration has a patch.
        data: samples; the last ``config.validation.samples`` are held out.
        config: settings.
        start: of the same settings.
        sampler: called at every validation with the transformer and a folder to generate into.

    Raises:
        ValueError: a tracker that is not installed, processes that do not find each other, or a checkpoint that is
            damaged or of another run.
    """

    def __init__(
        self,
        transformer: nn.Module,
        data: TrainingData,
        config: TrainingConfig,
        start: Start,
        sampler: Sampler | None,
    ) -> None:
        self.config = config
        self.folder = start.folder
        self.accelerator = _make_accelerator(config)
        # a process that was started without a launcher has nobody to share with
        self.sharded = start.sharded and torch.distributed.is_initialized()
        # whole weights may not fit on the device, so sharding brings them there part by part
        self.transformer: Any = transformer if self.sharded else transformer.to(self.accelerator.device)
        self.process = get_family(transformer).process(transformer, config.flow_shift)
        self.groups = Groups.of(config.context_parallel, self.accelerator.process_index, self.accelerator.num_processes)
        # the processes of a group get the same batches, each with its noise and time
        self._place = (self.groups.rank, self.groups.count)
        together = frames_together(transformer)
        self.batches = NoisedBatches(data, self.process, config, self.accelerator.device, *self._place, together)
        self.state = RunState(
            step=0,
            skipped_in_row=0,
            samples_per_update=config.batch_size * config.gradient_accumulation * self.groups.count,
            training_samples=self.batches.training_samples,
            config=config.to_dict(),
        )
        # a model to be sharded is still on the CPU, where it would take too long; it begins with λ and β as they are
        if start.checkpoint is None and not self.sharded:
            calibrate_fresh(transformer, data, self.process, config)
        self._validation = ValidationLoss(data, self.process, config)
        self._validation_loss: float | None = None
        self._sampler = sampler
        self._prepare_transformer()
        self._loaded: dict[str, Tensors] = {}
        if start.checkpoint is not None:
            self._load(start.checkpoint)

    def _prepare_transformer(self) -> None:
        config = self.config
        for stage in config.stages:
            if stage.lora_rank is not None:
                add_adapters(self.transformer, stage.lora_rank, config.seed)
        self._changed = changed_names(self.transformer, config.stages)
        self.transformer.train()
        get_family(self.transformer).prepare_for_training(self.transformer)
        if config.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if self.sharded:
            self._unsharded = meta_copy(self.transformer)
            make_trainable(self.transformer, self._changed)
            shard(self.transformer, self.accelerator.device, self.accelerator.num_processes)
        if self.groups.size > 1:  # after the calibration, which takes whole attentions
            split(self.transformer, config.context_parallel, self.accelerator.device, self.groups)
        self._teacher = Teacher(self.transformer, self._changed) if config.needs_teacher else None

    def _load(self, checkpoint: Path) -> None:
        saved, self._loaded = load_checkpoint(checkpoint)
        # settings that are younger than the checkpoint have their defaults there
        saved = replace(saved, config=TrainingConfig.from_dict(saved.config).to_dict())
        self.state.check_same_run(saved, checkpoint)
        self.state = replace(self.state, step=saved.step, skipped_in_row=saved.skipped_in_row)
        parameters = dict(self.transformer.named_parameters())
        with torch.no_grad():
            for name, value in self._loaded["weights"].items():
                if self.sharded:
                    parameters[name].copy_(placed_like(value, parameters[name]))
                else:  # frozen so far, perhaps in bfloat16, while the trained values are float32
                    parameters[name].data = value.to(parameters[name].device)
        logger.info("Resuming from %s.", checkpoint)

    @property
    def step(self) -> int:
        """Updates done, over all stages."""
        return self.state.step

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many updates, and after the last one, happens now."""
        return self.step % every == 0 or self.step == self.config.total_steps

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the context metrics and progress are recorded."""
        from tqdm.auto import tqdm

        first = self.accelerator.is_main_process
        if first:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.keep_metrics_until(self.step)
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("mhla")
        self._progress = tqdm(
            total=self.config.total_steps, initial=self.step, unit="step", dynamic_ncols=True, disable=not first
        )
        try:
            with self._progress:
                yield
        finally:
            self.accelerator.end_training()

    @contextmanager
    def stage(self, index: int) -> Iterator[StageTraining]:
        """Within the context a stage is trained, from where an earlier run left it."""
        stage = self.config.stages[index]
        first_step = self.step - (self.config.end_of(index) - stage.steps)
        objectives = Objectives(
            stage.objectives,
            self.process,
            self.transformer,
            self._teacher,
            self.accelerator.autocast,
            self.groups.size,
            self.sharded,
        )
        training = StageTraining(self.accelerator, objectives, self.config, stage, first_step)
        if first_step > 0:
            training.load_state(self._loaded)
        self._loaded = {}
        try:
            yield training
        finally:
            training.close()

    def record(self, update: Update, stage: int) -> None:
        """Count an update and write down what came of it.

        Raises:
            TrainingDivergedError: too many were skipped in a row.
        """
        skipped = self.state.skipped_in_row + 1 if update.skipped else 0
        self.state = replace(self.state, step=self.step + 1, skipped_in_row=skipped)
        if update.skipped:
            numbers = (self.step, update.losses["loss"], update.gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        self.folder.check_in_between(self.state, self.config.max_skipped)
        if not self.accelerator.is_main_process:
            return
        rate, speed = update.learning_rate, update.tokens_per_second
        values = {**update.losses, "gradient_norm": update.gradient_norm, "learning_rate": rate}
        self.folder.add_metrics({"step": self.step, "stage": stage, **values, "skipped": update.skipped})
        self.accelerator.log({**values, "tokens_per_second": speed}, step=self.step)
        self._progress.update(self.step - self._progress.n)
        self._progress.set_postfix(loss=f"{update.losses['loss']:.4g}", lr=f"{rate:.3g}", tokens_per_s=f"{speed:.3g}")

    def validate(self, training: StageTraining) -> None:
        """Measure the loss on held-out samples and generate samples, as far as the settings ask for either."""
        with training.averaged_weights(), self.accelerator.autocast():
            if self.config.validation.samples:
                self._measure_validation_loss(training)
            if self._sampler is not None:
                self._sample(self._sampler)
        self.accelerator.wait_for_everyone()

    def _measure_validation_loss(self, training: StageTraining) -> None:
        total = self._validation.sum_over_samples(training.model, self.accelerator.device, *self._place)
        # the processes of a group have the same losses
        summed = float(self.accelerator.reduce(total, reduction="sum")) / self.groups.size
        loss = summed / self.config.validation.samples
        self._validation_loss = loss
        if self.accelerator.is_main_process:
            self.folder.add_metrics({"step": self.step, "validation_loss": loss})
            self.accelerator.log({"validation_loss": loss}, step=self.step)
        logger.info("Validation loss %.5f after step %d.", loss, self.step)

    def _sample(self, sampler: Sampler) -> None:
        if self.accelerator.is_main_process:
            sampler(self.transformer, self.folder.path / "samples" / f"step-{self.step:08d}")
        elif self.sharded or self.groups.size > 1:  # the first process needs the others' weights or tokens
            with TemporaryDirectory() as folder:
                sampler(self.transformer, Path(folder))

    def check_end(self, training: StageTraining) -> None:
        """Raise unless the run has ended with a model of which nothing bad is known.

        Raises:
            TrainingDivergedError: something is not finite.
        """
        parameters = dict(self.transformer.named_parameters())
        with training.averaged_weights():
            finite = torch.stack([own_part(parameters[name]).isfinite().all() for name in self._changed]).all()
        broken = float(self.accelerator.reduce((~finite).float(), reduction="sum"))
        self.folder.check_end(self.state, broken == 0, self._validation_loss)

    def save(self, training: StageTraining, must_succeed: bool) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: it could not be written and must be; else that is logged.
        """
        tensors: dict[str, Tensors] = {}
        if self.accelerator.is_main_process or training.in_parts:
            parameters = dict(self.transformer.named_parameters())
            tensors = {"weights": {name: gathered(parameters[name]) for name in self._changed}, **training.state()}
        if self.accelerator.is_main_process:
            try:
                self.folder.save(self.state, tensors, self.config.keep_checkpoints)
            except CheckpointError as error:
                if must_succeed:
                    raise
                logger.error("%s Training goes on; the earlier checkpoints are kept.", error)
        self.accelerator.wait_for_everyone()

    def export(self, training: StageTraining) -> Path:
        """Write the result and return its folder.

        Raises:
            CheckpointError: it could not be written.
        """
        with training.averaged_weights():
            transformer = self._whole_transformer()
            if self.accelerator.is_main_process:
                self.folder.export(transformer, self.config)
        self.accelerator.wait_for_everyone()
        return self.folder.result

    def _whole_transformer(self) -> Any:
        """The transformer with all its weights, on the first process."""
        if not self.sharded:
            return self.transformer
        state = {name: gathered(tensor) for name, tensor in self.transformer.state_dict().items()}
        if self.accelerator.is_main_process:
            self._unsharded.load_state_dict(state, assign=True)
        return self._unsharded


def _make_accelerator(config: TrainingConfig) -> Any:
    """An ``Accelerator`` for the settings; where it runs is up to the launcher.

    Raises:
        ValueError: if the tracker is not installed, or accelerate does not join the processes that were launched.
    """
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs, is_tensorboard_available, is_wandb_available

    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if config.tracker is not None and not available[config.tracker]():
        raise ValueError(
            f"tracker={config.tracker} is not installed: pip install {config.tracker}, or set tracker: null. "
            "metrics.jsonl holds the same numbers."
        )
    accelerator = Accelerator(
        cpu=launched_on_cpus(),
        gradient_accumulation_steps=config.gradient_accumulation,
        mixed_precision=config.precision,
        log_with=config.tracker,
        project_dir=config.output,
        # a cache would hold a bfloat16 copy of all trained weights through the forward, where each is used once
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
    if accelerator.num_processes != launched_processes():
        raise ValueError(
            f"WORLD_SIZE says that {launched_processes()} processes were launched, but accelerate has joined "
            f"{accelerator.num_processes}, and each would train by itself into {config.output}. Start them with "
            "accelerate launch finetune/adapt.py …, or unset WORLD_SIZE to train with one process."
        )
    return accelerator
