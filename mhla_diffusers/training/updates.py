"""From losses to updates of the trained weights: what differs with the way that processes share a training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..patching import mhla_layers, register_mixing_clip
from .config import StageConfig, TrainingConfig
from .folders import Tensors
from .optimizer import load_optimizer_state, optimizer_state
from .sharding import is_sharded


class Updates(ABC):
    """The updates of one stage.

    Args:
        accelerator: of the run.
        transformer: the model, unwrapped.
        trained: its trained parameters by name, in float32.
        optimizer: of those parameters.
        config: settings of the run.
        stage: settings of the stage.
    """

    parts: bool
    """Whether the optimizer's state lies in parts over the processes, so that all must call :meth:`state`."""

    def __init__(
        self,
        accelerator: Any,
        transformer: nn.Module,
        trained: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        config: TrainingConfig,
        stage: StageConfig,
    ) -> None:
        self.model: Any = transformer
        """What predicts while it is trained."""
        self._accelerator = accelerator
        self._transformer = transformer
        self._trained = trained
        self._optimizer = optimizer
        self._prepare(config, stage)

    @abstractmethod
    def _prepare(self, config: TrainingConfig, stage: StageConfig) -> None:
        """Wrap model and optimizer as the way of sharing needs it."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Within the context runs one of the forwards, with its backward passes, that an update is made of."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss, divided by the number of forwards."""

    @abstractmethod
    def step(self, loss_is_finite: bool) -> tuple[float, bool]:
        """Update the weights unless loss or gradient is not finite; drop the gradients.

        Args:
            loss_is_finite: the same on all processes.

        Returns:
            The gradient's norm before clipping, over all processes, and whether there was an update.
        """

    @abstractmethod
    def state(self) -> Tensors:
        """The optimizer's state, "<parameter>/<part>" → whole tensor on the CPU of the first process."""

    @abstractmethod
    def load_state(self, tensors: Tensors) -> None:
        """The inverse of :meth:`state`."""

    @abstractmethod
    def close(self) -> None:
        """Leave the transformer as it was, so that another stage can begin."""


class AcceleratedUpdates(Updates):
    """Updates by accelerate: of one process, under DistributedDataParallel, or of weights in parts (FSDP2)."""

    def _prepare(self, config: TrainingConfig, stage: StageConfig) -> None:
        self.parts = is_sharded(self._transformer)
        self._max_norm = config.max_gradient_norm
        # attention transfer runs layers by themselves, which DistributedDataParallel does not see
        self._averages_gradients = not self.parts and not stage.objectives.need_prediction
        if mhla_layers(self._transformer):
            register_mixing_clip(self._optimizer, self._transformer)
        if self.parts:
            self._prepared = self._accelerator.prepare_optimizer(self._optimizer)
        else:
            self.model, self._prepared = self._accelerator.prepare(self._transformer, self._optimizer)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See :class:`Updates`."""
        with self._accelerator.accumulate(self.model):
            if self.parts:
                self.model.set_requires_gradient_sync(self._accelerator.sync_gradients)
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """See :class:`Updates`."""
        self._accelerator.backward(loss)

    def step(self, loss_is_finite: bool) -> tuple[float, bool]:
        """See :class:`Updates`."""
        if self._averages_gradients:
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")
        norm = self._accelerator.clip_grad_norm_(self._trained.values(), self._max_norm)
        gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = loss_is_finite and math.isfinite(gradient_norm)
        if finite:
            self._prepared.step()
        self._transformer.zero_grad()
        return gradient_norm, finite

    def state(self) -> Tensors:
        """See :class:`Updates`."""
        return optimizer_state(self._optimizer, self._trained)

    def load_state(self, tensors: Tensors) -> None:
        """See :class:`Updates`."""
        load_optimizer_state(self._optimizer, self._trained, tensors)

    def close(self) -> None:
        """See :class:`Updates`."""
        self._accelerator.free_memory(self._prepared)
        if not self.parts:
            self._accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
