"""Fresh models of two layers to train, and samples for them."""

from typing import Any

import torch

from mhla_diffusers.training import InMemoryData, ObjectiveWeights, StageConfig, TrainingConfig

from .. import models

_SMALL_CROSS_ATTENTION = {"cross_attention_head_dim": 8, "cross_attention_dim": 16}


def tiny_wan(seed: int = 0) -> Any:
    return models.wan(seed=seed, noise=0, in_channels=4, out_channels=4, text_dim=8, num_layers=2)


def tiny_sana(seed: int = 0) -> Any:
    return models.sana(seed=seed, noise=0, attention_head_dim=8, num_layers=2, **_SMALL_CROSS_ATTENTION)


def tiny_dit(seed: int = 0) -> Any:
    return models.dit(seed=seed, noise=0, attention_head_dim=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10)


def wan_data(count: int = 16) -> InMemoryData:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {
            "latents": torch.randn(4, 2, 8, 8, generator=generator),
            "encoder_hidden_states": torch.randn(3, 8, generator=generator),
        }
        for _ in range(count)
    ]
    return InMemoryData(samples, {"encoder_hidden_states": torch.zeros(3, 8)})


def poisoned_wan_data(*indices: int, value: float = float("nan")) -> InMemoryData:
    """With latents of one value in some samples."""
    data = wan_data()
    samples = [dict(data[place]) for place in range(len(data))]
    for index in indices:
        samples[index]["latents"] = torch.full_like(samples[index]["latents"], value)
    return InMemoryData(samples, data.empty)


def sana_data(count: int = 16) -> InMemoryData:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {
            "latents": torch.randn(4, 8, 8, generator=generator),
            "encoder_hidden_states": torch.randn(3, 8, generator=generator),
            "encoder_attention_mask": torch.tensor([1, 1, 0]),
        }
        for _ in range(count)
    ]
    empty = {"encoder_hidden_states": torch.zeros(3, 8), "encoder_attention_mask": torch.tensor([1, 0, 0])}
    return InMemoryData(samples, empty)


def dit_data(count: int = 16) -> InMemoryData:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {"latents": torch.randn(4, 8, 8, generator=generator), "class_labels": torch.tensor(index % 10)}
        for index in range(count)
    ]
    return InMemoryData(samples, {"class_labels": torch.tensor(10)})


def one_stage(output: object, steps: int = 4, **settings: Any) -> TrainingConfig:
    """A configuration of one stage; the stage's settings and the run's may be mixed."""
    of_stage = {
        name: settings.pop(name, default)
        for name, default in {
            "learning_rate": 1e-3,
            "trainable": "all",
            "mixing_learning_rate": None,
            "lora_rank": None,
            "scheduler": "constant",
            "warmup_steps": 0,
        }.items()
    }
    objectives = ObjectiveWeights(**settings.pop("objectives", {"diffusion": 1.0}))
    stage = StageConfig(steps=steps, objectives=objectives, **of_stage)
    return TrainingConfig(output=str(output), stages=(stage,), **{"batch_size": 2, **settings})
