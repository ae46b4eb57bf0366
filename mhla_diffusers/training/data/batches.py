"""From samples to noised batches. A sample maps names to tensors: ``latents`` as the transformer takes them,
(C, F, H, W) or (C, H, W), and arguments of its forward, such as ``encoder_hidden_states`` (L, channels).
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from ...families import DiffusionProcess, NoisedBatch, Sample
from ...generation.noise import generator_for
from ..config import TrainingConfig
from .times import inside_unit_interval, random_quantiles

CAPTION = "caption-"
"""Beginning of the names of conditioning of a sample's second caption, third, and so on, such as "caption-1/…"."""


_Forward = tuple[int, int, list[int]]
"""Step, position in its batch of a forward's first sample, and indices of the forward's samples."""


class TrainingData(Protocol):
    """Samples to train on."""

    empty: Sample | None
    """Conditioning of the empty prompt, for prompt dropout; None where there is none."""
    shapes: Sequence[tuple[int, ...]]
    """Shape of the latents of every sample; a batch has samples of one shape only."""
    weights: Sequence[float]
    """How often an epoch has every sample, at least 1: with 2.25 twice, or by chance thrice."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class InMemoryData(list[Sample]):
    """Samples in memory."""

    def __init__(self, samples: Sequence[Sample], empty: Sample | None = None) -> None:
        super().__init__(samples)
        self.empty = empty
        self.shapes: Sequence[tuple[int, ...]] = [tuple(sample["latents"].shape) for sample in samples]
        self.weights: Sequence[float] = [1.0] * len(samples)


def batches_from(
    step: int, shapes: Sequence[tuple[int, ...]], batch_size: int, seed: int, weights: Sequence[float]
) -> Iterator[list[int]]:
    """Yield the indices of the samples of a step and of those after it, without end; they depend on seed and step.

    Every epoch shuffles the samples, groups them into batches of one shape each, and shuffles the batches. Samples that
    fill no batch wait for the next epoch. ``batch_size`` counts all processes and accumulated forwards.
    """
    average = torch.tensor(weights, dtype=torch.float64)
    begun: dict[tuple[int, ...], list[int]] = {}
    for epoch in count():
        chance = torch.rand(len(shapes), generator=generator_for(seed, "weights", epoch), dtype=torch.float64)
        drawn = torch.arange(len(shapes)).repeat_interleave((average + chance).int())
        generator, batches = generator_for(seed, "order", epoch), []
        for index in drawn[torch.randperm(len(drawn), generator=generator)].tolist():
            begun.setdefault(shapes[index], []).append(index)
            if len(begun[shapes[index]]) == batch_size:
                batches.append(begun.pop(shapes[index]))
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        yield from (batches[place] for place in shuffled[step:])
        step = max(0, step - len(batches))


class NoisedBatches:
    """The noised batches of one process of several, to train on and to validate on.

    The last ``config.validation.samples`` samples of the data are held out. Noise, time and prompt dropout of a sample
    depend only on the seed, the step and its position in the step's batch, so any number of processes gives the same.
    ``together`` is the number of latent frames that share a time, see :mod:`mhla_diffusers.training.data.times`.
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
        self.process, self.config, self.device = process, config, device
        self.rank, self.processes = rank, processes
        self._data, self.together = data, together
        self.training_samples = len(data) - config.validation.samples

    def from_step(self, step: int) -> Iterator[NoisedBatch]:
        """Yield the batches of all forwards after some updates, without end; ValueError or OSError for damaged data."""
        config, size = self.config, self.config.batch_size
        shapes, weights = self._data.shapes[: self.training_samples], self._data.weights[: self.training_samples]
        needed = size * config.gradient_accumulation * self.processes

        def forwards() -> Iterator[_Forward]:
            for at, chosen in enumerate(batches_from(step, shapes, needed, config.seed, weights), start=step):
                for first in range(self.rank * size, needed, size * self.processes):
                    yield at, first, chosen[first : first + size]

        loader: DataLoader[Any] = DataLoader(
            _Batches(self._data, config.seed),
            batch_size=None,
            sampler=forwards(),
            num_workers=config.workers,
            worker_init_fn=_ignore_interrupts,
        )
        for at, first, batch in loader:
            if isinstance(batch, Exception):
                raise batch
            yield self._noise(batch, at, first)

    def _noise(self, batch: dict[str, torch.Tensor], step: int, first: int) -> NoisedBatch:
        latents = batch.pop("latents").float()
        noise, quantiles, dropped = [], [], []
        for position in range(first, first + len(latents)):
            generator = generator_for(self.config.seed, "noise", step, position)
            if self.together is None:
                quantiles.append(inside_unit_interval(torch.rand((), dtype=torch.float64, generator=generator)))
            else:
                quantiles.append(random_quantiles(latents.shape[2], self.together, generator))
            dropped.append(torch.rand((), generator=generator) < self.config.prompt_dropout)
            noise.append(torch.randn(latents.shape[1:], generator=generator))
        if self._data.empty is not None:
            batch = drop_prompts(batch, self._data.empty, torch.stack(dropped))
        return self.process.make_batch(
            latents.to(self.device),
            torch.stack(noise).to(self.device),
            torch.stack(quantiles).to(self.device),
            _on_device(batch, self.device),
        )

    def held_out(self) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield whether it counts, latents, fixed noise and conditioning of every held-out sample of this process."""
        for place in range(self.training_samples + self.rank, len(self._data) + self.rank, self.processes):
            index = min(place, len(self._data) - 1)  # the last again, for as many forwards in all processes
            sample = _on_device(stack_samples([with_one_caption(self._data[index], 0)]), self.device)
            latents = sample.pop("latents")
            noise = torch.randn(latents.shape, generator=generator_for(self.config.seed, "validation", index))
            yield place == index, latents, noise.to(self.device), sample


def _ignore_interrupts(worker: int) -> None:
    """The main process needs its workers after Ctrl-C, until it has stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Batches(Dataset[Any]):
    """Batches, each asked for by its forward."""

    def __init__(self, data: TrainingData, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, forward: _Forward) -> tuple[int, int, dict[str, torch.Tensor] | Exception]:
        """Read a batch, or return the exception: if raised, workers would send only the text of its traceback."""
        step, first, indices = forward
        samples = []
        try:
            for place, index in enumerate(indices, start=first):
                draw = generator_for(self._seed, "caption", step, place).initial_seed()
                samples.append(with_one_caption(self._data[index], draw))
            return step, first, stack_samples(samples)
        except (ValueError, OSError) as error:
            return step, first, error


def with_one_caption(sample: Sample, draw: int) -> Sample:
    """Return a sample with the conditioning of one of its captions; names of others begin with :data:`CAPTION`."""
    plain = {name: tensor for name, tensor in sample.items() if not name.startswith(CAPTION)}
    prefixes = ["", *sorted({f"{name.split('/')[0]}/" for name in sample.keys() - plain.keys()})]
    chosen = prefixes[draw % len(prefixes)]
    return plain | {name.removeprefix(chosen): sample[name] for name in sample if chosen and name.startswith(chosen)}


def stack_samples(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Stack samples that hold the same tensors in the same shapes, each (B, ...); KeyError where one lacks a name."""
    names = {name for sample in samples for name in sample}
    return {name: torch.stack([sample[name] for sample in samples]) for name in sorted(names)}


def drop_prompts(
    conditioning: Mapping[str, torch.Tensor], empty: Sample, dropped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Replace the conditioning, each (B, ...), of the samples dropped, bool (B,), by the empty prompt's, each (...).

    Conditioning that the empty prompt lacks, such as a picture's, is kept.
    """
    return {
        name: torch.where(dropped.view(-1, *[1] * (tensor.ndim - 1)), empty[name].to(tensor.dtype), tensor)
        if name in empty
        else tensor
        for name, tensor in conditioning.items()
    }


def _on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Move tensors, floating-point ones as float32."""
    return {name: (x.float() if x.is_floating_point() else x).to(device) for name, x in tensors.items()}
