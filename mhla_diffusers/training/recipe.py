"""The recipe of a training run, from top to bottom: checks, model, data, loop, validation, checkpoints, result."""

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import nn
from tqdm.contrib.logging import logging_redirect_tqdm

from ..config import LinearConfig, load_patch
from ..devices import is_first_process, launched_on_cpus, launched_processes
from ..errors import check
from ..families import NoisedBatch, predict, trained_family
from ..files import fingerprint, folder_for_results, write_whole_folder
from ..generation.pipelines import pipeline_source
from ..patching import find_patched, mhla_layers
from ..patching.weights import LORA
from ..reporting import progress, scaled
from .config import TrainingConfig
from .data.batches import NoisedBatches, TrainingData
from .data.times import frames_together
from .objectives import Losses, prediction_losses, transfer_losses
from .run_folder import AVERAGE, OPTIMIZER, WEIGHTS, RunFolder, TrainingDivergedError, find_changes, read_state, step_of
from .sharding import fsdp_plugin, gather, shard_like, unshard, whole
from .validation import Sampler, validation_loss
from .weights import (
    Original,
    has_parameters,
    lora_layers,
    lora_targets,
    make_optimizer,
    prepare_for_training,
    quantize_base,
    write_weights,
)

logger = logging.getLogger(__name__)

_LIBRARIES = {
    "adamw8bit": "torchao",
    "int8": "torchao",
    "nf4": "bitsandbytes",
    "schedule-free": "schedulefree",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Setting → library that it needs, beyond those of the package."""


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
    """Train a transformer, patched as the configuration says, in place; its ``model`` and ``data`` are not loaded.

    The transformer has its original weights, or those of a loaded patch; after FSDP only the result can be run. Of the
    data the last ``config.validation.samples`` are held out. ``resume`` is "latest", which starts a new run if there is
    no checkpoint, or a checkpoint's path; ``sampler`` is called at every validation.

    Raises:
        ValueError, FileNotFoundError, ImportError: as :func:`check_start` and :func:`check_fits`.
        TrainingDivergedError: too many updates were skipped, or final weights or validation loss are not finite.
        OSError: another run has the output folder, or it, a last checkpoint or the result cannot be written.
        KeyboardInterrupt: a second Ctrl-C, before the checkpoint for the first was written.
    """
    checkpoint = check_start(config, resume)
    check_fits(transformer, data, config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        return Recipe(transformer, data, config, checkpoint, sampler).run()


# Checks before anything is loaded


def check_start(config: TrainingConfig, resume: str | None) -> Path | None:
    """Check what needs neither the model nor the data, and return the checkpoint to resume from, if any.

    ValueError for a folder that holds another run, changes that a checkpoint does not take, fewer steps than it has
    done, or a launcher's DeepSpeed; FileNotFoundError for no such checkpoint; ImportError where a library that
    the settings name is missing.
    """
    from accelerate.utils import parse_flag_from_env

    checkpoint = RunFolder(config.output).find(resume)
    if checkpoint is not None:  # what the run finds of data, patch and weights is compared later
        find_changes(checkpoint, read_state(checkpoint), config.to_dict())
        done = step_of(checkpoint)
        check(done <= config.steps, f"steps={config.steps}, but {checkpoint} is already at step {done}; raise steps.")
    elif resume == "latest":
        logger.info("%s holds no checkpoint; starting a new run.", config.output)
    check(
        not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"),
        "accelerate is configured for DeepSpeed, which is not supported; use finetune/accelerate/fsdp.yaml.",
    )
    check(
        config.base_dtype is None or launched_processes() == 1,
        f"base_dtype={config.base_dtype!r} runs in one process; remove it.",
    )
    for setting in (config.optimizer, config.base_dtype, config.tracker):
        library = _LIBRARIES.get(setting or "")
        if library is not None and find_spec(library) is None:
            raise ImportError(f"{setting} needs {library}: pip install {library}.")
    return checkpoint


def check_fits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless transformer, data and configuration fit each other; reads no weights."""
    patches, family = list(find_patched(transformer).values()), trained_family(transformer)
    check(
        bool(patches) == (config.patch is not None),
        f"patch={config.patch!r}, but the transformer is {'patched' if patches else 'not patched'}; both must have the "
        "same patch, or none.",
    )
    check(
        config.trainable != "mhla" or has_parameters(transformer),
        "trainable='mhla' trains the patch's own parameters, but sparse attention has none; choose 'attention', "
        "'lora' or 'all'.",
    )
    if has := lora_layers(transformer):
        rank = max(layer.lora_A[LORA].out_features for layer in has.values())
        targets = has if config.lora_rank is None else lora_targets(transformer, config.lora_layers)
        check(
            config.trainable in ("mhla", "lora") and config.lora_rank in (None, rank) and has.keys() == set(targets),
            f"patch={config.patch!r} has a LoRA of rank {rank} on {len(has)} layers; continue it with trainable: lora, "
            "and the lora_rank and lora_layers of the run that made it.",
        )
    frames_together(transformer)  # raises where it cannot be trained, as the next
    fsdp_plugin(transformer, config)
    for shape in sorted(set(data.shapes)):
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        for patch in (patched.config for patched in patches):
            if isinstance(patch, LinearConfig):
                patch.layout_on(grid)  # raises if the blocks cannot cut the grid
    held_out = config.validation.samples
    check(
        config.batch_size <= len(data) - held_out,
        f"batch_size={config.batch_size} and validation.samples={held_out} need more than the {len(data)} samples in "
        "the data; hold out fewer, or encode more, for example with --stride.",
    )
    check(
        not config.prompt_dropout or data.empty is not None,
        f"prompt_dropout={config.prompt_dropout} needs the empty prompt's conditioning, which the data lacks.",
    )


class Recipe:
    """A run: made with its model, data and optimizer, at its beginning or at a checkpoint; :meth:`run` trains."""

    def __init__(
        self,
        transformer: Any,
        data: TrainingData,
        config: TrainingConfig,
        checkpoint: Path | None,
        sampler: Sampler | None,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import AutocastKwargs
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import EMAModel

        self.config, self.sampler, self.folder = config, sampler, RunFolder(config.output)
        self.step = self.skipped = 0
        """Updates done, skipped ones included, and updates skipped since the last one that was not."""

        # device, precision, processes
        plugin = fsdp_plugin(transformer, config)
        self.accelerator = accelerator = Accelerator(
            cpu=launched_on_cpus(),
            fsdp_plugin=plugin,
            gradient_accumulation_steps=config.gradient_accumulation,
            mixed_precision=config.precision,
            log_with=config.tracker,
            project_dir=config.output,
            # the cache would hold a bfloat16 copy of all trained weights, each used once per forward
            kwargs_handlers=[AutocastKwargs(cache_enabled=False)],
        )
        check(
            accelerator.num_processes == launched_processes(),
            f"WORLD_SIZE is {launched_processes()}, but accelerate joined {accelerator.num_processes} processes. Start "
            "them with accelerate launch finetune/adapt.py …, or unset WORLD_SIZE to train with one process.",
        )
        self.device: torch.device = accelerator.device
        self.is_first, self.is_sharded = accelerator.is_main_process, accelerator.is_fsdp2
        check(self.is_sharded or plugin is None, "accelerate runs no FSDP on CPUs; start the processes with torchrun.")
        processes = accelerator.num_processes
        samples = config.batch_size * config.gradient_accumulation * processes
        logger.info("Training in %d process(es) on %s: %d samples per update.", processes, self.device.type, samples)

        # model: what is trained takes gradients
        if config.base_dtype is not None:
            quantize_base(transformer, config.base_dtype, self.device)
        self.transformer = transformer if self.is_sharded else transformer.to(self.device)  # FSDP moves part by part
        self.family = trained_family(transformer)
        trained = prepare_for_training(transformer, config)

        # data: batches and their noise follow from the seed and the step
        self.process = self.family.training.process(transformer, config.flow_shift)
        place = self.device, accelerator.process_index, processes
        self.batches = NoisedBatches(data, self.process, config, *place, frames_together(transformer))

        # optimizer, processes, moving average, original model
        optimizer = make_optimizer(transformer, trained, config)
        self.model, self.optimizer = accelerator.prepare(transformer, optimizer)  # FSDP replaces parameters of both
        if self.is_sharded:  # also the root, which would keep what it had before weights changed
            self.model.set_reshard_after_forward(True)
        self.trained = {name: x for name, x in transformer.named_parameters() if x.requires_grad}
        self.average = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None
        self.has_average = self.average is not None or config.optimizer == "schedule-free"
        self.original = Original(transformer, self.trained if config.needs_teacher else ())
        self.unpatched_loss: dict[str, float] = {}
        """Validation loss of the original model on the same batches, before its weights are replaced."""
        if config.validation.samples and config.patch is not None:
            with self.original.at_work(), accelerator.autocast():
                self.unpatched_loss["unpatched_validation_loss"] = self._held_out_loss()

        # what a checkpoint must have been made with
        self.identity: dict[str, Any] = {
            "samples per update": samples,
            "training samples": self.batches.training_samples,
            "the content of data": getattr(data, "content", None),
            **content_of_run(config),
        }
        if checkpoint is not None:
            self._resume(checkpoint)

        # learning rates are those of the settings, also after resuming
        rates = config.learning_rate, config.mixing_learning_rate or config.learning_rate
        for group, rate in zip(optimizer.param_groups, rates, strict=False):  # the second is of mixing matrices
            group["initial_lr"] = rate
        self.schedule: Any = get_scheduler(
            "constant_with_warmup" if config.scheduler == "constant" else config.scheduler,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.steps,
            last_epoch=self.step - 1,
        )
        self.optimizer.train()

    def _resume(self, checkpoint: Path) -> None:
        """Load weights, average and optimizer; schedule-free AdamW's average follows from the other two."""
        state = read_state(checkpoint, with_files=True)
        changes = find_changes(checkpoint, state, {**self.config.to_dict(), **self.identity})
        self.step, self.skipped = state["step"], state["skipped in a row"]
        saved = load_file(checkpoint / WEIGHTS)
        for name, parameter in self.trained.items():
            parameter.data.copy_(shard_like(parameter, saved[name]))
        optimizer = torch.load(checkpoint / OPTIMIZER, map_location="cpu", mmap=True)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, values in optimizer["state"].items():
            optimizer["state"][index] = {name: shard_like(parameters[index], x) for name, x in values.items()}
        self.optimizer.load_state_dict(optimizer)
        if self.average is not None:
            self.average.shadow_params = [shard_like(x, saved[f"{AVERAGE}{name}"]) for name, x in self.trained.items()]
            self.average.optimization_step = state["averaged"]
        logger.info("Resuming from %s.%s", checkpoint, "".join(f" Changed: {change}." for change in changes))

    def run(self) -> TrainingResult:
        """Train to the end, or until a signal."""
        config = self.config
        with self._recording() as bar, _stop_request() as signals:
            if self.step == 0:
                self.validate()
            batches = self.batches.from_step(self.step)
            times = [time.monotonic()]
            while self.step < config.steps:
                self.update(batches, bar)
                times.append(time.monotonic())
                if len(times) == 5:  # of four updates, two to warm up
                    seconds = (times[4] - times[2]) / 2
                    left = (config.steps - self.step) * seconds / 3600
                    on_cpu, memory = self.device.type == "cpu", psutil.Process().memory_info()
                    used = memory.rss if on_cpu else torch.accelerator.max_memory_allocated(self.device)
                    told = self.step, seconds, left, scaled(used, 1024, "B")
                    logger.info("Step %d: %.3g s per update, %.2g h to go; peak memory %s.", *told)
                if signals:
                    self.accelerator.set_trigger()
                must_stop, is_last = self.accelerator.check_trigger(), self.step == config.steps
                if is_last or self.step % config.validation.every == 0:
                    loss = self.validate()
                if is_last:
                    self._check_end(loss)  # before a last checkpoint replaces a good one
                if is_last or must_stop or self.step % config.checkpoint_every == 0:
                    self.save(must_succeed=is_last or must_stop)
                if must_stop and not is_last:
                    logger.warning("Stopped by a signal after step %d; resume with --resume latest.", self.step)
                    return TrainingResult(self.step, False, None, 128 + (signals[0][0] if signals else signal.SIGTERM))
            with self.averaged():
                if self.is_sharded:
                    unshard(self.transformer)
                if self.is_first:
                    write_whole_folder(self.folder.result, lambda aside: write_weights(self.transformer, config, aside))
            self.accelerator.wait_for_everyone()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return TrainingResult(self.step, True, self.folder.result)

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        """Record metrics within the context; yields the progress bar."""
        if self.is_first:
            self.folder.begin_at(self.step)
        self.accelerator.wait_for_everyone()
        # otherwise TensorBoard keeps points after the checkpoint that the run resumes from
        first_new = self.step + 1 if self.step else 0
        self.accelerator.init_trackers("mhla", init_kwargs={"tensorboard": {"purge_step": first_new}})
        above_bar = logging_redirect_tqdm() if sys.stderr.isatty() else nullcontext()
        total, hidden = self.config.steps, not self.is_first
        try:
            with above_bar, progress(total=total, initial=self.step, unit="step", disable=hidden) as bar:
                yield bar
        finally:
            self.accelerator.end_training()

    def update(self, batches: Iterator[NoisedBatch], bar: Any) -> None:
        """Do one optimizer update; skipped, but still counted, if loss or gradient is not finite."""
        accelerator, config = self.accelerator, self.config
        rate = float(self.schedule.get_last_lr()[0])

        # forward, loss, backward
        totals: dict[str, torch.Tensor] = {}
        for _ in range(config.gradient_accumulation):
            batch = next(batches)
            with accelerator.accumulate(*() if self.is_sharded else (self.model,)):  # FSDP never keeps whole gradients
                losses = self._losses(batch)
                while True:
                    with accelerator.autocast():  # of the forward alone
                        loss, parts = next(losses, (None, {}))
                    if loss is None:
                        break
                    accelerator.backward(loss)
                    for name, part in parts.items():
                        totals[name] = totals.get(name, 0.0) + part.detach() / config.gradient_accumulation
        means = accelerator.reduce(torch.stack([*totals.values()]), reduction="mean").tolist()
        values = dict(zip(totals, means, strict=True))
        # transfer runs single layers, which DistributedDataParallel does not see
        if config.objectives.transfer and not self.is_sharded:
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")

        # clip, step
        gradient_norm = float(whole(accelerator.clip_grad_norm_(self.trained.values(), config.max_gradient_norm)))
        skipped = not (math.isfinite(values["loss"]) and math.isfinite(gradient_norm))
        if not skipped:
            self.optimizer.step()  # clips the mixing matrices to (0, 1)
            if self.average is not None:
                self.average.step(self.trained.values())
        self.optimizer.zero_grad()
        self.schedule.step()

        # record
        self.step, self.skipped = self.step + 1, self.skipped + 1 if skipped else 0
        values |= {"gradient_norm": gradient_norm, "learning_rate": rate}
        if skipped:
            logger.warning("Step %d was skipped: loss %g, gradient norm %g.", self.step, values["loss"], gradient_norm)
        if self.skipped > config.max_skipped:
            raise self._diverged(f"{self.skipped} updates in a row, up to step {self.step}, were skipped")
        if self.is_first:
            self.folder.add_metrics({"step": self.step, **values, "skipped": skipped})
            accelerator.log(values, step=self.step)
            bar.set_postfix({"loss": f"{values['loss']:.4g}", "lr": f"{rate:.3g}"}, refresh=False)
            bar.update(self.step - bar.n)

    def _losses(self, batch: NoisedBatch) -> Losses:
        """Yield the losses of a batch, one graph at a time."""
        weights = self.config.objectives
        if weights.transfer:
            yield from transfer_losses(self.transformer, self.original, weights.transfer, batch)
            return
        target = None
        if weights.distillation:
            with self.original.at_work():
                target = predict(self.transformer, batch)
        yield from prediction_losses(self.model, self.process, weights, batch, target)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has its averaged weights, if there are any, also those of schedule-free AdamW."""
        if not self.has_average:
            yield
            return
        kept = [parameter.detach().to("cpu", copy=True) for parameter in self.trained.values()]
        if self.average is not None:
            self.average.copy_to(self.trained.values())
        else:
            self.optimizer.eval()
            for layer in mhla_layers(self.transformer).values():
                layer.clip_mixing_()  # the average is extrapolated
        try:
            yield
        finally:
            self.optimizer.train()
            for parameter, value in zip(self.trained.values(), kept, strict=True):
                parameter.data.copy_(value)  # bit for bit, unlike train()

    def validate(self) -> float:
        """Measure and return the loss on held-out samples, 0 for none, and generate samples if the settings ask."""
        loss = 0.0
        with self.averaged(), self.accelerator.autocast():
            if self.config.validation.samples:
                loss = self._held_out_loss()
                losses = {"validation_loss": loss, **self.unpatched_loss}
                if self.is_first:
                    self.folder.add_metrics({"step": self.step, **losses})
                    self.accelerator.log(losses, step=self.step)
                said = ", ".join(f"{name.replace('_', ' ')} {value:.5f}" for name, value in losses.items())
                logger.info("Step %d: %s.", self.step, said)
            if self.sampler is not None and self.is_first:
                self.sampler(self.transformer, self.folder.path / "samples" / f"step-{self.step:08d}")
        self.accelerator.wait_for_everyone()
        return loss

    def _held_out_loss(self) -> float:
        """Average over all held-out samples; not wrapped for processes, whose numbers of samples may differ."""
        summed = validation_loss(self.transformer, self.batches)
        return float(self.accelerator.reduce(summed, reduction="sum")) / self.config.validation.samples

    def _check_end(self, validation: float) -> None:
        """Raise if the final model may be bad; a last update that was skipped leaves that open."""
        if self.skipped:
            raise self._diverged(f"all updates after step {self.step - self.skipped} were skipped")
        with self.averaged():
            finite = all(bool(whole(parameter).isfinite().all()) for parameter in self.trained.values())
        if not (finite and math.isfinite(validation)):
            what = f"weights after step {self.step} or the validation loss ({validation}) are not finite"
            raise self._diverged(what)

    def _diverged(self, what: str) -> TrainingDivergedError:
        # an update that was not skipped shows that the weights before it worked, not those after it
        good = [path for path in self.folder.checkpoints() if step_of(path) < self.step - self.skipped]
        last = f"the last good checkpoint is {good[-1]}" if good else "none of its checkpoints is good"
        return TrainingDivergedError(
            f"Training has diverged: {what}. Lower the learning rate or lengthen the warm-up in another output folder; "
            f"or mend the data, remove newer checkpoints and --resume latest: {last}."
        )

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint; a failure raises if it is required, else it is logged."""
        tensors = {name: gather(x) for name, x in self.trained.items()}
        if self.has_average:
            with self.averaged():
                tensors |= {f"{AVERAGE}{name}": gather(x) for name, x in self.trained.items()}
        optimizer = self.optimizer.state_dict()
        for index, values in optimizer["state"].items():
            optimizer["state"][index] = {name: gather(x) for name, x in values.items()}

        if self.is_first:
            averaged = None if self.average is None else self.average.optimization_step
            counts = {"step": self.step, "skipped in a row": self.skipped, "averaged": averaged}
            state = {**counts, "config": self.config.to_dict(), **self.identity}
            try:
                self.folder.save(state, tensors, optimizer, self.config.keep_checkpoints)
            except OSError as error:
                if must_succeed:
                    raise
                logger.error("%s Training continues; the earlier checkpoints are kept.", error)
        self.accelerator.wait_for_everyone()


def content_of_run(config: TrainingConfig) -> dict[str, Any]:
    """Return what identifies the content of patch and base weights, None where it is unknown, as on the Hub."""
    patch, model = config.patch, config.model
    found: Any = None
    if isinstance(patch, str):
        found = fingerprint(Path(patch)) if Path(patch).is_dir() else load_patch(patch).patch.to_dict()
    return {
        "the content of patch": found,
        "the content of model": None if model is None else fingerprint(Path(pipeline_source(model))),
    }


@contextmanager
def _stop_request() -> Iterator[list[tuple[int, float]]]:
    """Yield the SIGTERM and Ctrl-C, with their times, that came instead of ending the process; in the main thread only.

    A second Ctrl-C stops at once, but for one within a second: launchers forward what processes got themselves.
    """
    signals = list[tuple[int, float]]()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signals and time.monotonic() - signals[0][1] > 1.0:
            raise KeyboardInterrupt
        signals.append((number, time.monotonic()))
        logger.warning("Saving a checkpoint at the end of this step; Ctrl-C again, after a second, stops at once.")

    with ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGINT):
            if threading.current_thread() is threading.main_thread():
                handlers.callback(signal.signal, number, signal.signal(number, note))
        yield signals
