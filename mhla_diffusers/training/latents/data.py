"""Training samples and their order.

A sample is a mapping of tensors: ``latents`` as the transformer takes them, (C, F, H, W) or (C, H, W), and the further
arguments of its forward by name, for example ``encoder_hidden_states`` (L, channels) or ``class_labels`` ().
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from ...generation.noise import generator_for

Sample = Mapping[str, torch.Tensor]


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
