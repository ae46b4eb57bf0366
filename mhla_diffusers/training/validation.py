"""Validation with fixed noise: the held-out loss, and samples of prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..families import Clip, predict, trained_family
from ..generation.record import write_sample
from ..patching import in_every_step
from .data.batches import NoisedBatches
from .data.times import even_quantiles

Sampler = Callable[[nn.Module, Path], None]
"""Generates with the transformer into a folder."""


@torch.no_grad()
def validation_loss(transformer: nn.Module, batches: NoisedBatches) -> torch.Tensor:
    """Sum the training losses of a process's held-out samples, at fixed timesteps and with fixed noise: float64 ()."""
    count = batches.config.validation.timesteps
    quantiles = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(batches.device)
    total = torch.zeros((), dtype=torch.float64, device=batches.device)
    for counts, latents, noise, conditioning in batches.held_out():
        for quantile in quantiles:
            times = quantile if not batches.together else even_quantiles(quantile, latents.shape[2], batches.together)
            batch = batches.process.make_batch(latents, noise, times[None], conditioning)
            with in_every_step():
                prediction = predict(transformer, batch)
            total += counts * batches.process.loss(prediction, batch).double().squeeze(0) / count
    return total


def prompt_sampler(pipe: Any, prompts: Sequence[str], clip: Clip, steps: int, component: str) -> Sampler:
    """Return a function that writes ``00.png`` or ``00.mp4`` and so on, one per prompt, always from the same noise.

    The transformer in training takes the place of ``component`` in the pipeline. ValueError for an unknown class.
    """
    calling = trained_family(getattr(pipe, component)).calling
    settings = {**calling.clip_arguments(pipe, clip), "num_inference_steps": steps}
    pipe.set_progress_bar_config(disable=True)
    calling.prompt_arguments(pipe, prompts)  # refuses before the training, not at its first samples

    @torch.no_grad()
    def sample(transformer: nn.Module, folder: Path) -> None:
        setattr(pipe, component, transformer)
        training = transformer.training
        transformer.eval()
        for number, prompt in enumerate(prompts):
            (made,) = calling.call(pipe, [prompt], [torch.Generator().manual_seed(0)], **settings)
            write_sample(made, folder / f"{number:02d}{calling.suffix}", round(clip.fps))
        transformer.train(training)

    return sample
