"""Validation on samples and prompts with fixed noise, and fitting λ and β of a new patch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..families import Clip, DiffusionProcess, get_family, predict, unwrapped
from ..generation.noise import generator_for
from ..generation.record import write_sample
from ..patching import calibrate_sparse, call_context, mhla_layers
from ..patching.few_step_scheduler import FewSteps, sample_in
from .config import TrainingConfig
from .latents.data import TrainingData, on_device
from .latents.times import even_quantiles, frames_together

logger = logging.getLogger(__name__)

Sampler = Callable[[nn.Module, Path], None]
"""Generates with the transformer into a folder."""

_CALIBRATION_SAMPLES = 16


@dataclass(frozen=True)
class HeldOut:
    """What a process measures a held-out loss on: every ``processes``-th sample from ``rank`` on.

    Samples are the last ``config.validation.samples``.
    """

    data: TrainingData
    config: TrainingConfig
    device: torch.device
    rank: int = 0
    processes: int = 1

    @property
    def starts(self) -> range:
        """For each sample of this process, the first that the processes measure at a time."""
        return range(len(self.data) - self.config.validation.samples, len(self.data), self.processes)

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Latents, fixed noise and conditioning of a sample as a batch."""
        return with_noise(self.data, index, self.config.seed, "validation", index, self.device)


@torch.no_grad()
def validation_loss(transformer: nn.Module, process: DiffusionProcess, held_out: HeldOut) -> torch.Tensor:
    """Sum of the training losses of a process's held-out samples, at fixed timesteps and with fixed noise: float64 ().

    All processes run the transformer equally often, as sharding requires; surplus runs are not counted.
    """
    count, last = held_out.config.validation.timesteps, len(held_out.data) - 1
    quantiles = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(held_out.device)
    together = frames_together(unwrapped(transformer))
    total = torch.zeros((), dtype=torch.float64, device=held_out.device)
    for start in held_out.starts:
        latents, noise, conditioning = held_out.sample(min(start + held_out.rank, last))
        for quantile in quantiles:
            times = quantile if together is None else even_quantiles(quantile, latents.shape[2], together)
            batch = process.make_batch(latents, noise, times[None], conditioning)
            with call_context(in_every_step=True):
                prediction = predict(transformer, batch)
            loss = process.loss(prediction, batch).double().squeeze(0)
            total += (start + held_out.rank <= last) * loss / count
    return total


def calibrate_fresh(
    transformer: nn.Module, data: TrainingData, process: DiffusionProcess, config: TrainingConfig
) -> None:
    """Fit λ and β in place if the patch is new and its sparse branch learns them; else do nothing.

    Training samples are run with the original weights, each at a timestep of its own.
    """
    if not any(layer.needs_calibration for layer in mhla_layers(transformer).values()):
        return
    device, training_samples = next(transformer.parameters()).device, len(data) - config.validation.samples
    count = min(_CALIBRATION_SAMPLES, training_samples)
    logger.info("Fitting λ and β on %d training samples.", count)

    def run() -> None:
        for number in range(count):
            index = number * training_samples // count  # spread over the data, because neighbours may be from one video
            latents, noise, conditioning = with_noise(data, index, config.seed, "calibration", number, device)
            quantile = torch.tensor([(number + 0.5) / count], dtype=torch.float64, device=device)
            predict(transformer, process.make_batch(latents, noise, quantile, conditioning))

    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16", cache_enabled=False):
        calibrate_sparse(transformer, run)


def with_noise(
    data: TrainingData, index: int, seed: int, purpose: str, number: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Latents, noise and conditioning of one sample as a batch."""
    sample = on_device({name: tensor[None] for name, tensor in data[index].items()}, device)
    latents = sample.pop("latents")
    noise = torch.randn(latents.shape, generator=generator_for(seed, purpose, number)).to(device)
    return latents, noise, sample


class PromptSampler:
    """Generates a PNG or MP4 for each of some prompts, from the same noise every time.

    Args:
        pipe: pipeline; its transformer is replaced by the one in training.
        prompts: one file each; classes for DiT.
        clip: frames, frames per second and size.
        steps: of the sampler.
        component: which transformer of the pipeline is trained.
        few_steps: how a model samples that is distilled to a few steps, in place of ``steps``.
    """

    def __init__(
        self,
        pipe: Any,
        prompts: Sequence[str],
        clip: Clip,
        steps: int,
        component: str,
        few_steps: FewSteps | None = None,
    ) -> None:
        self._pipe, self._prompts, self._component = pipe, prompts, component
        self._family = get_family(getattr(pipe, component))
        self._frames_per_second = round(clip.fps)
        self._settings = {**self._family.clip_arguments(pipe, clip), "num_inference_steps": steps}
        if few_steps is not None:
            sample_in(pipe, few_steps)
            self._settings |= {"num_inference_steps": len(few_steps.times), **self._family.guidance_arguments(1.0)}
        pipe.set_progress_bar_config(disable=True)
        for prompt in prompts:
            self._family.check_prompt(pipe, prompt)  # before the training, not at its first samples

    @torch.no_grad()
    def __call__(self, transformer: nn.Module, folder: Path) -> None:
        """Write ``00.png`` or ``00.mp4`` and so on into a folder."""
        setattr(self._pipe, self._component, transformer)
        training = transformer.training
        transformer.eval()
        try:
            for number, prompt in enumerate(self._prompts):
                generator = torch.Generator().manual_seed(0)
                (sample,) = self._family.call(self._pipe, [prompt], [generator], **self._settings)
                file = folder / f"{number:02d}{self._family.suffix}"
                write_sample(sample, file, self._frames_per_second)
        finally:
            transformer.train(training)
