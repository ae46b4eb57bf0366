"""A stage at work: what it trains, and what belongs to it alone."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..families import NoisedBatch
from ..patching import MHLALayer, mhla_layers
from .config import TrainingConfig
from .distributed import gathered, placed_like
from .few_steps import DistributionMatching
from .latents.data import NoisedBatches
from .objectives import Losses, stage_losses
from .optimizer import load_optimizer_state, make_optimizer, make_schedule, optimizer_class, optimizer_state
from .roles import Roles, make_trainable, trainable_names
from .run_folder import Tensors
from .validation import validation_loss


class Stage:
    """Owns the optimizer, schedule and moving average of a stage, and in few steps the critic's optimizer.

    Args:
        config: settings of the run.
        index: number of the stage.
        roles: the transformer in training, and what it is compared with.
        accelerator: wraps the transformer for several processes; None for one that is sharded.
        step: updates done, over all stages.
        saved: file of the checkpoint → its tensors, for a stage that is resumed in its middle.
    """

    def __init__(
        self, config: TrainingConfig, index: int, roles: Roles, accelerator: Any, step: int, saved: dict[str, Tensors]
    ) -> None:
        from diffusers.training_utils import EMAModel

        self.index, self.settings, self.roles = index, config.stages[index], roles
        stage, begin = self.settings, config.end_of(index) - self.settings.steps
        few_steps, names = stage.few_steps, {*trainable_names(roles.student, stage.trainable)}
        self.matching = None if few_steps is None else DistributionMatching(roles, few_steps, config.seed, begin)
        self.critic: dict[str, nn.Parameter] = {} if self.matching is None else self.matching.critic.parameters
        if accelerator is not None:  # else everything that any stage trains already takes gradients
            make_trainable(roles.student, names | self.critic.keys())
        for parameter in self.critic.values():
            parameter.requires_grad_(True)
        self.trained = {name: p for name, p in roles.student.named_parameters() if name in names}
        self.optimizer = make_optimizer(
            roles.student,
            self.trained,
            learning_rate=stage.learning_rate,
            mixing_learning_rate=stage.mixing_learning_rate,
            weight_decay=config.weight_decay,
            kind=config.optimizer,
        )
        self.critic_optimizer: torch.optim.Optimizer | None = None
        if few_steps is not None:
            rate: Any = few_steps.critic_learning_rate or stage.learning_rate
            make: Any = optimizer_class(config.optimizer)
            self.critic_optimizer = make(self.critic.values(), lr=rate, weight_decay=0.0)
        self.averages_itself = config.optimizer == "schedulefree"
        self.model: Any = roles.student if accelerator is None else accelerator.prepare(roles.student)
        """The student as it is called, perhaps wrapped."""
        self.schedule = make_schedule(self.optimizer, stage, step - begin)
        self.average: Any = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None
        if step > begin:
            self._load(saved)

    def trains_student(self, step: int) -> bool:
        """Whether the update after so many trains the student, and not the critic alone."""
        return self.matching is None or self.matching.trains_student(step)

    def losses(self, batch: NoisedBatch, step: int, sample: int) -> Losses:
        """Yield the losses of a batch; step and the position of its first sample determine what few steps draw."""
        if self.matching is None:
            return stage_losses(self.roles, self.settings, self.model, batch)
        return self.matching.losses(batch, step, sample)

    def held_out_loss(self, batches: NoisedBatches) -> torch.Tensor:
        """Sum the validation losses of a process's held-out samples: float64 ()."""
        return validation_loss(self.model, batches) if self.matching is None else self.matching.held_out_loss(batches)

    def step(self, with_student: bool, is_finite: bool) -> None:
        """Update student and critic, unless the update is skipped, then free the gradients and move the schedule on."""
        if is_finite and with_student:
            self.optimizer.step()  # clips the mixing matrices to (0, 1)
            if self.average is not None:
                self.average.step(self.trained.values())
        if is_finite and self.critic_optimizer is not None:
            self.critic_optimizer.step()
        for parameter in (*self.roles.student.parameters(), *self.critic.values()):
            parameter.grad = None
        with warnings.catch_warnings():  # in few steps the student is updated later, and after a skip too
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.schedule.step()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the student has the average of its weights, if there is one, or schedule-free AdamW's."""
        if self.averages_itself:
            trained: Any = self.optimizer
            kept = [parameter.detach().clone() for parameter in self.trained.values()]
            trained.eval()
            for layer in mhla_layers(self.roles.student).values():
                if isinstance(layer, MHLALayer):
                    layer.clip_mixing_()
            try:
                yield
            finally:
                trained.train()
                with torch.no_grad():  # bit for bit, which eval() and train() are not
                    for parameter, value in zip(self.trained.values(), kept, strict=True):
                        parameter.copy_(value)
            return
        if self.average is None:
            yield
            return
        self.average.store(self.trained.values())
        self.average.copy_to(self.trained.values())
        try:
            yield
        finally:
            self.average.restore(self.trained.values())

    def tensors(self) -> dict[str, Tensors]:
        """Return what a checkpoint holds of the stage; with sharding all processes must call it."""
        tensors = {"optimizer": optimizer_state(self.optimizer, self.trained)}
        if self.averages_itself:  # for who exports the checkpoint; it follows from the rest
            with self.averaged_weights():
                tensors["ema"] = {name: gathered(x).clone() for name, x in self.trained.items()}
        if self.average is not None:
            shadows = zip(self.trained, self.average.shadow_params, strict=True)
            tensors["ema"] = {name: gathered(shadow) for name, shadow in shadows}
            tensors["ema"]["updates"] = torch.tensor(self.average.optimization_step)
        if self.critic_optimizer is not None:
            tensors["critic"] = {name: gathered(x) for name, x in self.critic.items()}
            tensors["critic_optimizer"] = optimizer_state(self.critic_optimizer, self.critic)
        return tensors

    @torch.no_grad()
    def _load(self, saved: dict[str, Tensors]) -> None:
        """Load what :meth:`tensors` returned."""
        load_optimizer_state(self.optimizer, self.trained, saved["optimizer"])
        if self.average is not None and "ema" in saved:  # else it begins here
            self.average.shadow_params = [placed_like(saved["ema"][name], p) for name, p in self.trained.items()]
            self.average.optimization_step = int(saved["ema"]["updates"])
        if self.critic_optimizer is not None:
            for name, value in saved["critic"].items():
                self.critic[name].copy_(value)
            load_optimizer_state(self.critic_optimizer, self.critic, saved["critic_optimizer"])
