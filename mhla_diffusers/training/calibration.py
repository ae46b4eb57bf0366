"""Exact tiles that a run must choose before its first update, on the data that it trains on."""

import logging

import torch
from torch import nn

from ..families import DiffusionProcess, predict
from ..generation.noise import generator_for
from ..patching import calibrate_exact_tiles, mhla_layers
from .latents.data import TrainingData, on_device

logger = logging.getLogger(__name__)

_SAMPLES = 16
"""Training samples, each at a timestep of its own."""


def calibrate_fresh_tiles(
    transformer: nn.Module,
    data: TrainingData,
    process: DiffusionProcess,
    seed: int,
    device: torch.device,
    training_samples: int,
    only_lists: bool,
) -> None:
    """Calibrate a patch with exact tiles that has not been, in place; any other is left alone.

    Args:
        transformer: with its original weights.
        data: whose first ``training_samples`` are trained on.
        process: makes batches.
        seed: of the noise.
        device: of the transformer.
        training_samples: how many.
        only_lists: leave a patch alone whose tiles are chosen without calibration; it begins with λ and β as they are.
            For a model that is still on the CPU, where running it unpatched would take too long.
    """
    layers = mhla_layers(transformer).values()
    if only_lists and all(layer.exact is None or layer.exact.is_ready for layer in layers):
        return
    if not any(layer.needs_calibration for layer in layers):
        return
    count = min(_SAMPLES, training_samples)
    logger.info("Calibrating exact tiles on %d training samples.", count)

    def run() -> None:
        for index in range(count):
            # spread over the data, whose neighbours may be cut from one video
            sample = on_device({k: x[None] for k, x in data[index * training_samples // count].items()}, device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(seed, "calibration", index)).to(device)
            quantile = torch.tensor([(index + 0.5) / count], dtype=torch.float64, device=device)
            predict(transformer, process.make_batch(latents, noise, quantile, sample))

    found = calibrate_exact_tiles(transformer, run)
    if found:
        logger.info("\n%s", found)
