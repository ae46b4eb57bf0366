"""What the recipes combine, at tiny size: precision, patches, losses, and LoRA or all weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig, load_mhla, remove_mhla
from mhla_diffusers.config import PatchConfig
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
ONLY_LORA = (StageConfig(1, 1e-3, "lora", BOTH, lora_rank=2),)
CAUSAL = CausalConfig(blocks=(2, 2, 2), block_length=1, beyond="relative")
SPARSE = SparseConfig(block_size=4, density=0.2)


def _mhla(axes: int) -> MHLAConfig:
    return MHLAConfig(blocks=(2,) * axes, mixing_per_head=True)


@pytest.mark.parametrize(
    ("stages", "precision", "family", "make", "patch"),
    [
        *((stages, "no", "wan", tiny_wan, SPARSE) for stages in (WEIGHTS, ONLY_LORA)),
        *((WEIGHTS, "bf16", "wan", tiny_wan, patch) for patch in (_mhla(3), SPARSE)),
        *((stages, "bf16", "wan", tiny_wan, CAUSAL) for stages in (WEIGHTS, LORA)),
        (ONLY_LORA, "bf16", "dit", tiny_dit, SPARSE),
        (WEIGHTS, "bf16", "sana", tiny_sana, _mhla(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "attention", ""),
)
def test_any_recipe_goes_with_any_patch_and_precision(
    stages: tuple[StageConfig, ...],
    precision: Literal["no", "bf16"],
    family: str,
    make: Callable[[], Any],
    patch: PatchConfig,
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
