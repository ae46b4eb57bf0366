"""From samples to noised batches: which samples, in which order, with which noise.

A sample is a mapping of tensors: ``latents`` as the transformer takes them, (C, F, H, W) or (C, H, W), and the further
arguments of its forward by name, for example ``encoder_hidden_states`` (L, channels) or ``class_labels`` ().
"""

import logging
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from ...families import DiffusionProcess, NoisedBatch, Sample
from ...generation.noise import generator_for
from ..config import TrainingConfig
from .times import inside_unit_interval, random_quantiles

logger = logging.getLogger(__name__)


def _leave_interrupts_alone(worker: int) -> None:
    """Ctrl-C reaches the workers too, which the training loop needs until it has stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class TrainingData(Protocol):
    """Samples to train on."""

    @property
    def empty(self) -> Sample | None:
        """Conditioning of the empty prompt, for prompt dropout; None where there is none."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shape of the latents of every sample; only samples of one shape come together in a batch."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> Sample:
        """One sample."""


class InMemoryData:
    """Samples that are in memory already.

    Args:
        samples: the samples.
        empty: conditioning of the empty prompt.

    Raises:
        ValueError: if a sample has no latents.
    """

    def __init__(self, samples: Sequence[Sample], empty: Sample | None = None) -> None:
        for index, sample in enumerate(samples):
            if "latents" not in sample:
                raise ValueError(f"Sample {index} has no 'latents', only {', '.join(sample)}.")
        self._samples = samples
        self.empty = empty
        self.shapes = [tuple(sample["latents"].shape) for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


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
        together: latent frames that share a time, :func:`mhla_diffusers.training.latents.times.frames_together`.

    Raises:
        ValueError: if nothing is left to train on.
    """

    def __init__(
        self,
        data: TrainingData,
        process: DiffusionProcess,
        config: TrainingConfig,
        device: torch.device,
        rank: int = 0,
        processes: int = 1,
        together: int | None = None,
    ) -> None:
        self._data = data
        self._process = process
        self._config = config
        self._device = device
        self._rank = rank
        self._processes = processes
        self._together = together
        self.training_samples = len(data) - config.validation.samples
        size = config.batch_size * config.gradient_accumulation * processes
        shapes = data.shapes[: self.training_samples]
        self._order = BatchOrder(shapes, size, config.seed)
        for shape, count in Counter(shapes).items() if rank == 0 else ():
            if count < size:
                logger.warning(
                    "An update takes %d samples of one shape, and %d have latents of %s: it takes some of them several "
                    "times, each time with other noise.",
                    *(size, count, shape),
                )

    def from_step(self, step: int) -> Iterator[NoisedBatch]:
        """The batch of every forward, beginning with the first one of a step, without end.

        Raises:
            OSError: data that cannot be read.
            ValueError: data that is damaged, or samples that do not fit into one batch.
        """
        config = self._config
        sampler = ForwardBatches(self._order, step, config.batch_size, self._rank, self._processes)
        loader = DataLoader(
            _Reading(self._data),
            batch_sampler=sampler,
            collate_fn=_stacked,
            num_workers=config.workers,
            worker_init_fn=_leave_interrupts_alone,
        )
        for forward, batch in enumerate(loader, start=step * config.gradient_accumulation):
            if isinstance(batch, Exception):
                raise batch
            this_step, accumulated = divmod(forward, config.gradient_accumulation)
            first = (accumulated * self._processes + self._rank) * config.batch_size
            yield self._noise(batch, this_step, first)

    def _noise(self, batch: dict[str, torch.Tensor], step: int, first: int) -> NoisedBatch:
        latents = batch.pop("latents").float()
        noise, quantiles, dropped = [], [], []
        for position in range(first, first + len(latents)):
            generator = generator_for(self._config.seed, "noise", step, position)
            if self._together is None:
                quantiles.append(inside_unit_interval(torch.rand((), dtype=torch.float64, generator=generator)))
            else:
                quantiles.append(random_quantiles(latents.shape[2], self._together, generator))
            dropped.append(torch.rand((), generator=generator) < self._config.prompt_dropout)
            noise.append(torch.randn(latents.shape[1:], generator=generator))
        conditioning = batch
        if self._data.empty is not None:
            conditioning = drop_prompts(batch, self._data.empty, torch.stack(dropped))
        return self._process.make_batch(
            latents.to(self._device),
            torch.stack(noise).to(self._device),
            torch.stack(quantiles).to(self._device),
            on_device(conditioning, self._device),
        )


class BatchOrder:
    """Which samples make up the batch of every step: a function of the seed and the step alone.

    In every epoch each shape's samples are shuffled and cut into batches, the last one filled up from the front, and
    the batches of all shapes are shuffled.

    Args:
        shapes: shape of every sample.
        batch_size: samples per step, over all processes and accumulated forwards.
        seed: of the order.

    Raises:
        ValueError: if there are no samples.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], batch_size: int, seed: int) -> None:
        if not shapes:
            raise ValueError("There are no samples to train on.")
        self.batch_size = batch_size
        self.seed = seed
        self._groups: dict[tuple[int, ...], list[int]] = {}
        for index, shape in enumerate(shapes):
            self._groups.setdefault(shape, []).append(index)
        self.batches_per_epoch = sum(-(-len(group) // batch_size) for group in self._groups.values())
        self._epoch = -1
        self._batches: list[list[int]] = []

    def __getitem__(self, step: int) -> list[int]:
        """Indices of the samples of a step."""
        epoch, position = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[position]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = generator_for(self.seed, "order", epoch)
        batches = []
        for group in self._groups.values():
            order = [group[place] for place in torch.randperm(len(group), generator=generator).tolist()]
            for start in range(0, len(order), self.batch_size):
                batches.append([order[(start + offset) % len(order)] for offset in range(self.batch_size)])
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


class ForwardBatches:
    """Batch sampler for a ``DataLoader``: the indices of each forward of one process, from a step on, without end.

    Forward a of process p takes samples (a · processes + p) · size to that + size of the step's batch.

    Args:
        order: of the whole run.
        first_step: where to begin.
        size: samples per forward and process.
        process: index of this process.
        processes: how many there are.
    """

    def __init__(self, order: BatchOrder, first_step: int, size: int, process: int, processes: int) -> None:
        self.order = order
        self.first_step = first_step
        self.size = size
        self.process = process
        self.processes = processes

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first_step
        while True:
            batch = self.order[step]
            for start in range(self.process * self.size, len(batch), self.size * self.processes):
                yield batch[start : start + self.size]
            step += 1


class _Reading(Dataset[Sample | Exception]):
    """Samples, or why there is none: what a worker raises would reach the run as a traceback in text.

    Args:
        data: which.
    """

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getitem__(self, index: int) -> Sample | Exception:
        try:
            return self._data[index]
        except (ValueError, OSError) as error:
            return error


def _stacked(samples: Sequence[Sample | Exception]) -> dict[str, torch.Tensor] | Exception:
    read = []
    for sample in samples:
        if isinstance(sample, Exception):
            return sample
        read.append(sample)
    try:
        return stack_samples(read)
    except ValueError as error:
        return error


def stack_samples(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """One batch of samples: every tensor (B, ...).

    Raises:
        ValueError: if the samples do not hold the same tensors in the same shapes.
    """
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            raise ValueError(f"Samples of one batch hold different tensors: {sorted(names)} and {sorted(sample)}.")
        for name in names:
            if sample[name].shape != samples[0][name].shape:
                raise ValueError(
                    f"Samples of one batch hold {name!r} of different shapes: {tuple(samples[0][name].shape)} and "
                    f"{tuple(sample[name].shape)}."
                )
    return {name: torch.stack([sample[name] for sample in samples]) for name in names}


def drop_prompts(
    conditioning: Mapping[str, torch.Tensor], empty: Sample, dropped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Replace the conditioning of some samples by the empty prompt's.

    Args:
        conditioning: each (B, ...).
        empty: of the same names, each (...); what it lacks, such as a picture's, is no part of a prompt and stays.
        dropped: bool (B,).
    """
    return {
        name: torch.where(dropped.view(-1, *[1] * (tensor.ndim - 1)), empty[name].to(tensor.dtype), tensor)
        if name in empty
        else tensor
        for name, tensor in conditioning.items()
    }


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Floating-point tensors in float32, whatever they were stored in."""
    return {name: (x.float() if x.is_floating_point() else x).to(device) for name, x in tensors.items()}
