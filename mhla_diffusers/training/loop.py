"""The training loop."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch import nn

from .config import TrainingConfig
from .latents.data import TrainingData, check_enough
from .run import Run, Start, check_fits
from .validation import Sampler

logger = logging.getLogger(__name__)

_SAME_CTRL_C = 1.0
"""Seconds within which a second SIGINT is the first one, which a launcher hands on to processes that have had it."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    """Updates done."""
    finished: bool
    """False if SIGTERM or Ctrl-C stopped it; then its last checkpoint is of ``step``."""
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
        ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``.
        TrainingDivergedError: more than ``config.max_skipped`` updates in a row were skipped, or the run ended with
            skipped updates, weights or a validation loss that are not finite; then there is no result.
        CheckpointError: the last checkpoint or the result could not be written.
        KeyboardInterrupt: Ctrl-C a second time, before the checkpoint of the first was written.
    """
    start = Start.of(config, resume)
    check_fits(transformer, data, config)
    check_enough(data, config)
    run = Run(transformer, data, config, start, sampler)
    last_stage = len(config.stages) - 1
    stop = _StopRequest()
    result = None
    with run.at_work(), stop.listening():
        for stage in range(len(config.stages)):
            end = config.end_of(stage)
            if run.step >= end and stage != last_stage:
                continue  # done before the run was resumed
            with run.stage(stage) as training:
                if run.step == 0:
                    run.validate(training)
                batches = run.batches.from_step(run.step)
                while run.step < end:
                    update = training.update(batches, stop.made)
                    run.record(update, stage)
                    if run.is_due(config.validation.every):
                        run.validate(training)
                    if run.step == config.total_steps:
                        run.check_end(training)  # before a last checkpoint takes the place of a good one
                    must_save = update.stop or run.step == end
                    if must_save or run.step % config.checkpoint_every == 0:
                        run.save(training, must_succeed=must_save)
                    if update.stop and run.step < config.total_steps:
                        logger.warning("Stopped by a signal after step %d; resume with --resume latest.", run.step)
                        return TrainingResult(run.step, finished=False, result=None)
                if stage == last_stage:
                    result = run.export(training)
    return TrainingResult(run.step, finished=True, result=result)


class _StopRequest:
    """Whether SIGTERM or Ctrl-C has arrived, the request to save and stop. Ctrl-C again stops at once."""

    def __init__(self) -> None:
        self.made = False
        self._interrupted: float | None = None
        """When Ctrl-C came first."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context signals make the request instead of ending the process; in the main thread only."""
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
