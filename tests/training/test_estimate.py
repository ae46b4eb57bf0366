"""What a dry run counts."""

from functools import cache

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.training import TrainingConfig
from mhla_diffusers.training.config import ObjectiveWeights, StageConfig
from mhla_diffusers.training.estimate import Estimate, estimate

from .. import models
from ..refusals import refused

FRAMES, SIDE, WIDTH, LAYERS = 8, 16, 24, 2
TOKENS = FRAMES * (SIDE // 2) ** 2
BLOCK = 8


@cache
def dry_run(**patch: object) -> Estimate:
    with torch.device("meta"):
        transformer = models.wan(num_layers=LAYERS)
    apply_mhla(transformer, **patch)
    sample = {"latents": torch.empty(16, FRAMES, SIDE, SIDE), "encoder_hidden_states": torch.empty(6, 32)}
    stage = StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0))
    return estimate(transformer, sample, TrainingConfig("unused", (stage,)))


def test_listed_pairs_are_counted() -> None:
    """Two products forward, the same again in the backward, and four gradients: per query and listed key."""
    counted = {
        density: dry_run(block_size=BLOCK, density=density, dense_layers=0).stages[0] for density in (0.125, 0.5)
    }
    product = 2 * TOKENS * WIDTH * LAYERS
    assert counted[0.5].flops - counted[0.125].flops == pytest.approx(8 * product * TOKENS * 3 / 8, rel=1e-6)
    mhla = dry_run(blocks=(2, 2, 2)).stages[0]
    assert mhla.trainable_parameters - counted[0.5].trainable_parameters == LAYERS * 8**2, "mixing matrices"
    assert counted[0.125].activation_bytes < counted[0.5].activation_bytes


@cache
def split_run(group: int, processes: int | None = None) -> Estimate:
    with torch.device("meta"):
        transformer = models.wan()
    patch = MHLAConfig(blocks=(2, 2, 2))
    apply_mhla(transformer, patch)
    sample = {"latents": torch.empty(16, FRAMES, SIDE, SIDE), "encoder_hidden_states": torch.empty(6, 32)}
    stages = (
        StageConfig(1, 1e-3, "attention", ObjectiveWeights(transfer=1.0)),
        StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0, distillation=1.0)),
    )
    return estimate(
        transformer, sample, TrainingConfig("unused", stages, patch=patch, context_parallel=group), processes
    )


def test_tokens_over_processes_are_counted_from_what_one_of_them_does() -> None:
    whole, split = split_run(1), split_run(2)
    assert not torch.distributed.is_initialized()
    for alone, shared in zip(whole.stages, split.stages, strict=True):
        assert shared.activation_bytes < alone.activation_bytes
        assert shared.flops == pytest.approx(alone.flops / 2, rel=0.2)
        assert shared.weight_bytes == alone.weight_bytes
    # attention transfer holds one layer at a time, of which what is sent and received is a large part
    most = 1.3 * whole.stages[1].activation_bytes / 2
    assert split.stages[1].activation_bytes < most
    assert f"{TOKENS // 2:,} on each of 2 processes" in str(split)


def test_weights_in_parts_are_a_share_and_what_is_gathered() -> None:
    alone, parts = (split_run(1, processes).stages[1] for processes in (None, 4))
    assert parts.training_bytes == alone.training_bytes // 4
    assert alone.weight_bytes / 4 < parts.weight_bytes < alone.weight_bytes / 4 + 4 * alone.trainable_parameters
    with refused(" 2 ", " 3 "):
        split_run(2, 3)
