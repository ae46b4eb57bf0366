"""Fresh models of two layers to train, and samples for them."""

from collections.abc import Callable
from typing import Any

import torch

from mhla_diffusers.families import NoisedBatch, Sample, get_family
from mhla_diffusers.training import InMemoryData, ObjectiveWeights, TrainingConfig
from mhla_diffusers.training.data.batches import NoisedBatches

from .. import models

_SMALL_CROSS_ATTENTION = {"cross_attention_head_dim": 8, "cross_attention_dim": 16}


def tiny_wan(seed: int = 0) -> Any:
    return models.wan(seed=seed, noise=0, in_channels=4, out_channels=4, text_dim=8, num_layers=2)


def tiny_sana(seed: int = 0) -> Any:
    return models.sana(seed=seed, noise=0, attention_head_dim=8, num_layers=2, **_SMALL_CROSS_ATTENTION)


def tiny_dit(seed: int = 0) -> Any:
    return models.dit(seed=seed, noise=0, attention_head_dim=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10)


def wan_data(count: int = 16) -> InMemoryData:
    return _data(count, (4, 2, 8, 8), _text, {"encoder_hidden_states": torch.zeros(3, 8)})


def sana_data(count: int = 16) -> InMemoryData:
    def text(index: int, generator: torch.Generator) -> Sample:
        return {**_text(index, generator), "encoder_attention_mask": torch.tensor([1, 1, 0])}

    empty = {"encoder_hidden_states": torch.zeros(3, 8), "encoder_attention_mask": torch.tensor([1, 0, 0])}
    return _data(count, (4, 8, 8), text, empty)


def dit_data(count: int = 16) -> InMemoryData:
    labels = {"class_labels": torch.tensor(10)}
    return _data(count, (4, 8, 8), lambda index, _: {"class_labels": torch.tensor(index % 10)}, labels)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], InMemoryData]]] = {
    "wan": (tiny_wan, wan_data),
    "sana": (tiny_sana, sana_data),
    "dit": (tiny_dit, dit_data),
}


def one_batch(transformer: Any, data: InMemoryData) -> NoisedBatch:
    process = get_family(transformer).training.process(transformer, 3.0)
    config = settings("unused", batch_size=2)
    return next(NoisedBatches(data, process, config, torch.device("cpu")).from_step(0))


def _data(
    count: int, shape: tuple[int, ...], conditioning: Callable[[int, torch.Generator], Sample], empty: Sample
) -> InMemoryData:
    generator = torch.Generator().manual_seed(1)
    latents = (torch.randn(shape, generator=generator) for _ in range(count))
    return InMemoryData([{"latents": x, **conditioning(i, generator)} for i, x in enumerate(latents)], empty)


def _text(index: int, generator: torch.Generator) -> Sample:
    return {"encoder_hidden_states": torch.randn(3, 8, generator=generator)}


def poisoned_wan_data(*indices: int, value: float = float("nan")) -> InMemoryData:
    """With latents of one value in some samples."""
    data = wan_data()
    samples = [dict(data[place]) for place in range(len(data))]
    for index in indices:
        samples[index]["latents"] = torch.full_like(samples[index]["latents"], value)
    return InMemoryData(samples, data.empty)


def settings(output: object, steps: int = 4, **changes: Any) -> TrainingConfig:
    """Settings of a short run of all weights with the diffusion loss, but for the changes."""
    objectives = ObjectiveWeights(**changes.pop("objectives", {"diffusion": 1.0}))
    usual: dict[str, Any] = {"learning_rate": 1e-3, "trainable": "all", "batch_size": 2}
    return TrainingConfig(output=str(output), steps=steps, objectives=objectives, **{**usual, **changes})
