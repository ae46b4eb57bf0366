"""One stage at work: its optimizer, learning rates, moving average, and one update."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .config import StageConfig, TrainingConfig
from ..families.processes import DiffusionProcess, NoisedBatch
from .folders import Tensors
from .objectives import (
    diffusion_loss,
    distillation_loss,
    teacher_prediction,
    transfer_attention,
    transfer_attention_in_parts,
)
from .optimizer import make_optimizer
from .sharding import gathered, is_sharded, placed_like
from .teacher import Teacher
from .trainable import set_trainable, trainable_names
from .updates import Updates

_LOSSES = ("loss", "diffusion", "distillation", "transfer")


@dataclass(frozen=True)
class Update:
    """What came of one update, averaged over all processes."""

    losses: dict[str, float]
    """``loss``, the weighted sum, and its parts; parts of weight 0 are left out."""
    gradient_norm: float
    """Before clipping."""
    skipped: bool
    """Whether the weights were left alone because loss or gradient was not finite."""
    stop: bool
    """Whether any process wants to stop."""


class StageTraining:
    """Trains one stage.

    Args:
        accelerator: of the run.
        transformer: the model, unwrapped. If it is sharded, all that any stage trains takes gradients already.
        teacher: of the model; None if no objective needs it.
        process: how the family was trained.
        config: settings of the run.
        stage: settings of the stage.
        first_step: updates of this stage that an earlier run did.
        make_updates: class of the updates, by the way that the processes share the training.
    """

    def __init__(
        self,
        accelerator: Any,
        transformer: nn.Module,
        teacher: Teacher | None,
        process: DiffusionProcess,
        config: TrainingConfig,
        stage: StageConfig,
        first_step: int,
        make_updates: type[Updates],
    ) -> None:
        from diffusers.training_utils import EMAModel

        self._accelerator = accelerator
        self._transformer = transformer
        self._teacher = teacher
        self._process = process
        self._stage = stage
        self._config = config
        self._sharded = is_sharded(transformer)
        if not self._sharded:
            set_trainable(transformer, stage.trainable)
        names = set(trainable_names(transformer, stage.trainable))
        self.trained = {name: p for name, p in transformer.named_parameters() if name in names}
        optimizer = make_optimizer(self.trained, stage, config)
        self._updates = make_updates(accelerator, transformer, self.trained, optimizer, config, stage)
        self.model = self._updates.model
        self._schedule = _make_schedule(optimizer, stage, first_step)
        self._average = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None

    @property
    def learning_rate(self) -> float:
        """Of the next update, for all but the mixing matrices."""
        return float(self._schedule.get_last_lr()[0])

    def update(self, batches: Iterator[NoisedBatch], stop: bool) -> Update:
        """One optimizer update.

        Args:
            batches: gives the batch of every forward.
            stop: whether this process wants to stop.
        """
        totals = torch.zeros(len(_LOSSES), device=self._accelerator.device)
        for _ in range(self._config.gradient_accumulation):
            with self._updates.forward():
                totals += self._backward(next(batches)) / self._config.gradient_accumulation
        wishes = torch.tensor([float(stop)], device=totals.device)
        *losses, stops = self._accelerator.reduce(torch.cat([totals, wishes]), reduction="mean").tolist()
        gradient_norm, stepped = self._updates.step(math.isfinite(losses[0]))
        if stepped and self._average is not None:
            self._average.step(self.trained.values())
        self._schedule.step()
        weights = {"loss": 1.0, **vars(self._stage.objectives)}
        named = {name: loss for name, loss in zip(_LOSSES, losses, strict=True) if weights[name]}
        return Update(named, gradient_norm, not stepped, stops > 0)

    def _backward(self, batch: NoisedBatch) -> torch.Tensor:
        """Accumulate the gradients of one forward; return the losses in the order of ``_LOSSES``."""
        weights = self._stage.objectives
        parts = torch.zeros(len(_LOSSES), device=batch.latents.device)
        target = None
        if weights.transfer:
            assert self._teacher is not None
            transfer = transfer_attention_in_parts if self._sharded else transfer_attention
            with self._accelerator.autocast():
                parts[3], target = transfer(
                    self._transformer,
                    self._teacher,
                    batch,
                    lambda loss: self._updates.backward(weights.transfer * loss),
                )
        elif weights.distillation:
            assert self._teacher is not None
            with self._accelerator.autocast():
                target = teacher_prediction(self._transformer, self._teacher, batch)
        if weights.need_prediction:
            with self._accelerator.autocast():
                prediction = batch.predict(self.model)
            loss = torch.zeros((), device=prediction.device)
            if weights.diffusion:
                part = diffusion_loss(self._process, prediction, batch)
                loss, parts[1] = loss + weights.diffusion * part, part.detach()
            if weights.distillation:
                assert target is not None
                part = distillation_loss(prediction, target)
                loss, parts[2] = loss + weights.distillation * part, part.detach()
            self._updates.backward(loss)
        parts[0] = weights.diffusion * parts[1] + weights.distillation * parts[2] + weights.transfer * parts[3]
        return parts

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the context the model has the moving average of its weights, where one is kept."""
        if self._average is None:
            yield
            return
        self._average.store(self.trained.values())
        self._average.copy_to(self.trained.values())
        try:
            yield
        finally:
            self._average.restore(self.trained.values())

    @property
    def in_parts(self) -> bool:
        """Whether all processes must call :meth:`state`."""
        return self._updates.parts

    def state(self) -> dict[str, Tensors]:
        """Optimizer and moving average as tensors by parameter name, on the CPU.

        If they are in parts, all processes must call it, and the first one gets them.
        """
        moments = self._updates.state()
        if self._average is None:
            return {"optimizer": moments}
        shadows = zip(self.trained, self._average.shadow_params, strict=True)
        average = {name: gathered(shadow) for name, shadow in shadows}
        average["updates"] = torch.tensor(self._average.optimization_step)
        return {"optimizer": moments, "ema": average}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensors]) -> None:
        """The inverse of :meth:`state`."""
        self._updates.load_state(state["optimizer"])
        if self._average is not None:
            for index, (name, parameter) in enumerate(self.trained.items()):
                self._average.shadow_params[index] = placed_like(state["ema"][name], parameter)
            self._average.optimization_step = int(state["ema"]["updates"])

    def close(self) -> None:
        """Free the optimizer and undo the wrapping, so that another stage can begin."""
        self._updates.close()


def _make_schedule(
    optimizer: torch.optim.Optimizer, stage: StageConfig, first_step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    from diffusers.optimization import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    last = first_step - 1
    schedule: torch.optim.lr_scheduler.LambdaLR
    if stage.scheduler == "cosine":
        schedule = get_cosine_schedule_with_warmup(optimizer, stage.warmup_steps, stage.steps, last_epoch=last)
    else:
        schedule = get_constant_schedule_with_warmup(optimizer, stage.warmup_steps, last_epoch=last)
    return schedule
