"""The training loop: runs all stages, from the first update to the result."""

import logging
import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..devices import launched_on_cpus, launched_processes
from ..families import NoisedBatch, get_family
from .checks import check_enough, check_few_steps, check_fits, check_start
from .config import StageConfig, TrainingConfig
from .critic import make_critic
from .distributed import Groups, gathered, meta_copy, placed_like, shard, sharding_is_asked_for, split
from .few_steps import FewStepObjective
from .latents.data import NoisedBatches, TrainingData
from .latents.times import frames_together
from .objectives import Objective, Objectives, Place
from .optimizer import load_optimizer_state, make_optimizer, make_schedule, optimizer_class, optimizer_state
from .run_folder import CheckpointError, RunFolder, RunState, Tensors, TrainingDivergedError, load_checkpoint
from .teacher import Teacher
from .trainable import add_adapters, changed_names, make_trainable, trainable_names
from .validation import HeldOut, Sampler, calibrate_fresh

logger = logging.getLogger(__name__)

_SAME_CTRL_C = 1.0
"""Seconds within which a second SIGINT counts as the first, because launchers forward Ctrl-C to processes that already
got it.
"""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    """Updates done."""
    finished: bool
    """False if SIGTERM or Ctrl-C stopped it; its last checkpoint is then at ``step``."""
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

    ``model``, ``patch`` and ``data`` of ``config`` are not loaded here; the arguments are used. The transformer is
    trained in place; with FSDP2 it stays sharded over the processes.

    Args:
        transformer: with its original weights, patched if the configuration has a patch.
        data: samples; the last ``config.validation.samples`` are held out.
        config: settings.
        resume: "latest" or the path of a checkpoint; None for a new run.
        sampler: called at every validation with the transformer and a folder to generate into.

    Raises:
        ValueError: settings, data, transformer and the checkpoint do not fit each other, or the kind of sharding is not
            supported.
        FileNotFoundError: no checkpoint to resume from.
        ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``.
        TrainingDivergedError: more than ``config.max_skipped`` updates in a row were skipped, or the run ended with
            skipped updates or with non-finite weights or validation loss; no result is written.
        CheckpointError: the last checkpoint or the result could not be written.
        KeyboardInterrupt: a second Ctrl-C, before the checkpoint for the first was written.
    """
    checkpoint = check_start(config, resume)
    check_fits(transformer, data, config)
    check_enough(data, config)
    run = _Run(transformer, data, config, checkpoint, sampler)
    stop = _StopRequest()
    result = None
    with run.recording(), stop.listening():
        for stage in range(len(config.stages)):
            end, is_last = config.end_of(stage), stage == len(config.stages) - 1
            if run.step >= end and not is_last:
                continue  # done before the run was resumed
            with run.stage(stage):
                if run.step == 0:
                    run.validate()
                batches = run.batches.from_step(run.step, drops_prompts=config.stages[stage].few_steps is None)
                while run.step < end:
                    must_stop = run.update(batches, stop.made)
                    if run.step % config.validation.every == 0 or run.step == config.total_steps:
                        run.validate()
                    if run.step == config.total_steps:
                        run.check_end()  # before a last checkpoint replaces a good one
                    must_save = must_stop or run.step == end
                    if must_save or run.step % config.checkpoint_every == 0:
                        run.save(must_succeed=must_save)
                    if must_stop and run.step < config.total_steps:
                        logger.warning("Stopped by a signal after step %d; resume with --resume latest.", run.step)
                        return TrainingResult(run.step, finished=False, result=None)
                if is_last:
                    result = run.export()
    return TrainingResult(run.step, finished=True, result=result)


class _Run:
    """A new or resumed run: the state that all stages share, and the current stage."""

    def __init__(
        self,
        transformer: Any,
        data: TrainingData,
        config: TrainingConfig,
        checkpoint: Path | None,
        sampler: Sampler | None,
    ) -> None:
        self.config, self._data, self._sampler = config, data, sampler
        self._folder = RunFolder(config.output)
        self._accelerator = _make_accelerator(config)
        self._device: torch.device = self._accelerator.device
        self._is_first: bool = self._accelerator.is_main_process
        # a process without a launcher has nobody to share with
        self._sharded = sharding_is_asked_for(config) and torch.distributed.is_initialized()
        # whole weights may not fit on the device, so sharding moves them part by part
        self._transformer = transformer if self._sharded else transformer.to(self._device)
        self._family = get_family(transformer)
        self._process = self._family.process(transformer, config.flow_shift)
        processes, index = self._accelerator.num_processes, self._accelerator.process_index
        self._groups = groups = Groups.of(config.context_parallel, index, processes)
        # the processes of a group get the same batches, noise and times
        self.batches = NoisedBatches(
            data, self._process, config, self._device, groups.rank, groups.count, frames_together(transformer)
        )
        self._state = RunState(
            step=0,
            skipped_in_row=0,
            samples_per_update=config.batch_size * config.gradient_accumulation * groups.count,
            training_samples=self.batches.training_samples,
            config=config.to_dict(),
        )
        # a model to be sharded is still on the CPU, where this would take too long; it starts with λ and β unfitted
        if checkpoint is None and not self._sharded:
            calibrate_fresh(transformer, data, self._process, config)
        self._validation_loss: float | None = None

        for stage in config.stages:
            if stage.lora_rank is not None:
                add_adapters(transformer, stage.lora_rank, config.seed, stage.lora_layers)
        self._changed = changed_names(transformer, config.stages)
        transformer.train()
        self._family.prepare_for_training(transformer)
        if config.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        # the critic begins as the teacher, so both are made before the checkpoint's weights replace the original ones
        few_steps, last = config.few_steps, config.stages[-1]
        self._critic = make_critic(transformer, last, few_steps, config.seed) if few_steps is not None else None
        if self._sharded:
            self._unsharded = meta_copy(transformer)
            make_trainable(transformer, self._changed)
            shard(transformer, self._device, processes)
        if groups.size > 1:  # after calibration, which needs whole attentions
            split(transformer, config.context_parallel, self._device, groups)
        self._teacher = Teacher(transformer, self._changed) if config.needs_teacher else None
        self._loaded: dict[str, Tensors] = {}
        if checkpoint is not None:
            self._load(checkpoint)

    @property
    def step(self) -> int:
        """Updates done, over all stages."""
        return self._state.step

    def _load(self, checkpoint: Path) -> None:
        saved, self._loaded = load_checkpoint(checkpoint)
        # settings newer than the checkpoint get their defaults
        saved = replace(saved, config=TrainingConfig.from_dict(saved.config).to_dict())
        self._state.check_same_run(saved, checkpoint)
        self._state = replace(self._state, step=saved.step, skipped_in_row=saved.skipped_in_row)
        parameters = dict(self._transformer.named_parameters())
        with torch.no_grad():
            for name, value in self._loaded["weights"].items():
                if self._sharded:
                    parameters[name].copy_(placed_like(value, parameters[name]))
                else:  # frozen so far, perhaps in bfloat16, while the trained values are float32
                    parameters[name].data = value.to(parameters[name].device)
        logger.info("Resuming from %s.", checkpoint)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context metrics and progress are recorded."""
        from tqdm.auto import tqdm

        if self._is_first:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            self._folder.keep_metrics_until(self.step)
        self._accelerator.wait_for_everyone()
        self._accelerator.init_trackers("mhla")
        shown: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "disable": not self._is_first}
        self._progress = tqdm(total=self.config.total_steps, initial=self.step, **shown)
        try:
            with self._progress:
                yield
        finally:
            self._accelerator.end_training()

    @contextmanager
    def stage(self, index: int) -> Iterator[None]:
        """Context of one stage: in one process, under DistributedDataParallel, or with FSDP2."""
        from diffusers.training_utils import EMAModel

        config, stage, accelerator = self.config, self.config.stages[index], self._accelerator
        first_step = self.step - (config.end_of(index) - stage.steps)
        names = set(trainable_names(self._transformer, stage.trainable))
        critics = self._critic.parameters if self._critic is not None and stage.few_steps is not None else {}
        if not self._sharded:  # else everything that any stage trains already takes gradients
            make_trainable(self._transformer, names | critics.keys())
        self._stage = index
        self._trained = {name: p for name, p in self._transformer.named_parameters() if name in names}
        self._optimizer = make_optimizer(
            self._transformer,
            self._trained,
            learning_rate=stage.learning_rate,
            mixing_learning_rate=stage.mixing_learning_rate,
            weight_decay=config.weight_decay,
            kind=config.optimizer,
        )
        if self._sharded:
            self._model, self._prepared = self._transformer, accelerator.prepare_optimizer(self._optimizer)
        else:
            self._model, self._prepared = accelerator.prepare(self._transformer, self._optimizer)
        self._schedule = make_schedule(self._optimizer, stage, first_step)
        self._average = EMAModel(self._trained.values(), decay=config.ema_decay) if config.ema_decay else None
        self._objective: Objective
        if stage.objectives is not None:
            self._objective = Objectives(
                stage.objectives,
                self._process,
                self._transformer,
                self._teacher,
                accelerator.autocast,
                self._groups.size,
                self._sharded,
                stage.guidance,
                self._data.empty,
            )
        else:
            self._objective = self._prepare_few_steps(stage, critics, self.step - first_step)
        if first_step > 0:
            load_optimizer_state(self._optimizer, self._trained, self._loaded["optimizer"])
            if self._average is not None:
                average = self._loaded["ema"]
                self._average.shadow_params = [placed_like(average[name], p) for name, p in self._trained.items()]
                self._average.optimization_step = int(average["updates"])
            if critics:
                with torch.no_grad():
                    for name, value in self._loaded["critic"].items():
                        critics[name].copy_(value)
                load_optimizer_state(self._critic_optimizer, critics, self._loaded["critic_optimizer"])
        self._loaded = {}
        try:
            yield
        finally:  # free the optimizer and unwrap, so that another stage can begin
            accelerator.free_memory(self._prepared)
            if not self._sharded:
                accelerator.unwrap_model(self._model, keep_fp32_wrapper=False)

    def _prepare_few_steps(self, stage: StageConfig, critics: dict[str, nn.Parameter], begin: int) -> FewStepObjective:
        """The objective of a stage of few steps, and the optimizer of its critic."""
        settings, make = stage.few_steps, optimizer_class(self.config.optimizer)
        if settings is None or self._critic is None or self._teacher is None:
            raise ValueError("This stage has no few_steps.")
        for parameter in critics.values():
            parameter.requires_grad_(True)
        rate: Any = settings.critic_learning_rate or stage.learning_rate
        self._critic_optimizer = make(critics.values(), lr=rate, weight_decay=0.0)  # type: ignore[call-arg]
        return FewStepObjective(
            settings,
            check_few_steps(self._process, self._data, settings),
            self._transformer,
            self._teacher,
            self._critic,
            self._data.empty,
            self.config.seed,
            begin,
            self._accelerator.autocast,
        )

    def update(self, batches: Iterator[NoisedBatch], stop: bool) -> bool:
        """One recorded optimizer update; skipped, but still counted, if loss or gradient is not finite.

        Args:
            batches: the batch of every forward.
            stop: whether this process wants to stop; the return value says whether any does.
        """
        accelerator, objective = self._accelerator, self._objective
        started, tokens, rate = time.perf_counter(), 0, float(self._schedule.get_last_lr()[0])
        turn, critics = objective.is_models_turn(self.step), objective.critics
        totals: dict[str, torch.Tensor] = {}
        for forward in range(self.config.gradient_accumulation):
            batch = next(batches)
            grid = self._family.token_grid(self._transformer, batch.hidden_states)
            tokens += len(batch.latents) * math.prod(grid)
            with accelerator.accumulate(self._model):
                if self._sharded:
                    self._model.set_requires_gradient_sync(accelerator.sync_gradients)
                sample = (forward * self._groups.count + self._groups.rank) * self.config.batch_size
                losses = objective.backward(self._model, batch, Place(self.step, sample), accelerator.backward)
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0.0) + loss / self.config.gradient_accumulation
        stops = torch.tensor(float(stop), device=self._device)
        *means, wishes = accelerator.reduce(torch.stack([*totals.values(), stops]), reduction="mean").tolist()
        values = dict(zip(totals, means, strict=True))
        if not self._sharded and (critics or not self.config.stages[self._stage].needs_prediction):
            # attention transfer runs single layers, and few steps several models in one, which
            # DistributedDataParallel does not see
            for parameter in (*self._trained.values(), *critics.values()):
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")
        most = self.config.max_gradient_norm
        norms = [accelerator.clip_grad_norm_(part.values(), most) for part in (self._trained, critics) if part]
        gradient_norm, *critics_norm = (float(x.full_tensor() if isinstance(x, DTensor) else x) for x in norms)
        skipped = not all(math.isfinite(number) for number in (values["loss"], gradient_norm, *critics_norm))
        if not skipped and turn:
            self._prepared.step()
            if self._average is not None:
                self._average.step(self._trained.values())
        if not skipped and critics:
            self._critic_optimizer.step()
        self._transformer.zero_grad()
        for parameter in critics.values():
            parameter.grad = None
        with warnings.catch_warnings():  # in few steps the student is updated later, and after a skip too
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._schedule.step()

        if critics:
            values["critic_gradient_norm"] = critics_norm[0]
        if turn:
            values |= {"gradient_norm": gradient_norm, "learning_rate": rate}
        speed = tokens * self._groups.count / (time.perf_counter() - started)
        self._state = state = self._state.after_update(skipped)
        if skipped:
            numbers = (state.step, values["loss"], gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        if state.skipped_in_row > self.config.max_skipped:
            raise self._diverged(f"{state.skipped_in_row} updates in a row, up to step {state.step}, were skipped")
        if self._is_first:
            self._folder.add_metrics({"step": state.step, "stage": self._stage, **values, "skipped": skipped})
            accelerator.log({**values, "tokens_per_second": speed}, step=state.step)
            self._progress.update(state.step - self._progress.n)
            self._progress.set_postfix(loss=f"{values['loss']:.4g}", lr=f"{rate:.3g}", tokens_per_s=f"{speed:.3g}")
        return bool(wishes > 0)

    def validate(self) -> None:
        """Measure the loss on held-out samples and generate samples, if the settings ask for it."""
        with self._averaged_weights(), self._accelerator.autocast():
            if self.config.validation.samples:
                self._measure_validation_loss()
            if self._sampler is not None and self._is_first:
                self._sampler(self._transformer, self._folder.path / "samples" / f"step-{self.step:08d}")
            elif self._sampler is not None and (self._sharded or self._groups.size > 1):
                with TemporaryDirectory() as folder:  # the first process needs the others' weights or tokens
                    self._sampler(self._transformer, Path(folder))
        self._accelerator.wait_for_everyone()

    def _measure_validation_loss(self) -> None:
        groups = self._groups
        held_out = HeldOut(self._data, self.config, self._device, groups.rank, groups.count)
        total = self._objective.held_out_loss(self._model, held_out)
        # the processes of a group have the same losses
        summed = float(self._accelerator.reduce(total, reduction="sum")) / groups.size
        self._validation_loss = loss = summed / self.config.validation.samples
        if self._is_first:
            self._folder.add_metrics({"step": self.step, "validation_loss": loss})
            self._accelerator.log({"validation_loss": loss}, step=self.step)
        logger.info("Validation loss %.5f after step %d.", loss, self.step)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Within the context the model has the moving average of its weights, if there is one."""
        if self._average is None:
            yield
            return
        self._average.store(self._trained.values())
        self._average.copy_to(self._trained.values())
        try:
            yield
        finally:
            self._average.restore(self._trained.values())

    def check_end(self) -> None:
        """Raise if the final model may be bad.

        One skipped update is enough if it is the last one, because no later update shows that the weights still work.
        """
        parameters = dict(self._transformer.named_parameters())
        with self._averaged_weights():
            parts = [parameters[name] for name in self._changed]
            parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
            finite = torch.stack([part.isfinite().all() for part in parts]).all()
        broken = float(self._accelerator.reduce((~finite).float(), reduction="sum"))
        loss, skipped = self._validation_loss, self._state.skipped_in_row
        if skipped:
            raise self._diverged(f"all updates after step {self.step - skipped} were skipped")
        if broken:
            raise self._diverged(f"weights after step {self.step} are not finite")
        if loss is not None and not math.isfinite(loss):
            raise self._diverged(f"the validation loss after step {self.step} is {loss}")

    def _diverged(self, what: str) -> TrainingDivergedError:
        # an update that was not skipped shows that the weights before it worked, not those after it
        good = self._folder.last_before(self.step - self._state.skipped_in_row)
        from_there = (
            f"{good} is the last good checkpoint: if a sample of the data is at fault, fix it and resume from there "
            f"with --resume {good}."
            if good is not None
            else f"{self._folder.path} holds no good checkpoint."
        )
        return TrainingDivergedError(
            f"Training has diverged: {what}. Updates are skipped where loss or gradient is not finite. Lower the "
            f"learning rate or lengthen the warm-up, and start again in another output folder. {from_there}"
        )

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint; a failure raises if it is required, else it is logged."""
        if self._is_first or self._sharded:  # all processes must contribute sharded weights
            parameters = dict(self._transformer.named_parameters())
            tensors = {
                "weights": {name: gathered(parameters[name]) for name in self._changed},
                "optimizer": optimizer_state(self._optimizer, self._trained),
            }
            if self._average is not None:
                shadows = zip(self._trained, self._average.shadow_params, strict=True)
                tensors["ema"] = {name: gathered(shadow) for name, shadow in shadows}
                tensors["ema"]["updates"] = torch.tensor(self._average.optimization_step)
            if critics := self._objective.critics:
                tensors["critic"] = {name: gathered(x) for name, x in critics.items()}
                tensors["critic_optimizer"] = optimizer_state(self._critic_optimizer, critics)
        if self._is_first:
            try:
                self._folder.save(self._state, tensors, self.config.keep_checkpoints)
            except CheckpointError as error:
                if must_succeed:
                    raise
                logger.error("%s Training continues; the earlier checkpoints are kept.", error)
        self._accelerator.wait_for_everyone()

    def export(self) -> Path:
        """Write the result and return its folder."""
        with self._averaged_weights():
            whole = self._transformer
            if self._sharded:
                state = {name: gathered(tensor) for name, tensor in whole.state_dict().items()}
                whole = self._unsharded
                if self._is_first:
                    whole.load_state_dict(state, assign=True)
            if self._is_first:
                self._folder.export(whole, self.config)
        self._accelerator.wait_for_everyone()
        return self._folder.result


def _make_accelerator(config: TrainingConfig) -> Any:
    """An ``Accelerator`` for the settings; the launcher determines the devices."""
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
        # the cache would hold a bfloat16 copy of all trained weights, each of which is used once per forward
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
    if accelerator.num_processes != launched_processes():
        raise ValueError(
            f"WORLD_SIZE says that {launched_processes()} processes were launched, but accelerate has joined "
            f"{accelerator.num_processes}, so each would train separately into {config.output}. Start them with "
            "accelerate launch finetune/adapt.py …, or unset WORLD_SIZE to train with one process."
        )
    return accelerator


class _StopRequest:
    """Records SIGTERM or Ctrl-C as a request to save and stop. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.made = False
        self._interrupted: float | None = None
        """Time of the first Ctrl-C."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context, signals set the request instead of ending the process; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            logger.warning("Saving a checkpoint at the end of this step; Ctrl-C again, after a second, stops at once.")
        elif now - self._interrupted > _SAME_CTRL_C:
            raise KeyboardInterrupt
