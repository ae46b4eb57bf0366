"""Few steps by distribution matching (DMD2 with flow matching): the losses of student and critic.

A student of n steps predicts the latents x from noise at σ₁ = 1, adds fresh noise to come to σ₂, predicts again, and so
on. In training it runs up to one of its steps, drawn for each update; gradients go through the last prediction. x is
noised to a random σ, and what the teacher (with guidance) and the critic (without) make of it gives the gradient

    (x_critic − x_teacher) / mean |x − x_teacher|

which is that of the Kullback-Leibler divergence of the student's samples from the teacher's distribution. The critic
learns to denoise x itself, with the loss that the model was trained with.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..families import FlowMatching, NoisedBatch, Sample, predict
from ..generation.noise import generator_for
from ..patching import mhla_disabled, mhla_layers
from ..patching.steps import Step
from .config import FewStepsConfig
from .critic import Critic
from .objectives import Backward, Place, guided, teacher_prediction
from .teacher import Teacher
from .validation import HeldOut

_LEAST, _MOST = 0.02, 0.98
"""σ that samples are noised to: at the ends teacher and critic have nothing to tell, or nothing to tell it from."""


@dataclass(frozen=True)
class FewStepObjective:
    """What a stage of few steps minimises."""

    settings: FewStepsConfig
    process: FlowMatching
    """How the family was trained."""
    transformer: nn.Module
    """The student, unwrapped."""
    teacher: Teacher
    critic: Critic
    empty: Sample | None
    """Conditioning of the empty prompt; None without guidance."""
    seed: int
    begin: int = 0
    """Updates of the stages before."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of the forwards."""

    @property
    def critics(self) -> dict[str, nn.Parameter]:
        """The critic's parameters by name."""
        return self.critic.parameters

    def is_models_turn(self, update: int) -> bool:
        """Whether the student is updated too."""
        after = update - self.begin - self.settings.critic_warmup + 1
        return after > 0 and after % self.settings.critic_updates == 0

    def draws(self, batch: NoisedBatch, place: Place) -> "Draws":
        """The random numbers of a batch."""
        return Draws.of(batch, self.process, len(self.settings.times), self.seed, place)

    def backward(
        self, model: nn.Module, batch: NoisedBatch, place: Place, backward: Backward
    ) -> dict[str, torch.Tensor]:
        """Run one batch forward and backward; the unwrapped model runs, because it plays several roles.

        Returns:
            What :meth:`update` does.
        """
        return self.update(batch, self.draws(batch, place), self.is_models_turn(place.update), backward)

    def update(self, batch: NoisedBatch, draws: "Draws", turn: bool, backward: Backward) -> dict[str, torch.Tensor]:
        """Gradients of the critic, and of the student where it is its turn.

        Args:
            batch: whose conditioning is used; of the latents only the shape, and channels of a picture.
            draws: of this batch.
            turn: of :meth:`is_models_turn`.
            backward: accumulates the gradients of a loss.

        Returns:
            ``loss`` and ``critic``, and where it is the student's turn ``student``, its loss, and ``difference``, the
            mean size of its gradient: float32 () without gradient.
        """
        of_student: dict[str, torch.Tensor] = {}
        with self._attention_of(draws.exit):  # in the backward pass too, in which checkpointing runs it again
            samples = self.samples(batch, draws.noise[: draws.exit + 1], with_gradient=turn)
            if turn:
                gradient = self.gradient(samples.detach(), batch, draws)
                # its gradient is (…) / number of values, whatever the samples are
                student = 0.5 * (samples - (samples.detach() - gradient)).square().mean()
                backward(student)
                of_student = {"student": student.detach(), "difference": gradient.abs().mean()}
        critic = self._train_critic(samples.detach(), batch, draws, backward)
        return {"loss": critic + of_student["student"] if turn else critic, **of_student, "critic": critic}

    def samples(self, batch: NoisedBatch, noise: torch.Tensor, with_gradient: bool = False) -> torch.Tensor:
        """The student's prediction of the latents after some of its steps: float32, like the latents.

        Args:
            batch: conditioning.
            noise: (steps, B, C, ...), of every step.
            with_gradient: of the last step's prediction.
        """
        latents = noise[0]
        for index, fresh in enumerate(noise):
            time = latents.new_full((len(latents),), self.settings.times[index])
            noised = fresh if index == 0 else self.process.noised(latents, fresh, time)
            is_last = index == len(noise) - 1
            with torch.set_grad_enabled(with_gradient and is_last), self._attention_of(index):
                latents = self._clean(lambda one: predict(self.transformer, one), noised, time, batch)
        return latents

    @torch.no_grad()
    def gradient(self, samples: torch.Tensor, batch: NoisedBatch, draws: "Draws") -> torch.Tensor:
        """Of the student's loss in its samples, times their number of values: float32, like the samples."""
        noised = self.process.noised(samples, draws.student_noise, draws.student_time)
        real = self.guided(noised, draws.student_time, batch)
        with self.critic.at_work():
            fake = self._clean(self.critic.predict, noised, draws.student_time, batch)
        size = (samples - real).abs().flatten(1).mean(dim=1).clamp_min(1e-8)
        return (fake - real) / size.view(-1, *[1] * (samples.ndim - 1))

    @torch.no_grad()
    def guided(self, noised: torch.Tensor, time: torch.Tensor, batch: NoisedBatch) -> torch.Tensor:
        """The teacher's prediction of the latents, with guidance: float32, like the samples."""

        def velocity(one: NoisedBatch) -> torch.Tensor:
            found = teacher_prediction(self.transformer, self.teacher, one)
            if self.empty is None or self.settings.guidance == 1:
                return found
            return guided(found, self.transformer, self.teacher, one, self.settings.guidance, self.empty)

        return self._clean(velocity, noised, time, batch)

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, held_out: HeldOut) -> torch.Tensor:
        """How far the student's samples are from what the guided teacher makes of them: a sum, float64 ().

        Of every held-out sample the prompt is sampled from fixed noise; the summand is the mean squared difference,
        over times at even distances. It does not depend on the critic, and falls too where samples lose detail, so look
        at samples as well.
        """
        settings, process, count = self.settings, self.process, held_out.config.validation.timesteps
        total = torch.zeros((), dtype=torch.float64, device=held_out.device)
        for first in held_out.starts:
            if (index := first + held_out.rank) >= len(held_out.data):
                continue
            latents, noise, conditioning = held_out.sample(index)
            start = noise[:, : process.channels]
            generator = generator_for(held_out.config.seed, "few steps", "validation", index)
            further = torch.randn((len(settings.times), *start.shape), generator=generator).to(held_out.device)
            time = torch.ones(1, device=held_out.device)
            batch = NoisedBatch(latents, noise, time, latents, process.timestep(time), conditioning)
            samples = self.samples(batch, torch.cat([start[None], further[:-1]]))
            for place in range(count):
                time = samples.new_full((1,), _LEAST + (_MOST - _LEAST) * (place + 0.5) / count)
                real = self.guided(process.noised(samples, further[-1], time), time, batch)
                total += (samples - real).square().mean().double() / count
        return total

    def _train_critic(
        self, samples: torch.Tensor, batch: NoisedBatch, draws: "Draws", backward: Backward
    ) -> torch.Tensor:
        noise, time = draws.critic_noise, draws.critic_time
        with self.critic.at_work():
            given = self._input(self.process.noised(samples, noise, time), time, batch)
            with self.autocast():
                velocity = self.critic.predict(given)
            loss = (velocity[:, : samples.shape[1]].to(samples.dtype) - (noise - samples)).square().mean()
            backward(loss)
        return loss.detach()

    def _clean(
        self,
        model: Callable[[NoisedBatch], torch.Tensor],
        noised: torch.Tensor,
        time: torch.Tensor,
        batch: NoisedBatch,
    ) -> torch.Tensor:
        """Latents by the velocity that a model predicts: x_σ − σ v."""
        with self.autocast():
            velocity = model(self._input(noised, time, batch))
        return noised - time.view(-1, *[1] * (noised.ndim - 1)) * velocity[:, : noised.shape[1]].to(noised.dtype)

    def _input(self, noised: torch.Tensor, time: torch.Tensor, batch: NoisedBatch) -> NoisedBatch:
        """A forward at a time, with the channels of a picture beside what is noised."""
        beside = batch.latents[:, noised.shape[1] :]
        whole = torch.cat([noised, beside], dim=1) if beside.shape[1] else noised
        return NoisedBatch(batch.latents, batch.noise, time, whole, self.process.timestep(time), batch.conditioning)

    def _attention_of(self, index: int) -> AbstractContextManager[None]:
        """As the patch attends in a step: as before it in the first ``softmax_steps``."""
        layer = next(iter(mhla_layers(self.transformer).values()), None)
        step = Step(index, len(self.settings.times))
        if layer is None or not step.is_among_first(layer.config.softmax_steps):
            return nullcontext()
        return mhla_disabled(self.transformer)


@dataclass(frozen=True)
class Draws:
    """The random numbers of one batch, which follow from the seed, the update and the places in it."""

    exit: int
    """The student's step whose prediction is trained, the same for all samples of an update."""
    noise: torch.Tensor
    """(steps, B, C, ...): where the student starts, and what it adds between its steps."""
    student_time: torch.Tensor
    """(B,), σ at which teacher and critic are compared."""
    student_noise: torch.Tensor
    critic_time: torch.Tensor
    """(B,), σ at which the critic learns."""
    critic_noise: torch.Tensor

    @classmethod
    def of(cls, batch: NoisedBatch, process: FlowMatching, steps: int, seed: int, place: Place) -> "Draws":
        """Of the batch at a place of a run with this seed."""
        exit_step = int(torch.randint(steps, (), generator=generator_for(seed, "few steps", place.update)))
        shape, device = batch.noise[:, : process.channels].shape, batch.noise.device
        noise, quantiles = [], []
        for position in range(place.sample, place.sample + shape[0]):
            generator = generator_for(seed, "few steps", place.update, position)
            noise.append(torch.randn((steps + 2, *shape[1:]), generator=generator))
            quantiles.append(torch.rand(2, generator=generator))
        drawn = torch.stack(noise, dim=1).to(device)
        # uniform, then shifted like the steps of sampling
        even = torch.stack(quantiles, dim=1).to(device)
        times = process.shifted(even).clamp(_LEAST, _MOST)
        return cls(exit_step, drawn[:steps], times[0], drawn[-2], times[1], drawn[-1])
