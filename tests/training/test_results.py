"""The result of a run is the trained model, for every choice of trained weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig, apply_mhla, load_mhla, remove_mhla
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.families import predict
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train

from .models import FAMILIES, one_batch, settings
from .processes import finish, start_process

TRANSFER: dict[str, Any] = {"trainable": "attention", "objectives": {"transfer": 1.0}}
WEIGHTS: dict[str, Any] = {"trainable": "all", "objectives": {"diffusion": 1.0, "distillation": 1.0}}
LORA: dict[str, Any] = {**WEIGHTS, "trainable": "lora", "lora_rank": 2}
CAUSAL = CausalConfig(blocks=(2, 2, 2), block_length=1, beyond="relative")
SPARSE = SparseConfig(block_size=4, density=0.2)
BLOCKS, SQUARES = MHLAConfig(blocks=(2, 2, 2), mixing_per_head=True), MHLAConfig(blocks=(2, 2))


@pytest.mark.parametrize(
    ("trained", "precision", "family", "patch"),
    [
        (LORA, "no", "wan", SPARSE),
        ({"trainable": "mhla"}, "no", "wan", BLOCKS),
        (WEIGHTS, "no", "wan", BLOCKS),
        (TRANSFER, "bf16", "wan", SPARSE),
        (WEIGHTS, "bf16", "wan", SPARSE),
        (WEIGHTS, "bf16", "wan", CAUSAL),
        (LORA, "bf16", "dit", SPARSE),
        (WEIGHTS, "bf16", "sana", SQUARES),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "attention", ""),
)
def test_any_recipe_goes_with_any_patch_and_precision(
    trained: dict[str, Any], precision: str, family: str, patch: PatchConfig, tmp_path: Path
) -> None:
    make, data = FAMILIES[family]
    validation = ValidationConfig(samples=2, timesteps=1)
    usual = {"precision": precision, "gradient_checkpointing": precision == "bf16", "prompt_dropout": 0.1}
    config = settings(tmp_path, steps=2, patch=patch, validation=validation, learning_rate=1e-2, **usual, **trained)
    if precision == "bf16":  # accelerate keeps one precision per process
        finish([start_process(_train, family, config)], timeout=60)
    else:
        transformer = _train(family, config)
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [record["validation_loss"] if "validation_loss" in record else record["loss"] for record in records]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    loaded = load_mhla(make(), tmp_path / "result").eval()
    assert any(".lora_B.mhla." in name for name in loaded.state_dict()) == (trained is LORA)
    if precision == "no":
        batch = one_batch(loaded, data())
        with torch.no_grad():
            found, begun = predict(loaded, batch), predict(apply_mhla(make(), patch).eval(), batch)
            assert torch.allclose(found, predict(transformer.eval(), batch), atol=1e-6)
        assert not torch.allclose(found, begun, atol=1e-3)
    assert set(remove_mhla(loaded).state_dict()) == set(make().state_dict())


def _train(family: str, config: TrainingConfig) -> Any:
    make, data = FAMILIES[family]
    assert isinstance(config.patch, PatchConfig)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    transformer = apply_mhla(make().to(dtype), config.patch)
    assert train(transformer, data(), config).finished
    return transformer
