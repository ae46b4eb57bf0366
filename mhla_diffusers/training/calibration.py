"""λ and β of a fresh patch, fitted before its first update on the data that it trains on."""

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


def calibrate_fresh(
    transformer: nn.Module, data: TrainingData, process: DiffusionProcess, config: TrainingConfig
) -> None:
    """Fit λ and β of a sparse branch that learns them and is fresh, in place; any other patch is left alone.

    Args:
        transformer: with its original weights, where it is to run.
        data: samples; the last ``config.validation.samples`` are left out.
        process: makes batches.
        config: has the seed of the noise, and the precision: frozen weights may be bfloat16, samples are float32.
    """
    if not any(layer.needs_calibration for layer in mhla_layers(transformer).values()):
        return
    device, training_samples = next(transformer.parameters()).device, len(data) - config.validation.samples
    count = min(_SAMPLES, training_samples)
    logger.info("Fitting λ and β on %d training samples.", count)

    def run() -> None:
        for index in range(count):
            # spread over the data, whose neighbours may be cut from one video
            sample = on_device({k: x[None] for k, x in data[index * training_samples // count].items()}, device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(config.seed, "calibration", index)).to(device)
            quantile = torch.tensor([(index + 0.5) / count], dtype=torch.float64, device=device)
            predict(transformer, process.make_batch(latents, noise, quantile, sample))

    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16", cache_enabled=False):
        calibrate_sparse(transformer, run)
