"""A stage at work: what it trains, and what belongs to it alone."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..families import NoisedBatch
from ..patching import MHLALayer, mhla_layers
from .config import TrainingConfig
from .distributed import gathered, placed_like
from .objectives import stage_losses
from .optimizer import load_optimizer_state, make_optimizer, make_schedule, optimizer_state
from .roles import Losses, Roles, make_trainable, trainable_names
from .run_folder import Tensors


class Stage:
    """Owns the optimizer, schedule and moving average of a stage.

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
        names = {*trainable_names(roles.student, stage.trainable)}
        if accelerator is not None:  # else everything that any stage trains already takes gradients
            make_trainable(roles.student, names)
        self.trained = {name: p for name, p in roles.student.named_parameters() if name in names}
        self.optimizer = make_optimizer(
            roles.student,
            self.trained,
            learning_rate=stage.learning_rate,
            mixing_learning_rate=stage.mixing_learning_rate,
            weight_decay=config.weight_decay,
            kind=config.optimizer,
        )
        self.averages_itself = config.optimizer == "schedulefree"
        self.model: Any = roles.student if accelerator is None else accelerator.prepare(roles.student)
        """The student as it is called, perhaps wrapped."""
        self.schedule = make_schedule(self.optimizer, stage, step - begin)
        self.average: Any = EMAModel(self.trained.values(), decay=config.ema_decay) if config.ema_decay else None
        if step > begin:
            self._load(saved)

    def losses(self, batch: NoisedBatch) -> Losses:
        """Yield the losses of a batch."""
        return stage_losses(self.roles, self.settings, self.model, batch)

    def step(self, is_finite: bool) -> None:
        """Update the student, unless the update is skipped, then free the gradients and move the schedule on."""
        if is_finite:
            self.optimizer.step()  # clips the mixing matrices to (0, 1)
            if self.average is not None:
                self.average.step(self.trained.values())
        for parameter in self.roles.student.parameters():
            parameter.grad = None
        with warnings.catch_warnings():  # after a skipped first update
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
        return tensors

    @torch.no_grad()
    def _load(self, saved: dict[str, Tensors]) -> None:
        """Load what :meth:`tensors` returned."""
        load_optimizer_state(self.optimizer, self.trained, saved["optimizer"])
        if self.average is not None and "ema" in saved:  # else it begins here
            self.average.shadow_params = [placed_like(saved["ema"][name], p) for name, p in self.trained.items()]
            self.average.optimization_step = int(saved["ema"]["updates"])
