"""What is done with fixed noise: the held-out loss, and samples of prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..families import Clip, predict, trained_family
from ..generation.pixels import opened_video, read_picture
from ..generation.record import write_sample
from ..patching import in_every_step
from .data.batches import NoisedBatches
from .data.times import even_quantiles, frames_together

Sampler = Callable[[nn.Module, Path], None]
"""Generates with the transformer into a folder."""


@torch.no_grad()
def validation_loss(transformer: nn.Module, batches: NoisedBatches) -> torch.Tensor:
    """Sum the training losses of a process's held-out samples, at fixed timesteps and with fixed noise: float64 ()."""
    count = batches.config.validation.timesteps
    quantiles = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(batches.device)
    together = frames_together(transformer)
    total = torch.zeros((), dtype=torch.float64, device=batches.device)
    for latents, noise, conditioning in batches.held_out():
        for quantile in quantiles:
            times = quantile if together is None else even_quantiles(quantile, latents.shape[2], together)
            batch = batches.process.make_batch(latents, noise, times[None], conditioning)
            with in_every_step():
                prediction = predict(transformer, batch)
            total += batches.process.loss(prediction, batch).double().squeeze(0) / count
    return total


class PromptSampler:
    """Generates a PNG or MP4 for each prompt, from the same noise every time; ValueError for an unknown class of DiT.

    The transformer in training takes the place of ``component`` of the pipeline.
    """

    def __init__(
        self, pipe: Any, prompts: Sequence[str], clip: Clip, steps: int, component: str = "transformer"
    ) -> None:
        self._pipe, self._prompts, self._component = pipe, prompts, component
        self._family = trained_family(getattr(pipe, component))
        self._frames_per_second = round(clip.fps)
        self._settings = {**self._family.calling.clip_arguments(pipe, clip), "num_inference_steps": steps}
        pipe.set_progress_bar_config(disable=True)
        self._family.calling.prompt_arguments(pipe, prompts)  # refuses before the training, not at its first samples

    @torch.no_grad()
    def __call__(self, transformer: nn.Module, folder: Path) -> None:
        """Write ``00.png`` or ``00.mp4`` and so on into a folder."""
        setattr(self._pipe, self._component, transformer)
        training = transformer.training
        transformer.eval()
        try:
            for number, prompt in enumerate(self._prompts):
                generator = torch.Generator().manual_seed(0)
                (sample,) = self._family.calling.call(self._pipe, [prompt], [generator], **self._settings)
                write_sample(sample, folder / f"{number:02d}{self._family.calling.suffix}", self._frames_per_second)
        finally:
            transformer.train(training)


def show_samples(tracker: Any, folder: Path, step: int) -> None:
    """Show the pictures in a folder, and all frames of its videos, in a tracker of accelerate."""
    layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".mp4":
            with opened_video(file) as (container, stream):
                pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        else:
            pictures = [np.asarray(read_picture(file))]
        tracker.log_images({f"samples/{file.stem}": np.stack(pictures)}, step=step, **layout)
