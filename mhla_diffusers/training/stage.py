"""One stage at work: its updates, learning rates and moving average."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..families import NoisedBatch, get_family
from ..patching import mhla_layers, register_mixing_clip
from .config import StageConfig, TrainingConfig
from .objectives import LOSSES, Objectives
from .optimizer import load_optimizer_state, make_optimizer, make_schedule, optimizer_state
from .run_folder import Tensors
from .sharding import gathered, is_sharded, placed_like
from .trainable import set_trainable, trainable_names


@dataclass(frozen=True)
class Update:
    """What came of one update, averaged over all processes."""

    losses: dict[str, float]
    """``loss``, the weighted sum, and its parts; parts of weight 0 are left out."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    """Of all but the mixing matrices."""
    skipped: bool
    """Whether the weights were left alone because loss or gradient was not finite."""
    stop: bool
    """Whether any process wants to stop."""
    tokens_per_second: float
    """Of all processes."""


class StageTraining:
    """Trains one stage: by one process, under DistributedDataParallel, or with weights in parts (FSDP2).

    Args:
        accelerator: of the run.
        objectives: what is minimised; if its transformer is sharded, all that any stage trains takes gradients already.
        config: settings of the run.
        stage: settings of the stage.
        first_step: updates of this stage that an earlier run did.
    """

    def __init__(
        self, accelerator: Any, objectives: Objectives, config: TrainingConfig, stage: StageConfig, first_step: int
    ) -> None:
        from diffusers.training_utils import EMAModel

        self._accelerator = accelerator
        self._objectives = objectives
        self._config = config
        self.model: Any = objectives.transformer
        """What predicts while it is trained."""
        self.in_parts = is_sharded(self.model)
        """Whether all processes must call :meth:`state`."""
        # attention transfer runs layers by themselves, which DistributedDataParallel does not see
        self._averages_gradients = not self.in_parts and not stage.objectives.need_prediction
        if not self.in_parts:
            set_trainable(self.model, stage.trainable)
        names = set(trainable_names(self.model, stage.trainable))
        self.trained = {name: p for name, p in self.model.named_parameters() if name in names}
        self._optimizer = make_optimizer(self.trained, stage, config)
        if mhla_layers(self.model):
            register_mixing_clip(self._optimizer, self.model)
        if self.in_parts:
            self._prepared = accelerator.prepare_optimizer(self._optimizer)
        else:
            self.model, self._prepared = accelerator.prepare(self.model, self._optimizer)
        self._schedule = make_schedule(self._optimizer, stage, first_step)
        self._average = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None

    def update(self, batches: Iterator[NoisedBatch], stop: bool) -> Update:
        """One optimizer update.

        Args:
            batches: gives the batch of every forward.
            stop: whether this process wants to stop.
        """
        started, tokens, rate = time.perf_counter(), 0, float(self._schedule.get_last_lr()[0])
        totals = torch.zeros(len(LOSSES), device=self._accelerator.device)
        for _ in range(self._config.gradient_accumulation):
            batch = next(batches)
            tokens += _tokens(self._objectives.transformer, batch)
            with self._accelerator.accumulate(self.model):
                if self.in_parts:
                    self.model.set_requires_gradient_sync(self._accelerator.sync_gradients)
                losses = self._objectives.backward(self.model, batch, self._accelerator.backward)
            totals += losses / self._config.gradient_accumulation
        wishes = torch.tensor([float(stop)], device=totals.device)
        *means, stops = self._accelerator.reduce(torch.cat([totals, wishes]), reduction="mean").tolist()
        gradient_norm = self._clip_gradients()
        finite = math.isfinite(means[0]) and math.isfinite(gradient_norm)
        if finite:
            self._prepared.step()
            if self._average is not None:
                self._average.step(self.trained.values())
        self._objectives.transformer.zero_grad()
        self._schedule.step()
        weights = {"loss": 1.0, **vars(self._objectives.weights)}
        named = {name: loss for name, loss in zip(LOSSES, means, strict=True) if weights[name]}
        speed = tokens * self._accelerator.num_processes / (time.perf_counter() - started)
        return Update(named, gradient_norm, rate, not finite, stops > 0, speed)

    def _clip_gradients(self) -> float:
        """The norm of the gradients before, over all processes."""
        if self._averages_gradients:
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")
        norm = self._accelerator.clip_grad_norm_(self.trained.values(), self._config.max_gradient_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

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

    def state(self) -> dict[str, Tensors]:
        """Optimizer and moving average as tensors by parameter name, on the CPU.

        If they are in parts, all processes must call it, and the first one gets them.
        """
        moments = optimizer_state(self._optimizer, self.trained)
        if self._average is None:
            return {"optimizer": moments}
        shadows = zip(self.trained, self._average.shadow_params, strict=True)
        average = {name: gathered(shadow) for name, shadow in shadows}
        average["updates"] = torch.tensor(self._average.optimization_step)
        return {"optimizer": moments, "ema": average}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensors]) -> None:
        """The inverse of :meth:`state`."""
        load_optimizer_state(self._optimizer, self.trained, state["optimizer"])
        if self._average is not None:
            for index, (name, parameter) in enumerate(self.trained.items()):
                self._average.shadow_params[index] = placed_like(state["ema"][name], parameter)
            self._average.optimization_step = int(state["ema"]["updates"])

    def close(self) -> None:
        """Free the optimizer and undo the wrapping, so that another stage can begin."""
        self._accelerator.free_memory(self._prepared)
        if not self.in_parts:
            self._accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)


def _tokens(transformer: Any, batch: NoisedBatch) -> int:
    grid = get_family(transformer).token_grid(transformer, batch.hidden_states)
    return len(batch.latents) * torch.Size(grid).numel()
