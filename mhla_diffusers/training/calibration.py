"""Exact tiles that a run must choose before its first update, on the data that it trains on."""

import logging

import torch
from torch import nn

from ..families import DiffusionProcess, predict
from ..generation.noise import generator_for
from ..patching import calibrate_sparse, mhla_layers
from .config import TrainingConfig
from .latents.data import TrainingData, on_device

logger = logging.getLogger(__name__)

_SAMPLES = 16
"""Training samples, each at a timestep of its own."""


def calibrate_fresh_tiles(
    transformer: nn.Module, data: TrainingData, process: DiffusionProcess, config: TrainingConfig, only_lists: bool
) -> None:
    """Calibrate a patch with exact tiles that has not been, in place; any other is left alone.

    Args:
        transformer: with its original weights.
        data: samples; the last ``config.validation.samples`` are left out.
        process: makes batches.
        config: has the seed of the noise, and the precision: frozen weights may be bfloat16, samples are float32.
        only_lists: leave a patch alone whose tiles are chosen without calibration; it begins with λ and β as they are.
            For a model that is still on the CPU, where running it unpatched would take too long.
    """
    layers = mhla_layers(transformer).values()
    if only_lists and all(layer.sparse is None or layer.sparse.is_ready for layer in layers):
        return
    if not any(layer.needs_calibration for layer in layers):
        return
    device, training_samples = next(transformer.parameters()).device, len(data) - config.validation.samples
    count = min(_SAMPLES, training_samples)
    logger.info("Calibrating exact tiles on %d training samples.", count)

    def run() -> None:
        for index in range(count):
            # spread over the data, whose neighbours may be cut from one video
            sample = on_device({k: x[None] for k, x in data[index * training_samples // count].items()}, device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(config.seed, "calibration", index)).to(device)
            quantile = torch.tensor([(index + 0.5) / count], dtype=torch.float64, device=device)
            predict(transformer, process.make_batch(latents, noise, quantile, sample))

    # not the accelerator's, which is of another device where the model is still on the CPU
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16", cache_enabled=False):
        found = calibrate_sparse(transformer, run)
    if found:
        logger.info("\n%s", found)
