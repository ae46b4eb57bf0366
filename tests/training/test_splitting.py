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


def differences(one: Path, other: Path) -> dict[str, float]:
    """Relative differences of two runs: of the metrics, and after every update of gradients and weights.

    The first moments that AdamW begins a stage with are its gradients, but for a factor.
    """
    found = {}
    records = [read_metrics(path / "metrics.jsonl") for path in (one, other)]
    for here, there in zip(*records, strict=True):
        assert here.keys() == there.keys()
        found |= {
            f"{name} after {here['step']}": abs(value - there[name]) / max(abs(value), 1e-6)
            for name, value in here.items()
        }
    for step in (1, 2):
        weights, moments = (
            [load_file(path / f"checkpoints/step-{step:08d}" / f"{kind}.safetensors") for path in (one, other)]
            for kind in ("weights", "optimizer")
        )
        gradients = [{name: x for name, x in of_run.items() if name.endswith("exp_avg")} for of_run in moments]
        for here, there in (weights, gradients):
            assert here.keys() == there.keys()
            # of a bias that was zero, or a gradient that would be, all is rounding
            least = 1e-3 * max(value.norm() for value in here.values())
            for name, value in here.items():
                found[f"{name} after {step}"] = float((there[name] - value).norm() / max(value.norm(), least))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config(folder / "run", 2))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "ring", "ulysses", "sharding"),
    [(2, 2, 1, FSDP2), (2, 1, 2, FSDP2), (4, 2, 2, FSDP2), (4, 2, 1, FSDP2), (4, 1, 2, {})],
    ids=["ring", "ulysses", "both", "two groups", "two groups with copies of the weights"],
)
def test_an_update_is_that_of_one_process(
    alone: Path, processes: int, ring: int, ulysses: int, sharding: dict[str, str], tmp_path: Path
) -> None:
    groups = processes // (ring * ulysses)
    settings = config(tmp_path / "run", 2 // groups, ContextParallel(ring, ulysses))
    finish(start_distributed_training(settings, processes, **sharding))
    found = differences(alone, tmp_path / "run")
    assert max(found.values()) < ROUNDING, sorted(found.items(), key=lambda item: -item[1])[:6]
