"""The training loop: runs all stages, from the first update to the result."""

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm.contrib.logging import logging_redirect_tqdm

from ..config import load_patch
from ..devices import is_first_process, launched_on_cpus, launched_processes, peak_memory
from ..families import NoisedBatch, trained_family
from ..files import content_of, folder_for_results
from ..patching import mhla_layers
from ..reporting import progress, scaled, shows_bars
from .changes import Change, find_changes, say
from .checks import check_fits, check_start
from .config import TrainingConfig, seconds_of
from .distributed import gathered, meta_copy, placed_like, shard, split_tokens, uses_fsdp2
from .export import write_weights
from .latents.data import NoisedBatches, TrainingData
from .latents.times import frames_together
from .roles import Roles, Teacher, make_trainable, prepare_for_training, quantize_base
from .run_folder import (
    CheckpointError,
    RunFolder,
    Tensors,
    TrainingDivergedError,
    read_state,
    read_tensors,
    step_of,
)
from .stage import Stage
from .validation import Sampler, show_samples, validation_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    """Updates done."""
    finished: bool
    """False if SIGTERM, Ctrl-C or the time limit stopped it; its last checkpoint is then at ``step``."""
    result: Path | None
    """Folder with the trained weights; None while unfinished."""
    exit_code: int = 0
    """Exit code of the command: 130 after Ctrl-C, 143 after SIGTERM, also if another process received it; 124, as of
    ``timeout``, after the time limit."""


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
        ImportError: the library of the tracker, of the optimizer or of ``base_dtype`` is missing.
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
    ends_at = math.inf if config.time_limit is None else time.monotonic() + seconds_of(config.time_limit)
    run = Run(transformer, data, config, sampler)
    saved = {} if checkpoint is None else run.resume(checkpoint)
    result = None
    with run.recording() as bar, _stop_request() as signals:
        for index, settings in enumerate(config.stages):
            end, is_last = config.end_of(index), index == len(config.stages) - 1
            if run.step >= end and not is_last:
                continue  # done before the run was resumed
            logger.info(
                "Stage %d of %d, up to step %d: %s%s.",
                *(index + 1, len(config.stages), end, settings.describe()),
                "; not comparable with the loss of the stage before" * (index > 0),
            )
            with run.stage(index, saved) as stage:
                saved = {}
                if run.step == 0:
                    run.validate(stage)
                batches = run.batches.from_step(run.step)
                while run.step < end:
                    must_stop = run.update(stage, batches, bool(signals) or time.monotonic() >= ends_at, bar)
                    if run.step % config.validation.every == 0 or run.step == config.total_steps:
                        run.validate(stage)
                    if run.step == config.total_steps:
                        run.check_end(stage)  # before a last checkpoint replaces a good one
                    if must_stop or run.step == end or run.step % config.checkpoint_every == 0:
                        run.save(stage, must_succeed=must_stop or run.step == end)
                    if must_stop and run.step < config.total_steps:
                        spent = not signals and time.monotonic() >= ends_at
                        why = f"time_limit={config.time_limit}" if spent else "a signal"
                        logger.warning("Stopped by %s after step %d; resume with --resume latest.", why, run.step)
                        code = 124 if spent else 128 + (signals[0] if signals else signal.SIGTERM)
                        return TrainingResult(run.step, finished=False, result=None, exit_code=code)
                    if run.step < config.total_steps and run.export_is_due():
                        run.export(stage, run.folder.path / "exports" / f"step-{run.step:08d}", must_succeed=False)
                if is_last:
                    run.export(stage, run.folder.result, must_succeed=True)
                    result = run.folder.result
    return TrainingResult(run.step, finished=True, result=result)


class Run:
    """Owns what all stages share: the data, the roles of the transformer, the processes and the output folder."""

    def __init__(self, transformer: Any, data: TrainingData, config: TrainingConfig, sampler: Sampler | None) -> None:
        self.config, self.sampler, self.folder = config, sampler, RunFolder(config.output)
        self.accelerator = accelerator = _make_accelerator(config)
        device: torch.device = accelerator.device
        # a process without a launcher has nobody to share with
        is_sharded = uses_fsdp2(config) and torch.distributed.is_initialized()
        if config.base_dtype is not None:
            quantize_base(transformer, config.base_dtype, device)
        # whole weights may not fit on the device, so sharding moves them part by part
        transformer = transformer if is_sharded else transformer.to(device)
        process = trained_family(transformer).training.process(transformer, config.flow_shift)
        # processes that split the tokens of a batch form a group, with the same batches, noise and times
        size = config.context_parallel
        group, groups = accelerator.process_index // size, accelerator.num_processes // size
        samples_per_update = config.batch_size * config.gradient_accumulation * groups
        if accelerator.is_main_process:
            logger.info(
                "Training in %d process(es) on %s: %d samples per update, in %d forward(s) of %d in %d group(s).",
                *(accelerator.num_processes, device.type, samples_per_update),
                *(config.gradient_accumulation, config.batch_size, groups),
            )
        self.batches = NoisedBatches(data, process, config, device, group, groups, frames_together(transformer))
        self.identity: dict[str, Any] = {
            "samples_per_update": samples_per_update,
            "training_samples": self.batches.training_samples,
            "config": config.to_dict(),
            "content": {"data": getattr(data, "content", None), **content_of_run(config)},
        }
        self.step = 0
        """Updates done, over all stages, skipped ones included."""
        self.skipped = 0
        """Updates skipped since the last one that was not."""
        self.validation_loss: float | None = None
        self.changes: list[Change] = []
        """Settings that have changed since the checkpoint that the run was resumed from."""
        self.exported_at = time.monotonic()
        self.changed = prepare_for_training(transformer, config)
        """Names of the parameters that any stage trains."""
        self.unsharded = meta_copy(transformer) if is_sharded else None
        """Filled with the whole weights to save them; None where they are not sharded."""
        if is_sharded:
            make_trainable(transformer, self.changed)
            shard(transformer, device, accelerator.num_processes)
        if size > 1:  # after calibration, which needs whole attentions
            split_tokens(transformer, size, device, groups)
        self.roles = Roles.of(transformer, config, self.changed, data.empty, accelerator.autocast)
        self.unpatched_loss: float | None = None
        """Validation loss of the original model on the same batches, measured before its weights are replaced."""
        if config.validation.samples and config.patch is not None:
            with Teacher(transformer, ()).at_work(), accelerator.autocast():
                self.unpatched_loss = self._held_out_mean(validation_loss(transformer, self.batches))

    @property
    def transformer(self) -> nn.Module:
        """The student, unwrapped."""
        return self.roles.student

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 spreads the weights over the processes."""
        return self.unsharded is not None

    def resume(self, checkpoint: Path) -> dict[str, Tensors]:
        """Load the weights of a checkpoint, and return the tensors of all its files."""
        state = read_state(checkpoint)
        self.changes = find_changes(checkpoint, state, self.identity)
        saved = read_tensors(checkpoint, state)
        self.step, self.skipped = state["step"], state["skipped_in_row"]
        parameters = dict(self.transformer.named_parameters())
        with torch.no_grad():
            for name, value in saved["weights"].items():
                if name not in self.changed:  # of a stage that had not begun, and was removed
                    continue
                if self.is_sharded:
                    parameters[name].copy_(placed_like(value, parameters[name]))
                else:  # frozen so far, perhaps in bfloat16, while the trained values are float32
                    # a copy, since kernels round otherwise where memory is not aligned, as in the file
                    parameters[name].data = value.to(parameters[name].device, copy=True)
        logger.info("Resuming from %s.", checkpoint)
        for change in self.changes:
            logger.info("Changed since: %s", say(change))
        return saved

    @contextmanager
    def recording(self) -> Iterator[Any]:
        """Context in which metrics are recorded; yields the progress bar."""
        is_first = self.accelerator.is_main_process
        if is_first:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.go_back_to(self.step)
            self.folder.add_changes(self.step, self.changes)
        self.accelerator.wait_for_everyone()
        # otherwise TensorBoard keeps points after the checkpoint that the run resumes from
        first_new = self.step + 1 if self.step else 0
        self.accelerator.init_trackers("mhla", init_kwargs={"tensorboard": {"purge_step": first_new}})
        above_bar = logging_redirect_tqdm() if shows_bars() else nullcontext()
        shown: dict[str, Any] = {
            "total": self.config.total_steps,
            "initial": self.step,
            "unit": "step",
            "disable": not is_first,
        }
        try:
            with above_bar, progress(**shown) as bar:
                yield bar
        finally:
            self.accelerator.end_training()

    @contextmanager
    def stage(self, index: int, saved: dict[str, Tensors]) -> Iterator[Stage]:
        """Make a stage, and free what it holds after the context, so that another can begin."""
        accelerator = None if self.is_sharded else self.accelerator
        stage = Stage(self.config, index, self.roles, accelerator, self.step, saved)
        del saved  # what was loaded is on the device
        try:
            yield stage
        except ValueError as error:  # as the operator raises it for a λ that has become 0 or infinite
            logs = [getattr(layer, "linear_log_weight", None) for layer in mhla_layers(self.transformer).values()]
            if all(bool(log.exp().log().isfinite().all()) for log in logs if log is not None):
                raise
            raise self._diverged(f"λ after step {self.step} is 0 or not finite") from error
        finally:
            self.accelerator.free_memory()
            if not self.is_sharded:
                self.accelerator.unwrap_model(stage.model, keep_fp32_wrapper=False)

    def update(self, stage: Stage, batches: Iterator[NoisedBatch], stop: bool, bar: Any) -> bool:
        """Do one optimizer update; skipped, but still counted, if loss or gradient is not finite.

        Args:
            stage: at work.
            batches: the batch of every forward.
            stop: whether this process wants to stop; the return value says whether any does.
            bar: shows the progress.
        """
        accelerator, config, groups = self.accelerator, self.config, self.batches.processes
        started, tokens, rate = time.perf_counter(), 0, float(stage.schedule.get_last_lr()[0])

        # forward, loss, backward
        totals: dict[str, torch.Tensor] = {}
        for _ in range(config.gradient_accumulation):
            batch = next(batches)
            tokens += len(batch.latents) * math.prod(
                trained_family(self.transformer).token_grid(self.transformer, batch.hidden_states)
            )
            with accelerator.accumulate(stage.model):
                if self.is_sharded:
                    stage.model.set_requires_gradient_sync(accelerator.sync_gradients)
                for loss, parts in stage.losses(batch):
                    accelerator.backward(loss)
                    for name, part in parts.items():
                        totals[name] = totals.get(name, 0.0) + part.detach() / config.gradient_accumulation
        stops = torch.tensor(float(stop), device=accelerator.device)
        *means, stop_votes = accelerator.reduce(torch.stack([*totals.values(), stops]), reduction="mean").tolist()
        values = dict(zip(totals, means, strict=True))
        if not self.is_sharded and not stage.settings.needs_prediction:
            # attention transfer runs single layers, which DistributedDataParallel does not see
            for parameter in stage.trained.values():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")

        # clip, step
        norm = accelerator.clip_grad_norm_(stage.trained.values(), config.max_gradient_norm)
        gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        skipped = not (math.isfinite(values["loss"]) and math.isfinite(gradient_norm))
        stage.step(is_finite=not skipped)

        # record
        self.step, self.skipped = self.step + 1, self.skipped + 1 if skipped else 0
        values |= {"gradient_norm": gradient_norm, "learning_rate": rate}
        speed = tokens * groups / (time.perf_counter() - started)
        if skipped:
            numbers = (self.step, values["loss"], gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        if self.skipped > config.max_skipped:
            raise self._diverged(f"{self.skipped} updates in a row, up to step {self.step}, were skipped")
        if accelerator.is_main_process:
            self.folder.add_metrics({"step": self.step, "stage": stage.index, **values, "skipped": skipped})
            memory = peak_memory(accelerator.device)
            accelerator.log({**values, "tokens_per_second": speed, **memory}, step=self.step)
            shown = {"loss": f"{values['loss']:.4g}", "lr": f"{rate:.3g}", "tokens_per_s": f"{speed:.3g}"}
            bar.set_postfix(shown | {name: scaled(size, 1024, "B") for name, size in memory.items()}, refresh=False)
            bar.update(self.step - bar.n)
        return bool(stop_votes > 0)

    def validate(self, stage: Stage) -> None:
        """Measure the loss on held-out samples and generate samples, if the settings ask for it."""
        is_first, unpatched = self.accelerator.is_main_process, self.unpatched_loss
        with stage.averaged_weights(), self.accelerator.autocast():
            if self.config.validation.samples:
                self.validation_loss = loss = self._held_out_mean(validation_loss(stage.model, self.batches))
                losses = {"validation_loss": loss}
                if unpatched is not None:
                    losses["unpatched_validation_loss"] = unpatched
                if is_first:
                    self.folder.add_metrics({"step": self.step, **losses})
                    self.accelerator.log(losses, step=self.step)
                beside = f" (unpatched {unpatched:.5f})" if len(losses) == 2 else ""
                logger.info("Validation loss %.5f%s after step %d.", loss, beside, self.step)
            if self.sampler is not None and is_first:
                samples = self.folder.path / "samples" / f"step-{self.step:08d}"
                self.sampler(self.transformer, samples)
                for tracker in self.accelerator.trackers:
                    show_samples(tracker, samples, self.step)
            elif self.sampler is not None and (self.is_sharded or self.roles.split > 1):
                with TemporaryDirectory() as folder:  # the first process needs the others' weights or tokens
                    self.sampler(self.transformer, Path(folder))
        self.accelerator.wait_for_everyone()

    def _held_out_mean(self, summed: torch.Tensor) -> float:
        """Return the mean over all held-out samples of losses that each process has summed over its own."""
        # the processes of a group have the same losses
        total = float(self.accelerator.reduce(summed, reduction="sum"))
        return total / self.roles.split / self.config.validation.samples

    def check_end(self, stage: Stage) -> None:
        """Raise if the final model may be bad.

        One skipped update is enough if it is the last one, because no later update shows that the weights still work.
        """
        parameters = dict(self.transformer.named_parameters())
        with stage.averaged_weights():
            parts: list[torch.Tensor] = [parameters[name] for name in self.changed]
            parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
            finite = torch.stack([part.isfinite().all() for part in parts]).all()
        broken = float(self.accelerator.reduce((~finite).float(), reduction="sum"))
        if self.skipped:
            raise self._diverged(f"all updates after step {self.step - self.skipped} were skipped")
        if broken:
            raise self._diverged(f"weights after step {self.step} are not finite")
        if self.validation_loss is not None and not math.isfinite(self.validation_loss):
            raise self._diverged(f"the validation loss after step {self.step} is {self.validation_loss}")

    def _diverged(self, what: str) -> TrainingDivergedError:
        # an update that was not skipped shows that the weights before it worked, not those after it
        worked = self.step - self.skipped
        good = [path for path in self.folder.checkpoints() if step_of(path) < worked]
        from_there = (
            f"{good[-1]} is the last good checkpoint: if a sample of the data is at fault, fix it and resume from "
            f"there with --resume {good[-1]}."
            if good
            else f"{self.folder.path} holds no good checkpoint."
        )
        return TrainingDivergedError(
            f"Training has diverged: {what}. Updates are skipped where loss or gradient is not finite. Lower the "
            f"learning rate or lengthen the warm-up, and start again in another output folder. {from_there}"
        )

    def save(self, stage: Stage, must_succeed: bool) -> None:
        """Write a checkpoint; a failure raises if it is required, else it is logged."""
        is_first = self.accelerator.is_main_process
        if is_first or self.is_sharded:  # all processes must contribute sharded weights
            parameters = dict(self.transformer.named_parameters())
            tensors = {"weights": {name: gathered(parameters[name]) for name in self.changed}, **stage.tensors()}
        if is_first:
            state = {"step": self.step, "skipped_in_row": self.skipped, **self.identity}
            try:
                self.folder.save(state, tensors, self.config.keep_checkpoints)
            except CheckpointError as error:
                if must_succeed:
                    raise
                logger.error("%s Training continues; the earlier checkpoints are kept.", error)
        self.accelerator.wait_for_everyone()

    def export_is_due(self) -> bool:
        """Whether to export after this update; of a time the clock of the first process decides."""
        every = self.config.export_every
        if not isinstance(every, str):
            return every is not None and self.step % every == 0
        is_due = self.accelerator.is_main_process and time.monotonic() - self.exported_at >= seconds_of(every)
        vote = torch.tensor(float(is_due), device=self.accelerator.device)
        return bool(self.accelerator.reduce(vote, reduction="sum") > 0)

    def export(self, stage: Stage, folder: Path, must_succeed: bool) -> None:
        """Write the weights for use, the moving average where there is one; a failure raises or is logged."""
        is_first = self.accelerator.is_main_process
        with stage.averaged_weights():
            whole = self.transformer
            if self.unsharded is not None:
                state = {name: gathered(tensor) for name, tensor in whole.state_dict().items()}
                whole = self.unsharded
                if is_first:
                    whole.load_state_dict(state, assign=True)
            if is_first:
                try:
                    write_weights(whole, self.config, folder)
                except CheckpointError as error:
                    if must_succeed:
                        raise
                    logger.error("%s Training continues.", error)
            if self.unsharded is not None:
                self.unsharded.to("meta")  # frees the whole weights
        self.exported_at = time.monotonic()
        self.accelerator.wait_for_everyone()


def content_of_run(config: TrainingConfig) -> dict[str, Any]:
    """Return what identifies the content of patch and base weights, None where it is unknown, as on the Hub."""
    patch, model = config.patch, config.model
    content: dict[str, Any] = {"patch": None, "model": None}
    if isinstance(patch, str):
        content["patch"] = content_of(Path(patch)) if Path(patch).is_dir() else load_patch(patch).patch.to_dict()
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
