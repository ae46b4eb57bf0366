"""The recipe of a training run, from top to bottom: checks, model, data, loop, validation, checkpoints, result."""

import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from tqdm.contrib.logging import logging_redirect_tqdm

from ..config import LinearConfig, load_patch
from ..devices import is_first_process, launched_on_cpus, launched_processes, peak_memory
from ..errors import check
from ..families import NoisedBatch, trained_family
from ..files import fingerprint, folder_for_results, write_tensors
from ..patching import MHLALayer, find_patched, mhla_layers
from ..patching.weights import LORA
from ..reporting import progress, scaled
from .config import TrainingConfig
from .data.batches import NoisedBatches, TrainingData
from .data.times import frames_together
from .objectives import Losses, guided_prediction, prediction_losses, transfer_losses
from .run_folder import (
    CheckpointError,
    RunFolder,
    TrainingDivergedError,
    find_changes,
    read_state,
    read_tensors,
    step_of,
    write_whole,
)
from .validation import Sampler, show_samples, validation_loss
from .weights import (
    Original,
    has_parameters,
    lora_layers,
    lora_targets,
    make_optimizer,
    optimizer_class,
    prepare_for_training,
    quantize_base,
    quantizer,
    write_weights,
)

logger = logging.getLogger(__name__)

_MEASURED = 4
"""Updates of a process after which its speed and memory are logged; the first two warm up."""


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

    The transformer has its original weights, or those of a loaded patch; of the data the last
    ``config.validation.samples`` are held out. ``resume`` is "latest", which starts a new run if there is no
    checkpoint, or a checkpoint's path; ``sampler`` is called at every validation.

    Raises:
        ValueError, FileNotFoundError, ImportError: as :func:`check_start` and :func:`check_fits`.
        TrainingDivergedError: more than ``config.max_skipped`` updates in a row were skipped, or the run ended with
            skipped updates or with non-finite weights or validation loss; no result is written.
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

    ValueError for a folder that holds another run, changes that a checkpoint does not take, or a launcher that shards
    weights; FileNotFoundError for no such checkpoint; ImportError where a library that the settings name is missing.
    """
    from accelerate.utils import parse_flag_from_env

    checkpoint = RunFolder(config.output).find(resume)
    if checkpoint is not None:  # what the run finds of data, patch and weights is compared later
        find_changes(checkpoint, read_state(checkpoint), {"config": config.to_dict()})
    elif resume == "latest":
        logger.info("%s holds no checkpoint yet: the run begins.", config.output)
    for kind in ("FSDP", "DEEPSPEED"):
        check(
            not parse_flag_from_env(f"ACCELERATE_USE_{kind}"),
            f"accelerate is configured for {kind}, but weights are not sharded here; use "
            "finetune/accelerate/ddp.yaml, and for less memory trainable: lora with base_dtype and adamw8bit.",
        )
    check(
        config.base_dtype is None or launched_processes() == 1,
        f"base_dtype={config.base_dtype!r} runs in one process, but {launched_processes()} were launched; remove it.",
    )
    optimizer_class(config.optimizer)
    if config.base_dtype is not None:
        quantizer(config.base_dtype)
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise ImportError(
            f"tracker={config.tracker} is not installed: pip install {config.tracker}, or set tracker: null. "
            "metrics.jsonl holds the same numbers."
        )
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
            f"patch={config.patch!r} has a LoRA of rank {rank} on {len(has)} layers; train it on with trainable: lora, "
            f"and the lora_rank and lora_layers of the run that made it, not trainable={config.trainable!r}, lora_rank="
            f"{config.lora_rank}, lora_layers={config.lora_layers!r}.",
        )
    frames_together(transformer)  # raises where it cannot be trained
    channels, axes = family.inputs.channels(transformer.config), 4 if family.makes_videos else 3
    for shape in sorted(set(data.shapes)):
        check(
            len(shape) == axes and shape[0] == channels,
            f"The data holds latents of shape {shape}, but {type(transformer).__name__} takes {channels} channels and "
            f"{axes - 1} further axes. Was the data encoded for another model?",
        )
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        for patch in (patched.config for patched in patches):
            if isinstance(patch, LinearConfig):
                patch.layout_on(grid)  # raises if the blocks cannot cut the grid
    held_out = config.validation.samples
    check(
        config.batch_size <= len(data) - held_out,
        f"batch_size={config.batch_size} samples, and validation.samples={held_out} that are held out, are more than "
        f"the {len(data)} of the data; hold out fewer, or encode more.",
    )
    for name, value, off in (("prompt_dropout", config.prompt_dropout, 0.0), ("guidance", config.guidance, 1.0)):
        check(
            value == off or data.empty is not None,
            f"{name}={value} needs the empty prompt's conditioning, which the data lacks; encode the data again with "
            f"it, or set {name}: {off}.",
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
        from diffusers.training_utils import EMAModel

        self.config, self.sampler, self.folder = config, sampler, RunFolder(config.output)
        self.step = 0
        """Updates done, skipped ones included."""
        self.skipped = 0
        """Updates skipped since the last one that was not."""
        self.last_validation: float | None = None

        # device, precision, processes
        self.accelerator = accelerator = _make_accelerator(config)
        self.device: torch.device = accelerator.device
        self.is_first: bool = accelerator.is_main_process
        processes = accelerator.num_processes
        samples = config.batch_size * config.gradient_accumulation * processes
        self._say(
            "Training in %d process(es) on %s: %d samples per update, in %d forward(s) of %d each. It trains %s, "
            "loss = %s.",
            *(processes, self.device.type, samples, config.gradient_accumulation, config.batch_size),
            *(config.trainable, config.objectives),
        )

        # model: what is trained takes gradients, the original model is a context of the same one
        if config.base_dtype is not None:
            quantize_base(transformer, config.base_dtype, self.device)
        self.transformer = transformer.to(self.device)
        self.family = trained_family(transformer)
        self.trained = prepare_for_training(transformer, config)
        self.original = Original(transformer, self.trained if config.needs_teacher else ())

        # data: batches and their noise follow from the seed and the step
        self.process = self.family.training.process(transformer, config.flow_shift)
        together = frames_together(transformer)
        self.batches = NoisedBatches(
            data, self.process, config, self.device, accelerator.process_index, processes, together
        )
        self.empty = data.empty
        self.unpatched_loss: float | None = None
        """Validation loss of the original model on the same batches, before its weights are replaced."""
        if config.validation.samples and config.patch is not None:
            with self.original.at_work(), accelerator.autocast():
                self.unpatched_loss = self._held_out_mean(validation_loss(transformer, self.batches))

        # optimizer and moving average
        optimizer = make_optimizer(transformer, self.trained, config)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.model = accelerator.prepare_model(transformer)
        self.average = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None

        # a checkpoint holds what is trained in place of the whole model
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        self.identity: dict[str, Any] = {
            "config": config.to_dict(),
            "samples per update": samples,
            "training samples": self.batches.training_samples,
            "the content of data": getattr(data, "content", None),
            **content_of_run(config),
        }
        if checkpoint is not None:
            self._resume(checkpoint)
        self.schedule = self._make_schedule(optimizer)
        if config.optimizer == "schedulefree":
            self.optimizer.train()

    def _resume(self, checkpoint: Path) -> None:
        """Load weights, average and optimizer."""
        state = read_state(checkpoint, with_files=True)
        changes = find_changes(checkpoint, state, self.identity)
        self.step, self.skipped = state["step"], state["skipped in a row"]
        for name, value in read_tensors(checkpoint, "weights").items():
            # a copy, since kernels round otherwise where memory is not aligned, as in the file
            self.trained[name].data = value.to(self.device, copy=True)
        self.accelerator.load_state(str(checkpoint))
        if self.average is not None:
            saved = read_tensors(checkpoint, "average")
            self.average.shadow_params = [saved[name].to(self.device, copy=True) for name in self.trained]
            self.average.optimization_step = state["averaged"]
        self._say("Resuming from %s.%s", checkpoint, "".join(f" Changed: {change}." for change in changes))

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Make diffusers' schedule, at the step of the run; rates are those of the settings, also after resuming."""
        from diffusers.optimization import get_scheduler

        config = self.config
        rates = config.learning_rate, config.mixing_learning_rate or config.learning_rate
        for group, rate in zip(optimizer.param_groups, rates, strict=False):  # the second is of mixing matrices
            group["initial_lr"] = rate
        kind = "constant_with_warmup" if config.scheduler == "constant" else config.scheduler
        return get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.steps,
            last_epoch=self.step - 1,
        )

    def run(self) -> TrainingResult:
        """Train to the end, or until a signal."""
        config = self.config
        with self._recording() as bar, _stop_request() as signals:
            if self.step == 0:
                self.validate()
            batches = self.batches.from_step(self.step)
            began, times = self.step, [time.monotonic()]
            while self.step < config.steps:
                must_stop = self.update(batches, bool(signals), bar)
                times.append(time.monotonic())
                if self.step - began == _MEASURED:
                    self._tell_speed((times[-1] - times[2]) / (_MEASURED - 2))
                is_last = self.step == config.steps
                if is_last or self.step % config.validation.every == 0:
                    self.validate()
                if is_last:
                    self._check_end()  # before a last checkpoint replaces a good one
                if is_last or must_stop or self.step % config.checkpoint_every == 0:
                    self.save(must_succeed=is_last or must_stop)
                if must_stop and not is_last:
                    logger.warning("Stopped by a signal after step %d; go on with --resume latest.", self.step)
                    code = 128 + (signals[0] if signals else signal.SIGTERM)
                    return TrainingResult(self.step, finished=False, result=None, exit_code=code)
            if self.is_first:
                with self.averaged():
                    write_whole(self.folder.result, lambda aside: write_weights(self.transformer, config, aside))
            self.accelerator.wait_for_everyone()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return TrainingResult(self.step, finished=True, result=self.folder.result)

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

    def update(self, batches: Iterator[NoisedBatch], stop: bool, bar: Any) -> bool:
        """Do one optimizer update; skipped, but still counted, if loss or gradient is not finite.

        ``stop`` says whether this process wants to stop, the return value whether any does.
        """
        accelerator, config = self.accelerator, self.config
        started, tokens, rate = time.perf_counter(), 0, float(self.schedule.get_last_lr()[0])

        # forward, loss, backward
        totals: dict[str, torch.Tensor] = {}
        for _ in range(config.gradient_accumulation):
            batch = next(batches)
            tokens += len(batch.latents) * math.prod(self.family.token_grid(self.transformer, batch.hidden_states))
            with accelerator.accumulate(self.model):
                losses = self._losses(batch)
                while True:
                    with accelerator.autocast():  # of the forward alone
                        loss, parts = next(losses, (None, {}))
                    if loss is None:
                        break
                    accelerator.backward(loss)
                    for name, part in parts.items():
                        totals[name] = totals.get(name, 0.0) + part.detach() / config.gradient_accumulation
        stops = torch.tensor(float(stop), device=self.device)
        *means, stop_votes = accelerator.reduce(torch.stack([*totals.values(), stops]), reduction="mean").tolist()
        values = dict(zip(totals, means, strict=True))
        if config.objectives.transfer:  # runs single layers, which DistributedDataParallel does not see
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")

        # clip, step
        gradient_norm = float(accelerator.clip_grad_norm_(self.trained.values(), config.max_gradient_norm))
        skipped = not (math.isfinite(values["loss"]) and math.isfinite(gradient_norm))
        if not skipped:
            self.optimizer.step()  # clips the mixing matrices to (0, 1)
            if self.average is not None:
                self.average.step(self.trained.values())
        self.optimizer.zero_grad()
        with warnings.catch_warnings():  # after a skipped first update
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.schedule.step()

        # record
        self.step, self.skipped = self.step + 1, self.skipped + 1 if skipped else 0
        values |= {"gradient_norm": gradient_norm, "learning_rate": rate}
        if skipped:
            numbers = (self.step, values["loss"], gradient_norm)
            logger.warning("Step %d was skipped: not finite (loss %.4g, gradient norm %.4g).", *numbers)
        if self.skipped > config.max_skipped:
            raise self._diverged(f"{self.skipped} updates in a row, up to step {self.step}, were skipped")
        if self.is_first:
            speed = tokens * accelerator.num_processes / (time.perf_counter() - started)
            self.folder.add_metrics({"step": self.step, **values, "skipped": skipped})
            memory = peak_memory(self.device)
            accelerator.log({**values, "tokens_per_second": speed, **memory}, step=self.step)
            shown = {"loss": f"{values['loss']:.4g}", "lr": f"{rate:.3g}", "tokens_per_s": f"{speed:.3g}"}
            bar.set_postfix(shown | {name: scaled(size, 1024, "B") for name, size in memory.items()}, refresh=False)
            bar.update(self.step - bar.n)
        return bool(stop_votes > 0)

    def _tell_speed(self, seconds: float) -> None:
        left = (self.config.steps - self.step) * seconds / 3600
        memory = ", ".join(f"{name} {scaled(size, 1024, 'B')}" for name, size in peak_memory(self.device).items())
        self._say("Step %d: %.3g s per update, %.2g h to go; peak %s.", self.step, seconds, left, memory)

    def _losses(self, batch: NoisedBatch) -> Losses:
        """Yield the losses of a batch, one graph at a time."""
        weights, config = self.config.objectives, self.config
        if weights.transfer:
            yield from transfer_losses(self.transformer, self.original, weights.transfer, batch)
            return
        target = None
        if weights.distillation:
            with self.original.at_work():
                target = guided_prediction(self.transformer, batch, config.guidance, self.empty)
        yield from prediction_losses(self.model, self.process, weights, batch, target)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the average of its weights, if there is one, or schedule-free AdamW's."""
        if self.config.optimizer == "schedulefree":
            kept = [parameter.detach().clone() for parameter in self.trained.values()]
            self.optimizer.eval()
            for layer in mhla_layers(self.transformer).values():
                if isinstance(layer, MHLALayer):
                    layer.clip_mixing_()
            try:
                yield
            finally:
                self.optimizer.train()
                with torch.no_grad():  # bit for bit, which eval() and train() are not
                    for parameter, value in zip(self.trained.values(), kept, strict=True):
                        parameter.copy_(value)
        elif self.average is not None:
            self.average.store(self.trained.values())
            self.average.copy_to(self.trained.values())
            try:
                yield
            finally:
                self.average.restore(self.trained.values())
        else:
            yield

    def validate(self) -> None:
        """Measure the loss on held-out samples and generate samples, if the settings ask for it."""
        with self.averaged(), self.accelerator.autocast():
            if self.config.validation.samples:
                # not wrapped for several processes, which may have different numbers of samples
                loss = self.last_validation = self._held_out_mean(validation_loss(self.transformer, self.batches))
                losses, beside = {"validation_loss": loss}, ""
                if self.unpatched_loss is not None:
                    losses["unpatched_validation_loss"] = self.unpatched_loss
                    beside = f" (unpatched {self.unpatched_loss:.5f})"
                if self.is_first:
                    self.folder.add_metrics({"step": self.step, **losses})
                    self.accelerator.log(losses, step=self.step)
                self._say("Validation loss %.5f%s after step %d.", loss, beside, self.step)
            if self.sampler is not None and self.is_first:
                samples = self.folder.path / "samples" / f"step-{self.step:08d}"
                self.sampler(self.transformer, samples)
                for tracker in self.accelerator.trackers:
                    show_samples(tracker, samples, self.step)
        self.accelerator.wait_for_everyone()

    def _held_out_mean(self, summed: torch.Tensor) -> float:
        """Average losses over all held-out samples, from each process's sums."""
        return float(self.accelerator.reduce(summed, reduction="sum")) / self.config.validation.samples

    def _check_end(self) -> None:
        """Raise if the final model may be bad; a last update that was skipped leaves that open."""
        with self.averaged():
            finite = all(bool(parameter.isfinite().all()) for parameter in self.trained.values())
        if self.skipped:
            raise self._diverged(f"all updates after step {self.step - self.skipped} were skipped")
        if not finite:
            raise self._diverged(f"weights after step {self.step} are not finite")
        if self.last_validation is not None and not math.isfinite(self.last_validation):
            raise self._diverged(f"the validation loss after step {self.step} is {self.last_validation}")

    def _diverged(self, what: str) -> TrainingDivergedError:
        # an update that was not skipped shows that the weights before it worked, not those after it
        worked = self.step - self.skipped
        good = [path for path in self.folder.checkpoints() if step_of(path) < worked]
        from_there = (
            f"{good[-1]} is the last good checkpoint: if a sample of the data is at fault, mend it, remove newer "
            "checkpoints, and go on with --resume latest."
            if good
            else f"{self.folder.path} holds no good checkpoint."
        )
        return TrainingDivergedError(
            f"Training has diverged: {what}. Updates are skipped where loss or gradient is not finite. Lower the "
            f"learning rate or lengthen the warm-up, and start again in another output folder. {from_there}"
        )

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint; a failure raises if it is required, else it is logged."""

        def write(aside: Path) -> None:
            self.accelerator.save_state(str(aside))
            write_tensors(_on_cpu(self.trained), aside / "weights.safetensors")
            if self.average is not None:
                shadows = dict(zip(self.trained, self.average.shadow_params, strict=True))
                write_tensors(_on_cpu(shadows), aside / "average.safetensors")
            elif self.config.optimizer == "schedulefree":  # for who exports the checkpoint; it follows from the rest
                with self.averaged():
                    write_tensors(_on_cpu(self.trained), aside / "average.safetensors")

        if self.is_first:
            averaged = None if self.average is None else self.average.optimization_step
            counts = {"step": self.step, "skipped in a row": self.skipped, "averaged": averaged}
            try:
                self.folder.save({**counts, **self.identity}, write, self.config.keep_checkpoints)
            except CheckpointError as error:
                if must_succeed:
                    raise
                logger.error("%s Training continues; the earlier checkpoints are kept.", error)
        self.accelerator.wait_for_everyone()

    def _say(self, words: str, *values: object) -> None:
        if self.is_first:
            logger.info(words, *values)


def _on_cpu(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def content_of_run(config: TrainingConfig) -> dict[str, Any]:
    """Return what identifies the content of patch and base weights, None where it is unknown, as on the Hub."""
    patch, model = config.patch, config.model
    found: Any = None
    if isinstance(patch, str):
        found = fingerprint(Path(patch)) if Path(patch).is_dir() else load_patch(patch).patch.to_dict()
    return {
        "the content of patch": found,
        "the content of model": None if model is None else fingerprint(Path(model)),
    }


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
    check(
        accelerator.num_processes == launched_processes(),
        f"WORLD_SIZE is {launched_processes()}, but accelerate joined {accelerator.num_processes} processes, so each "
        f"would train separately into {config.output}. Start them with accelerate launch finetune/adapt.py …, or "
        "unset WORLD_SIZE to train with one process.",
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
