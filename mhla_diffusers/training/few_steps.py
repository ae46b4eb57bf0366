"""Few steps by distribution matching (DMD2 with flow matching): the losses of student and critic.

A student of n steps predicts the latents x from noise at σ₁ = 1, adds fresh noise to come to σ₂, predicts again, and so
on. In training it runs up to one of its steps, drawn for each update; gradients go through the last prediction. x is
noised to a random σ, and what the teacher (with guidance) and the critic (without) make of it gives the gradient

    (x_critic − x_teacher) / mean |x − x_teacher|

which is that of the Kullback-Leibler divergence of the student's samples from the teacher's distribution. The critic
learns to denoise x itself, with the loss that the model was trained with.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..config import Step
from ..families import NoisedBatch, predict
from ..generation.noise import generator_for
from ..patching import mhla_disabled, mhla_layers
from .config import FewStepsConfig
from .latents.data import NoisedBatches
from .roles import Losses, Roles

_LEAST, _MOST = 0.02, 0.98
"""σ that samples are noised to; near 0 and 1 the difference of teacher and critic is uninformative."""


class DistributionMatching:
    """The objective of a stage of few steps.

    Args:
        roles: the student unwrapped, with a teacher and a critic; the process is flow matching.
        settings: of the stage.
        seed: all random numbers follow from it, the update and the place of a sample in the update.
        begin: updates of the stages before.
    """

    def __init__(self, roles: Roles, settings: FewStepsConfig, seed: int, begin: int = 0) -> None:
        self.roles, self.settings, self._seed, self._begin = roles, settings, seed, begin
        self.teacher: Any = roles.teacher
        self.critic: Any = roles.critic
        self.process: Any = roles.process

    def trains_student(self, update: int) -> bool:
        """Whether an update, counted over all stages, trains the student too, and not the critic alone."""
        after = update - self._begin - self.settings.critic_warmup + 1
        return after > 0 and after % self.settings.critic_updates == 0

    def losses(self, batch: NoisedBatch, update: int, sample: int) -> Losses:
        """Yield the losses of student, if it is its turn, and critic.

        Args:
            batch: whose conditioning is used; of the latents only the shape, and channels of a picture.
            update: updates done before, over all stages.
            sample: position of the batch's first sample among those of all processes and forwards of the update.
        """
        count, like = len(self.settings.times), batch.noise[:, : self.process.channels]
        exit_step = int(torch.randint(count, (), generator=generator_for(self._seed, "few steps", update)))
        noise, quantiles = [], []
        for position in range(sample, sample + len(like)):
            generator = generator_for(self._seed, "few steps", update, position)
            noise.append(torch.randn((count + 2, *like.shape[1:]), generator=generator))
            quantiles.append(torch.rand(2, generator=generator))
        drawn = torch.stack(noise, dim=1).to(like.device)
        # uniform, then shifted like the steps of sampling
        times = self.process.shifted(torch.stack(quantiles, dim=1).to(like.device)).clamp(_LEAST, _MOST)
        yield from self.losses_at(batch, [*drawn[: exit_step + 1], *drawn[-2:]], times, self.trains_student(update))

    def losses_at(
        self, batch: NoisedBatch, noise: Sequence[torch.Tensor], times: torch.Tensor, with_student: bool
    ) -> Losses:
        """Yield the losses for given random numbers.

        Args:
            batch: as in :meth:`losses`.
            noise: each (B, C, ...): of the student's steps, then what noises its samples for itself and the critic.
            times: σ that they are noised to, for the student and the critic: (2, B).
            with_student: whether the student is trained too.
        """
        *steps, of_student, of_critic = noise
        with self._attention_at(len(steps) - 1):  # in the backward pass too, in which checkpointing runs it again
            samples = self.samples(batch, steps, with_gradient=with_student)
            if with_student:
                difference = self.difference(samples.detach(), batch, of_student, times[0])
                # its gradient is the difference / number of values, whatever the samples are
                loss = 0.5 * (samples - (samples.detach() - difference)).square().mean()
                yield loss, {"loss": loss, "student": loss, "difference": difference.abs().mean()}
        samples = samples.detach()
        with self.critic.at_work():
            given = self._input(self.process.noised(samples, of_critic, times[1]), times[1], batch)
            with self.roles.autocast():
                velocity = self.critic.predict(given)
            loss = (velocity[:, : samples.shape[1]].to(samples.dtype) - (of_critic - samples)).square().mean()
            yield loss, {"loss": loss, "critic": loss}

    def samples(
        self, batch: NoisedBatch, noise: Sequence[torch.Tensor] | torch.Tensor, with_gradient: bool = False
    ) -> torch.Tensor:
        """Return the student's prediction of the latents after some of its steps: float32, like the latents.

        Args:
            batch: conditioning.
            noise: (B, C, ...) of every step.
            with_gradient: through the last step's prediction.
        """
        latents = noise[0]
        for index, fresh in enumerate(noise):
            time = latents.new_full((len(latents),), self.settings.times[index])
            noised = fresh if index == 0 else self.process.noised(latents, fresh, time)
            is_last = index == len(noise) - 1
            with torch.set_grad_enabled(with_gradient and is_last), self._attention_at(index):
                latents = self._denoise(lambda given: predict(self.roles.student, given), noised, time, batch)
        return latents

    @torch.no_grad()
    def difference(
        self, samples: torch.Tensor, batch: NoisedBatch, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient that leads the samples from the critic's distribution to the teacher's, like them."""
        noised = self.process.noised(samples, noise, time)
        real = self._teach(noised, time, batch)
        with self.critic.at_work():
            fake = self._denoise(self.critic.predict, noised, time, batch)
        size = (samples - real).abs().flatten(1).mean(dim=1).clamp_min(1e-8)
        return (fake - real) / size.view(-1, *[1] * (samples.ndim - 1))

    @torch.no_grad()
    def held_out_loss(self, batches: NoisedBatches) -> torch.Tensor:
        """Return how far the student's samples are from what the guided teacher makes of them: a sum, float64 ().

        Of every held-out sample the prompt is sampled from fixed noise; the summand is the mean squared difference,
        over times at even distances. It does not depend on the critic, and falls too where samples lose detail, so look
        at samples as well.
        """
        process, count = self.process, batches.config.validation.timesteps
        total = torch.zeros((), dtype=torch.float64, device=batches.device)
        for index, counts, latents, noise, conditioning in batches.held_out():
            start = noise[:, : process.channels]
            generator = generator_for(batches.config.seed, "few steps", "validation", index)
            further = torch.randn((len(self.settings.times), *start.shape), generator=generator).to(start.device)
            time = torch.ones(1, device=start.device)
            batch = NoisedBatch(latents, noise, time, latents, process.timestep(time), conditioning)
            samples = self.samples(batch, [start, *further[:-1]])
            for place in range(count):
                time = samples.new_full((1,), _LEAST + (_MOST - _LEAST) * (place + 0.5) / count)
                real = self._teach(process.noised(samples, further[-1], time), time, batch)
                total += counts * (samples - real).square().mean().double() / count
        return total

    def _teach(self, noised: torch.Tensor, time: torch.Tensor, batch: NoisedBatch) -> torch.Tensor:
        """Return the guided teacher's prediction of the latents, like ``noised``."""
        guidance, empty = self.settings.guidance, self.roles.empty
        return self._denoise(lambda given: self.teacher.predict(given, guidance, empty), noised, time, batch)

    def _denoise(
        self, model: Callable[[NoisedBatch], torch.Tensor], noised: torch.Tensor, time: torch.Tensor, batch: NoisedBatch
    ) -> torch.Tensor:
        """Return the latents by the velocity that a model predicts: x_σ − σ v."""
        with self.roles.autocast():
            velocity = model(self._input(noised, time, batch))
        return noised - time.view(-1, *[1] * (noised.ndim - 1)) * velocity[:, : noised.shape[1]].to(noised.dtype)

    def _input(self, noised: torch.Tensor, time: torch.Tensor, batch: NoisedBatch) -> NoisedBatch:
        """Return the input at a time, with the channels of a picture beside what is noised."""
        whole = torch.cat([noised, batch.latents[:, noised.shape[1] :]], dim=1)
        return NoisedBatch(batch.latents, batch.noise, time, whole, self.process.timestep(time), batch.conditioning)

    def _attention_at(self, index: int) -> AbstractContextManager[None]:
        """Context in which the patch attends as in a step: disabled in a dense one."""
        layer = next(iter(mhla_layers(self.roles.student).values()), None)
        step = Step(index, len(self.settings.times))
        if layer is None or not layer.config.is_dense(step):
            return nullcontext()
        return mhla_disabled(self.roles.student)
