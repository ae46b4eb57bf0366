"""The training loop: runs all stages, from the first update to the result."""

import logging
import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import load_patch
from ..devices import is_first_process, launched_on_cpus, launched_processes
from ..families import NoisedBatch, trained_family
from ..files import content_of, folder_for_results
from ..patching import mhla_layers
from ..reporting import progress
from .checks import check_fits, check_start
from .config import TrainingConfig
from .distributed import gathered, meta_copy, placed_like, shard, split_tokens, uses_fsdp2
from .few_steps import DistributionMatching
from .latents.data import NoisedBatches, TrainingData
from .latents.times import frames_together
from .objectives import stage_losses
from .optimizer import load_optimizer_state, make_optimizer, make_schedule, optimizer_class, optimizer_state
from .roles import Critic, Roles, Teacher, add_lora, make_trainable, trainable_names
from .run_folder import CheckpointError, RunFolder, Tensors, TrainingDivergedError, load_checkpoint, step_of
from .validation import Sampler, validation_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    """Updates done."""
    finished: bool
    """False if SIGTERM or Ctrl-C stopped it; its last checkpoint is then at ``step``."""
    result: Path | None
    """Folder with the trained weights; None while unfinished."""
    exit_code: int = 0
    """Exit code of the command: 130 after Ctrl-C, 143 after SIGTERM, also if another process received it."""


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
        ImportError: the tracker is missing, or bitsandbytes for ``optimizer: adamw8bit``.
        TrainingDivergedError: more than ``config.max_skipped`` updates in a row were skipped, or the run ended with
            skipped updates or with non-finite weights or validation loss; no result is written.
        CheckpointError: the last checkpoint or the result could not be written.
        OSError: another run has the output folder, or it cannot be written.
        KeyboardInterrupt: a second Ctrl-C, before the checkpoint for the first was written.
    """
    checkpoint = check_start(config, resume)
    check_fits(transformer, data, config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        return train_checked(transformer, data, config, checkpoint, sampler)


def train_checked(
    transformer: nn.Module, data: TrainingData, config: TrainingConfig, checkpoint: Path | None, sampler: Sampler | None
) -> TrainingResult:
    """Train after the checks, from a checkpoint if one is given; see :func:`train`."""
    run = _Run(transformer, data, config, checkpoint, sampler)
    result = None
    with run.recording(), _stop_request() as signals:
        for index, stage in enumerate(config.stages):
            end, is_last = config.end_of(index), index == len(config.stages) - 1
            if run.step >= end and not is_last:
                continue  # done before the run was resumed
            with run.stage(index):
                if run.step == 0:
                    run.validate()
                batches = run.batches.from_step(run.step, drops_prompts=stage.few_steps is None)
                while run.step < end:
                    must_stop = run.update(batches, bool(signals))
                    if run.step % config.validation.every == 0 or run.step == config.total_steps:
                        run.validate()
                    if run.step == config.total_steps:
                        run.check_end()  # before a last checkpoint replaces a good one
                    if must_stop or run.step == end or run.step % config.checkpoint_every == 0:
                        run.save(must_succeed=must_stop or run.step == end)
                    if must_stop and run.step < config.total_steps:
                        logger.warning("Stopped by a signal after step %d; resume with --resume latest.", run.step)
                        code = 128 + (signals[0] if signals else signal.SIGTERM)
                        return TrainingResult(run.step, finished=False, result=None, exit_code=code)
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
        self.config, self._sampler, self._folder = config, sampler, RunFolder(config.output)
        self._accelerator = accelerator = _make_accelerator(config)
        self._is_first: bool = accelerator.is_main_process
        device: torch.device = accelerator.device
        # a process without a launcher has nobody to share with
        self._sharded = uses_fsdp2(config) and torch.distributed.is_initialized()
        # whole weights may not fit on the device, so sharding moves them part by part
        self._transformer = transformer if self._sharded else transformer.to(device)
        self._family = trained_family(transformer)
        process = self._family.process(transformer, config.flow_shift)
        # processes that split the tokens of a batch form a group, with the same batches, noise and times
        self._group_size = size = config.context_parallel.processes
        self._group, self._groups = accelerator.process_index // size, accelerator.num_processes // size
        self._identity: dict[str, Any] = {
            "samples_per_update": config.batch_size * config.gradient_accumulation * self._groups
        }
        if self._is_first:
            logger.info(
                "Training in %d process(es) on %s: %d samples per update, in %d forward(s) of %d in %d group(s).",
                *(accelerator.num_processes, device.type, self._identity["samples_per_update"]),
                *(config.gradient_accumulation, config.batch_size, self._groups),
            )
        together = frames_together(transformer)
        self.batches = NoisedBatches(data, process, config, device, self._group, self._groups, together)
        self.step = 0
        """Updates done, over all stages, skipped ones included."""
        self._skipped = 0
        """Updates skipped since the last one that was not."""
        self._identity |= {
            "training_samples": self.batches.training_samples,
            "config": config.to_dict(),
            "content": _content(config, data),
        }
        self._validation_loss: float | None = None
        self._matching: DistributionMatching | None = None
        self._critic: dict[str, nn.Parameter] = {}

        for stage in config.stages:
            if stage.lora_rank is not None:
                add_lora(transformer, stage.lora_rank, config.seed, stage.lora_layers)
        self._changed = trainable_names(transformer, *(stage.trainable for stage in config.stages))
        transformer.train()
        self._family.prepare_for_training(transformer)
        if config.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        # the critic begins as the teacher, so both are made before the checkpoint's weights replace the original ones
        critic = Critic(transformer, config.stages[-1], config.seed) if config.few_steps is not None else None
        if self._sharded:
            self._unsharded = meta_copy(transformer)
            make_trainable(transformer, self._changed)
            shard(transformer, device, accelerator.num_processes)
        if size > 1:  # after calibration, which needs whole attentions
            split_tokens(transformer, config.context_parallel, device, self._groups)
        needs_teacher = any(stage.needs_teacher for stage in config.stages)
        teacher = Teacher(transformer, self._changed) if needs_teacher else None
        self._roles = Roles(transformer, process, teacher, critic, data.empty, accelerator.autocast, size)
        self._loaded: dict[str, Tensors] = {}
        if checkpoint is None:
            return
        state, self._loaded = load_checkpoint(checkpoint, self._identity)
        self.step, self._skipped = state["step"], state["skipped_in_row"]
        parameters = dict(transformer.named_parameters())
        with torch.no_grad():
            for name, value in self._loaded["weights"].items():
                if self._sharded:
                    parameters[name].copy_(placed_like(value, parameters[name]))
                else:  # frozen so far, perhaps in bfloat16, while the trained values are float32
                    parameters[name].data = value.to(parameters[name].device)
        logger.info("Resuming from %s.", checkpoint)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which metrics and progress are recorded."""
        if self._is_first:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            self._folder.go_back_to(self.step)
        self._accelerator.wait_for_everyone()
        # otherwise TensorBoard keeps points after the checkpoint that the run resumes from
        first_new = self.step + 1 if self.step else 0
        self._accelerator.init_trackers("mhla", init_kwargs={"tensorboard": {"purge_step": first_new}})
        shown: dict[str, Any] = {"unit": "step", "disable": not self._is_first}
        self._progress = progress(total=self.config.total_steps, initial=self.step, **shown)
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
        done = self.step - (config.end_of(index) - stage.steps)
        self._stage, self._matching, self._critic = index, None, {}
        names = {*trainable_names(self._transformer, stage.trainable)}
        if stage.few_steps is not None and self._roles.critic is not None:
            self._matching = DistributionMatching(self._roles, stage.few_steps, config.seed, self.step - done)
            self._critic = self._roles.critic.parameters
        if not self._sharded:  # else everything that any stage trains already takes gradients
            make_trainable(self._transformer, names | self._critic.keys())
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
        self._schedule = make_schedule(self._optimizer, stage, done)
        self._average = EMAModel(self._trained.values(), decay=config.ema_decay) if config.ema_decay else None
        if self._matching is not None:
            for parameter in self._critic.values():
                parameter.requires_grad_(True)
            rate: Any = self._matching.settings.critic_learning_rate or stage.learning_rate
            make: Any = optimizer_class(config.optimizer)
            self._critic_optimizer = make(self._critic.values(), lr=rate, weight_decay=0.0)
        if done > 0:
            load_optimizer_state(self._optimizer, self._trained, self._loaded["optimizer"])
            if self._average is not None:
                average = self._loaded["ema"]
                self._average.shadow_params = [placed_like(average[name], p) for name, p in self._trained.items()]
                self._average.optimization_step = int(average["updates"])
            if self._critic:
                with torch.no_grad():
                    for name, value in self._loaded["critic"].items():
                        self._critic[name].copy_(value)
                load_optimizer_state(self._critic_optimizer, self._critic, self._loaded["critic_optimizer"])
        self._loaded = {}
        try:
            yield
        except ValueError as error:  # as the operator raises it for a λ that has become 0 or infinite
            logs = [getattr(layer, "linear_log_weight", None) for layer in mhla_layers(self._transformer).values()]
            if all(bool(log.exp().log().isfinite().all()) for log in logs if log is not None):
                raise
            raise self._diverged(f"λ after step {self.step} is 0 or not finite") from error
        finally:  # free the optimizer and unwrap, so that another stage can begin
            accelerator.free_memory(self._prepared)
            if not self._sharded:
                accelerator.unwrap_model(self._model, keep_fp32_wrapper=False)

    def update(self, batches: Iterator[NoisedBatch], stop: bool) -> bool:
        """Do one optimizer update; skipped, but still counted, if loss or gradient is not finite.

        Args:
            batches: the batch of every forward.
            stop: whether this process wants to stop; the return value says whether any does.
        """
        accelerator, config, stage = self._accelerator, self.config, self.config.stages[self._stage]
        matching, critic = self._matching, self._critic
        started, tokens, rate = time.perf_counter(), 0, float(self._schedule.get_last_lr()[0])
        trains_student = matching is None or matching.trains_student(self.step)

        # forward, loss, backward
        totals: dict[str, torch.Tensor] = {}
        for forward in range(config.gradient_accumulation):
            batch = next(batches)
            tokens += len(batch.latents) * math.prod(self._family.token_grid(self._transformer, batch.hidden_states))
            with accelerator.accumulate(self._model):
                if self._sharded:
                    self._model.set_requires_gradient_sync(accelerator.sync_gradients)
                if matching is None:
                    losses = stage_losses(self._roles, stage, self._model, batch)
                else:
                    first = (forward * self._groups + self._group) * config.batch_size
                    losses = matching.losses(batch, self.step, first)
                for loss, parts in losses:
                    accelerator.backward(loss)
                    for name, part in parts.items():
                        totals[name] = totals.get(name, 0.0) + part.detach() / config.gradient_accumulation
        stops = torch.tensor(float(stop), device=accelerator.device)
        *means, stop_votes = accelerator.reduce(torch.stack([*totals.values(), stops]), reduction="mean").tolist()
        values = dict(zip(totals, means, strict=True))
        if not self._sharded and (critic or not stage.needs_prediction):
            # attention transfer runs single layers, and few steps several models in one, which
            # DistributedDataParallel does not see
            for parameter in (*self._trained.values(), *critic.values()):
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")

        # clip, step, which clips the mixing matrices to (0, 1), and moving average
        most = config.max_gradient_norm
        norms = [accelerator.clip_grad_norm_(part.values(), most) for part in (self._trained, critic) if part]
        gradient_norm, *critic_norm = (float(x.full_tensor() if isinstance(x, DTensor) else x) for x in norms)
        skipped = not all(math.isfinite(number) for number in (values["loss"], gradient_norm, *critic_norm))
        if not skipped and trains_student:
            self._prepared.step()
            if self._average is not None:
                self._average.step(self._trained.values())
        if not skipped and critic:
            self._critic_optimizer.step()
        self._transformer.zero_grad()
        for parameter in critic.values():
            parameter.grad = None
        with warnings.catch_warnings():  # in few steps the student is updated later, and after a skip too
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._schedule.step()

        # record
        self.step, self._skipped = self.step + 1, self._skipped + 1 if skipped else 0
        if critic:
            values["critic_gradient_norm"] = critic_norm[0]
        if trains_student:
            values |= {"gradient_norm": gradient_norm, "learning_rate": rate}
        speed = tokens * self._groups / (time.perf_counter() - started)
        if skipped:
            numbers = (self.step, values["loss"], gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        if self._skipped > config.max_skipped:
            raise self._diverged(f"{self._skipped} updates in a row, up to step {self.step}, were skipped")
        if self._is_first:
            self._folder.add_metrics({"step": self.step, "stage": self._stage, **values, "skipped": skipped})
            accelerator.log({**values, "tokens_per_second": speed}, step=self.step)
            shown = {"loss": f"{values['loss']:.4g}", "lr": f"{rate:.3g}", "tokens_per_s": f"{speed:.3g}"}
            self._progress.set_postfix(shown, refresh=False)
            self._progress.update(self.step - self._progress.n)
        return bool(stop_votes > 0)

    def validate(self) -> None:
        """Measure the loss on held-out samples and generate samples, if the settings ask for it."""
        samples, matching = self.config.validation.samples, self._matching
        with self._averaged_weights(), self._accelerator.autocast():
            if samples:
                held_out = self.batches
                total = validation_loss(self._model, held_out) if matching is None else matching.held_out_loss(held_out)
                # the processes of a group have the same losses
                summed = float(self._accelerator.reduce(total, reduction="sum")) / self._group_size
                self._validation_loss = loss = summed / samples
                if self._is_first:
                    self._folder.add_metrics({"step": self.step, "validation_loss": loss})
                    self._accelerator.log({"validation_loss": loss}, step=self.step)
                logger.info("Validation loss %.5f after step %d.", loss, self.step)
            if self._sampler is not None and self._is_first:
                self._sampler(self._transformer, self._folder.path / "samples" / f"step-{self.step:08d}")
            elif self._sampler is not None and (self._sharded or self._group_size > 1):
                with TemporaryDirectory() as folder:  # the first process needs the others' weights or tokens
                    self._sampler(self._transformer, Path(folder))
        self._accelerator.wait_for_everyone()

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Context in which the model has the moving average of its weights, if there is one."""
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
        loss = self._validation_loss
        if self._skipped:
            raise self._diverged(f"all updates after step {self.step - self._skipped} were skipped")
        if broken:
            raise self._diverged(f"weights after step {self.step} are not finite")
        if loss is not None and not math.isfinite(loss):
            raise self._diverged(f"the validation loss after step {self.step} is {loss}")

    def _diverged(self, what: str) -> TrainingDivergedError:
        # an update that was not skipped shows that the weights before it worked, not those after it
        worked = self.step - self._skipped
        good = [path for path in self._folder.checkpoints() if step_of(path) < worked]
        from_there = (
            f"{good[-1]} is the last good checkpoint: if a sample of the data is at fault, fix it and resume from "
            f"there with --resume {good[-1]}."
            if good
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
            if self._critic:
                tensors["critic"] = {name: gathered(x) for name, x in self._critic.items()}
                tensors["critic_optimizer"] = optimizer_state(self._critic_optimizer, self._critic)
        if self._is_first:
            state = {"step": self.step, "skipped_in_row": self._skipped, **self._identity}
            try:
                self._folder.save(state, tensors, self.config.keep_checkpoints)
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


def _content(config: TrainingConfig, data: TrainingData) -> dict[str, Any]:
    """Return what identifies the content of data, patch and base weights, None where it is unknown, as on the Hub."""
    patch, model = config.patch, config.model
    content: dict[str, Any] = {"data": getattr(data, "content", None), "patch": None, "model": None}
    if isinstance(patch, str):
        content["patch"] = content_of(Path(patch)) if Path(patch).is_dir() else load_patch(patch).config.to_dict()
    if model is not None:
        content["model"] = content_of(Path(model))
    return content


def _make_accelerator(config: TrainingConfig) -> Any:
    """Make an ``Accelerator`` for the settings; the launcher determines the devices."""
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs

    accelerator = Accelerator(
        cpu=launched_on_cpus(),
        gradient_accumulation_steps=config.gradient_accumulation,
        mixed_precision=config.precision,
        log_with=config.tracker,
        project_dir=config.output,
        # the cache would hold a bfloat16 copy of all trained weights, each used once per forward
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
    )
    if accelerator.num_processes != launched_processes():
        raise ValueError(
            f"WORLD_SIZE says that {launched_processes()} processes were launched, but accelerate has joined "
            f"{accelerator.num_processes}, so each would train separately into {config.output}. Start them with "
            "accelerate launch finetune/adapt.py …, or unset WORLD_SIZE to train with one process."
        )
    return accelerator


@contextmanager
def _stop_request() -> Iterator[list[int]]:
    """Yield a list of the SIGTERM and Ctrl-C that came instead of ending the process; in the main thread only.

    A second Ctrl-C stops at once. One within a second counts as the first, because launchers forward Ctrl-C to
    processes that already got it.
    """
    signals: list[int] = []
    interrupted = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        signals.append(number)
        if number == signal.SIGINT and not interrupted:
            interrupted = time.monotonic()
            logger.warning("Saving a checkpoint at the end of this step; Ctrl-C again, after a second, stops at once.")
        elif number == signal.SIGINT and time.monotonic() - interrupted > 1.0:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
