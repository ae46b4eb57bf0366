"""One stage at work: its optimizer and learning rates, its updates, its moving average."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..families import NoisedBatch, get_family
from ..patching import mhla_layers, register_mixing_clip
from .config import OptimizerName, StageConfig, TrainingConfig
from .objectives import LOSSES, Objectives
from .run_folder import Tensors
from .sharding import gathered, is_sharded, placed_like
from .trainable import is_mixing, set_trainable, trainable_names


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
        self._optimizer = _make_optimizer(self.trained, stage, config)
        if mhla_layers(self.model):
            register_mixing_clip(self._optimizer, self.model)
        if self.in_parts:
            self._prepared = accelerator.prepare_optimizer(self._optimizer)
        else:
            self.model, self._prepared = accelerator.prepare(self.model, self._optimizer)
        self._schedule = _make_schedule(self._optimizer, stage, first_step)
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
        groups = self._accelerator.num_processes // self._objectives.processes
        speed = tokens * groups / (time.perf_counter() - started)
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
        moments = _optimizer_state(self._optimizer, self.trained)
        if self._average is None:
            return {"optimizer": moments}
        shadows = zip(self.trained, self._average.shadow_params, strict=True)
        average = {name: gathered(shadow) for name, shadow in shadows}
        average["updates"] = torch.tensor(self._average.optimization_step)
        return {"optimizer": moments, "ema": average}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensors]) -> None:
        """The inverse of :meth:`state`."""
        _load_optimizer_state(self._optimizer, self.trained, state["optimizer"])
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


def optimizer_class(name: OptimizerName) -> type[torch.optim.Optimizer]:
    """The class behind a name in the configuration.

    ``adamw8bit`` keeps both moments in 8 bits, in blocks of 256 values, but for parameters of less than 4096 values.
    It was tried on a CPU only.

    Raises:
        ImportError: bitsandbytes is missing.
    """
    if name == "adamw":
        return torch.optim.AdamW
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "optimizer=adamw8bit needs bitsandbytes: pip install mhla_diffusers[adamw8bit], or set optimizer: adamw."
        ) from error
    chosen: type[torch.optim.Optimizer] = AdamW8bit
    return chosen


def _make_optimizer(
    trained: dict[str, nn.Parameter], stage: StageConfig, config: TrainingConfig
) -> torch.optim.Optimizer:
    """An optimizer of two parameter groups: the mixing matrices, λ and β are the second.

    Args:
        trained: parameters by name.
        stage: has the learning rates.
        config: has kind and weight decay.

    Raises:
        ImportError: see :func:`optimizer_class`.
    """
    mixing = [parameter for name, parameter in trained.items() if is_mixing(name)]
    rest = [parameter for name, parameter in trained.items() if not is_mixing(name)]
    mixing_rate = stage.mixing_learning_rate or stage.learning_rate
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr": stage.learning_rate, "initial_lr": stage.learning_rate},
        {"params": mixing, "lr": mixing_rate, "initial_lr": mixing_rate, "weight_decay": 0.0},
    ]
    make: Any = optimizer_class(config.optimizer)
    optimizer: torch.optim.Optimizer = make(groups, weight_decay=config.weight_decay)
    return optimizer


def _make_schedule(
    optimizer: torch.optim.Optimizer, stage: StageConfig, first_step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then what the stage says.

    Args:
        optimizer: of the stage.
        stage: settings of the stage.
        first_step: updates of this stage that an earlier run did.
    """
    from diffusers.optimization import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    last = first_step - 1
    schedule: torch.optim.lr_scheduler.LambdaLR
    if stage.scheduler == "cosine":
        schedule = get_cosine_schedule_with_warmup(optimizer, stage.warmup_steps, stage.steps, last_epoch=last)
    else:
        schedule = get_constant_schedule_with_warmup(optimizer, stage.warmup_steps, last_epoch=last)
    return schedule


def _optimizer_state(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]) -> Tensors:
    """Its state, "<parameter>/<part>" → tensor on the CPU; of a sharded model as :func:`gathered` says."""
    return {
        f"{name}/{part}": _saved(part, value)
        for name, parameter in trained.items()
        for part, value in optimizer.state[parameter].items()
    }


@torch.no_grad()
def _load_optimizer_state(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], tensors: Tensors) -> None:
    """The inverse of :func:`_optimizer_state`."""
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        parameter = trained[name]
        if part == "step":  # a float32 tensor for AdamW, a whole number for AdamW8bit
            optimizer.state[parameter][part] = value if value.is_floating_point() else int(value)
        else:
            optimizer.state[parameter][part] = placed_like(value, parameter)


def _saved(part: str, value: torch.Tensor | int) -> torch.Tensor:
    if isinstance(value, int):
        return torch.tensor(value)
    if part.startswith("qmap"):  # one table for all parameters, which safetensors would not write twice
        return gathered(value).clone()
    return gathered(value)
