"""From samples to noised batches."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..config import TrainingConfig
from .data import BatchOrder, ForwardBatches, Sample, TrainingData, stack_samples
from ...families.processes import DiffusionProcess, NoisedBatch
from ...generation.noise import generator_for


class NoisedBatches:
    """The noised batches of one process.

    Noise, time and prompt dropout of a sample depend on the seed, the step and its position in the step's batch, so
    they are the same for any number of processes.

    Args:
        data: all samples; the last ``config.validation.samples`` of them are left out.
        process: how the family was trained.
        config: settings.
        device: where batches go.
        rank: index of this process.
        processes: how many there are.

    Raises:
        ValueError: if nothing is left to train on, or prompts are to be dropped but the data has no empty prompt.
    """

    def __init__(
        self,
        data: TrainingData,
        process: DiffusionProcess,
        config: TrainingConfig,
        device: torch.device,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        if len(data) <= config.validation.samples:
            raise ValueError(
                f"The data holds {len(data)} samples and validation.samples={config.validation.samples} of them are "
                "held out, which leaves none to train on."
            )
        if config.prompt_dropout > 0 and data.empty is None:
            raise ValueError(
                f"prompt_dropout={config.prompt_dropout} needs the empty prompt's conditioning, which the data lacks; "
                "encode the data with it, or set prompt_dropout: 0."
            )
        self._data = data
        self._process = process
        self._config = config
        self._device = device
        self._rank = rank
        self._processes = processes
        self.training_samples = len(data) - config.validation.samples
        size = config.batch_size * config.gradient_accumulation * processes
        self._order = BatchOrder(data.shapes[: self.training_samples], size, config.seed)

    def from_step(self, step: int) -> Iterator[NoisedBatch]:
        """The batch of every forward, beginning with the first one of a step, without end."""
        config = self._config
        sampler = ForwardBatches(self._order, step, config.batch_size, self._rank, self._processes)
        loader: DataLoader[Sample] = DataLoader(
            self._data,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=stack_samples,
            num_workers=config.workers,
        )
        for forward, batch in enumerate(loader, start=step * config.gradient_accumulation):
            this_step, accumulated = divmod(forward, config.gradient_accumulation)
            first = (accumulated * self._processes + self._rank) * config.batch_size
            yield self._noise(batch, this_step, first)

    def _noise(self, batch: dict[str, torch.Tensor], step: int, first: int) -> NoisedBatch:
        latents = batch.pop("latents").float()
        noise, quantiles, dropped = [], [], []
        for position in range(first, first + len(latents)):
            generator = generator_for(self._config.seed, "noise", step, position)
            quantiles.append(_inside_unit_interval(torch.rand((), dtype=torch.float64, generator=generator)))
            dropped.append(torch.rand((), generator=generator) < self._config.prompt_dropout)
            noise.append(torch.randn(latents.shape[1:], generator=generator))
        conditioning = batch
        if self._data.empty is not None:
            conditioning = drop_prompts(batch, self._data.empty, torch.stack(dropped))
        return self._process.make_batch(
            latents.to(self._device),
            torch.stack(noise).to(self._device),
            torch.stack(quantiles).to(self._device),
            _on_device(conditioning, self._device),
        )


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
        last = len(self._data) - 1
        for start in range(self._first, len(self._data), processes):
            index = min(start + rank, last)
            counted = start + rank <= last
            sample = _on_device({name: tensor[None] for name, tensor in self._data[index].items()}, device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(self._seed, "validation", index)).to(device)
            for quantile in self._quantiles.to(device):
                batch = self._process.make_batch(latents, noise, quantile[None], sample)
                loss = self._process.loss(batch.predict(transformer), batch)
                total += counted * loss.double().squeeze(0) / len(self._quantiles)
        return total


def drop_prompts(
    conditioning: Mapping[str, torch.Tensor], empty: Sample, dropped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Replace the conditioning of some samples by the empty prompt's.

    Args:
        conditioning: each (B, ...).
        empty: of the same names, each (...).
        dropped: bool (B,).
    """
    return {
        name: torch.where(dropped.view(-1, *[1] * (tensor.ndim - 1)), empty[name].to(tensor.dtype), tensor)
        for name, tensor in conditioning.items()
    }


def _on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Floating-point tensors in float32, whatever they were stored in."""
    return {name: (x.float() if x.is_floating_point() else x).to(device) for name, x in tensors.items()}


def _inside_unit_interval(quantile: torch.Tensor) -> torch.Tensor:
    return quantile.clamp(1e-6, 1 - 1e-6)
