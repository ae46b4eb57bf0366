"""What the recipes combine, at tiny size: precision, patches, losses, and LoRA or all weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig, load_mhla, remove_mhla
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.training import ValidationConfig, read_metrics

from .models import settings, tiny_dit, tiny_sana, tiny_wan
from .processes import finish, start_training

TRANSFER: dict[str, Any] = {"trainable": "attention", "objectives": {"transfer": 1.0}}
WEIGHTS: dict[str, Any] = {"trainable": "all", "objectives": {"diffusion": 1.0, "distillation": 1.0}}
LORA: dict[str, Any] = {**WEIGHTS, "trainable": "lora", "lora_rank": 2}
CAUSAL = CausalConfig(blocks=(2, 2, 2), block_length=1, beyond="relative")
SPARSE = SparseConfig(block_size=4, density=0.2)


def _mhla(axes: int) -> MHLAConfig:
    return MHLAConfig(blocks=(2,) * axes, mixing_per_head=True)


@pytest.mark.parametrize(
    ("trained", "precision", "family", "make", "patch"),
    [
        (LORA, "no", "wan", tiny_wan, SPARSE),
        *((trained, "bf16", "wan", tiny_wan, SPARSE) for trained in (TRANSFER, WEIGHTS)),
        (TRANSFER, "bf16", "wan", tiny_wan, _mhla(3)),
        *((trained, "bf16", "wan", tiny_wan, CAUSAL) for trained in (WEIGHTS, LORA)),
        (LORA, "bf16", "dit", tiny_dit, SPARSE),
        (WEIGHTS, "bf16", "sana", tiny_sana, _mhla(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "attention", ""),
)
def test_any_recipe_goes_with_any_patch_and_precision(
    trained: dict[str, Any],
    precision: str,
    family: str,
    make: Callable[[], Any],
    patch: PatchConfig,
    tmp_path: Path,
) -> None:
    config = settings(
        tmp_path,
        steps=2,
        patch=patch,
        precision=precision,
        gradient_checkpointing=precision == "bf16",  # as in the recipes of large models
        ema_decay=0.9,
        prompt_dropout=0.1,
        validation=ValidationConfig(samples=2, timesteps=1),
        **trained,
    )
    finish([start_training(config, family=family)], timeout=60)
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [record["validation_loss"] if "validation_loss" in record else record["loss"] for record in records]
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    loaded, names = make(), set(make().state_dict())
    load_mhla(loaded, tmp_path / "result")
    assert any(".lora_B.mhla." in name for name in loaded.state_dict()) == (trained is LORA)
    assert set(remove_mhla(loaded).state_dict()) == names
