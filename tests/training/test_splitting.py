"""One batch spread over several processes trains as it does in one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.config import ContextParallel

from .models import tiny_wan, wan_data
from .processes import finish, start_distributed_training
from .test_sharding import FSDP2

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
"""Beside a layer that keeps softmax."""
TRANSFER_THEN_ALL = (
    StageConfig(1, 1e-3, "attention", ObjectiveWeights(transfer=1.0)),
    StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0, distillation=1.0)),
)
ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""


def config(output: Path, batch_size: int, degrees: ContextParallel | None = None, **settings: Any) -> TrainingConfig:
    given: dict[str, Any] = {
        "stages": TRANSFER_THEN_ALL,
        "patch": PATCH,
        "gradient_accumulation": 2,
        "prompt_dropout": 0.3,
        "checkpoint_every": 1,
        "validation": ValidationConfig(samples=3, every=1, timesteps=1),
    }
    degrees = degrees or ContextParallel()
    return TrainingConfig(output=str(output), batch_size=batch_size, context_parallel=degrees, **(given | settings))


def worst(one: Path, other: Path, stage: int) -> dict[str, float]:
    """Relative differences of the metrics, of the gradients of a stage's only update, and of the weights after it."""
    found = {}
    folder = f"checkpoints/step-{stage + 1:08d}"
    records = [read_metrics(path / "metrics.jsonl") for path in (one, other)]
    for here, there in zip(*records, strict=True):
        assert here.keys() == there.keys()
        for name in here:
            found[f"metric {name}"] = abs(here[name] - there[name]) / max(abs(here[name]), 1e-9)
    print(sorted(p.name for p in (one / folder).iterdir()))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config(folder / "run", 2))
    return folder / "run"


@pytest.mark.parametrize("sharding", [{}, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("processes", "ring", "ulysses"), [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1)], ids="{}".format
)
def test_one_update_is_that_of_one_process(
    alone: Path, processes: int, ring: int, ulysses: int, sharding: dict[str, str], tmp_path: Path
) -> None:
    groups = processes // (ring * ulysses)
    settings = config(tmp_path / "run", 2 // groups, ContextParallel(ring, ulysses))
    finish(start_distributed_training(settings, processes, **sharding))
    print(worst(alone, tmp_path / "run", 1))
