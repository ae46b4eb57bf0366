"""What the recipes combine, at tiny size: precision, the sparse branch, losses, and LoRA or all weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from mhla_diffusers import MHLAConfig, load_mhla, remove_mhla
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics

from .models import tiny_dit, tiny_sana, tiny_wan
from .processes import finish, start_training

TRANSFER, DISTILLATION = ObjectiveWeights(transfer=1.0), ObjectiveWeights(distillation=1.0)
BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
WEIGHTS = (
    StageConfig(1, 1e-3, "attention", TRANSFER),
    StageConfig(1, 1e-3, "attention", DISTILLATION),
    StageConfig(1, 1e-3, "all", BOTH),
)
LORA = (StageConfig(1, 1e-3, "mhla", TRANSFER), StageConfig(1, 1e-3, "lora", BOTH, lora_rank=2))
CAUSAL = MHLAConfig(blocks=(2, 2, 2), causal="block", block_length=1, beyond="relative")


def _patch(axes: int, **settings: Any) -> MHLAConfig:
    return MHLAConfig(blocks=(2,) * axes, mixing_per_head=True, **settings)


SPARSE: dict[str, Any] = {"block_size": 4}
LEARNED = SPARSE | {"fit_pooled_bias": False}


@pytest.mark.parametrize(
    ("stages", "precision", "family", "make", "patch"),
    [
        *((stages, "no", "wan", tiny_wan, _patch(3, **SPARSE)) for stages in (WEIGHTS, LORA)),
        *((WEIGHTS, "bf16", "wan", tiny_wan, _patch(3, **settings)) for settings in ({}, SPARSE, LEARNED)),
        *((stages, "bf16", "wan", tiny_wan, CAUSAL) for stages in (WEIGHTS, LORA)),
        (LORA, "bf16", "dit", tiny_dit, _patch(2, **SPARSE)),
        (WEIGHTS, "bf16", "sana", tiny_sana, _patch(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "sparse", ""),
)
def test_any_recipe_goes_with_any_patch_and_precision(
    stages: tuple[StageConfig, ...],
    precision: Literal["no", "bf16"],
    family: str,
    make: Callable[[], Any],
    patch: MHLAConfig,
    tmp_path: Path,
) -> None:
    config = TrainingConfig(
        output=str(tmp_path),
        stages=stages,
        patch=patch,
        batch_size=2,
        precision=precision,
        gradient_checkpointing=precision == "bf16",  # as in the recipes of large models
        ema_decay=0.9,
        prompt_dropout=0.1,
        validation=ValidationConfig(samples=2, timesteps=1),
    )
    finish([start_training(config, family=family)], timeout=60)
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [record["validation_loss"] if "validation_loss" in record else record["loss"] for record in records]
    assert len(losses) == len(stages) + 2
    assert all(math.isfinite(loss) for loss in losses)
    trained, names = make(), set(make().state_dict())
    load_mhla(trained, tmp_path / "result")
    assert any(".lora_B.mhla." in name for name in trained.state_dict()) == (stages[-1].lora_rank is not None)
    assert set(remove_mhla(trained).state_dict()) == names
