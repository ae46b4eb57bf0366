"""How the transformer in training does: its loss on held-out samples, and what it generates from prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..families import Clip, DiffusionProcess, get_family, predict, unwrapped
from ..generation.noise import generator_for
from ..generation.record import write_sample
from ..patching import patch_in_every_step
from .config import TrainingConfig
from .latents.data import TrainingData, on_device
from .latents.times import even_quantiles, frames_together

Sampler = Callable[[nn.Module, Path], None]
"""Generates with the transformer into a folder."""


class ValidationLoss:
    """The training loss on held-out samples, at fixed timesteps and with fixed noise.

    Args:
        data: all samples; the last ``config.validation.samples`` of them are used.
        process: how the family was trained.
        config: settings.
    """

    def __init__(self, data: TrainingData, process: DiffusionProcess, config: TrainingConfig) -> None:
        self._data = data
        self._process = process
        self._seed = config.seed
        self._first = len(data) - config.validation.samples
        count = config.validation.timesteps
        self._quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count

    @torch.no_grad()
    def sum_over_samples(self, transformer: nn.Module, device: torch.device, rank: int, processes: int) -> torch.Tensor:
        """Sum of the losses of every ``processes``-th held-out sample, from ``rank`` on: float64 ().

        All processes run the transformer equally often, as a sharded one needs it; what is too much is not counted.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        together = frames_together(unwrapped(transformer))
        last = len(self._data) - 1
        for start in range(self._first, len(self._data), processes):
            index = min(start + rank, last)
            counted = start + rank <= last
            sample = on_device({name: tensor[None] for name, tensor in self._data[index].items()}, device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(self._seed, "validation", index)).to(device)
            for quantile in self._quantiles.to(device):
                times = quantile if together is None else even_quantiles(quantile, latents.shape[2], together)
                batch = self._process.make_batch(latents, noise, times[None], sample)
                with patch_in_every_step():
                    prediction = predict(transformer, batch)
                loss = self._process.loss(prediction, batch)
                total += counted * loss.double().squeeze(0) / len(self._quantiles)
        return total


class PromptSampler:
    """Generates a PNG or MP4 for each of some prompts, from the same noise every time.

    Args:
        pipe: pipeline with its own transformer, which the one in training stands in for.
        prompts: one file each; classes for DiT.
        clip: frames, frames per second and size.
        steps: of the sampler.
        component: which transformer of the pipeline is trained.

    Raises:
        ValueError: a prompt that the pipeline cannot be asked for.
    """

    def __init__(self, pipe: Any, prompts: Sequence[str], clip: Clip, steps: int, component: str) -> None:
        self._pipe = pipe
        self._family = get_family(getattr(pipe, component))
        self._prompts = prompts
        self._frames_per_second = round(clip.fps)
        self._settings = {**self._family.clip_arguments(pipe, clip), "num_inference_steps": steps}
        self._component = component
        pipe.set_progress_bar_config(disable=True)
        for prompt in prompts:
            self._family.check_prompt(pipe, prompt)  # refused before the training, not at its first samples

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
