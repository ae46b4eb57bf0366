"""Several processes train as one does, with copies of the weights or shards; what does not work so is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import ValidationConfig, read_metrics, train

from .models import settings, tiny_wan, wan_data
from .processes import finish, start_distributed_training

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
"""Beside a layer that keeps softmax."""
COMMON: dict[str, Any] = {
    "patch": PATCH,
    "prompt_dropout": 0.3,
    "gradient_accumulation": 2,
    "ema_decay": 0.9,
    "max_gradient_norm": 0.05,
    "validation": ValidationConfig(samples=3, every=2),
}
LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 2, "gradient_checkpointing": True}

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
"""What accelerate launch tells with finetune/accelerate/fsdp.yaml."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="would take the GPUs")
@pytest.mark.parametrize("launched", [{"ACCELERATE_USE_CPU": "false"}, FSDP], ids=["copies", "shards"])
@pytest.mark.parametrize(
    "trained",
    [
        {"trainable": "attention", "objectives": {"transfer": 1.0}},
        {"trainable": "all", "objectives": {"diffusion": 1.0, "distillation": 1.0}},
        {**LORA, "objectives": {"distillation": 1.0}},
    ],
    ids=lambda trained: trained["trainable"],
)
def test_two_processes_are_one_with_twice_the_batch(
    launched: dict[str, str], trained: dict[str, Any], tmp_path: Path
) -> None:
    """With copies of the weights, as torchrun starts them, or shards; also from a checkpoint, of one or of shards."""
    config = settings(tmp_path / "two", batch_size=1, checkpoint_every=2, keep_checkpoints=9, **COMMON, **trained)
    two = start_distributed_training(config, processes=2, **launched)
    one = settings(tmp_path / "one", batch_size=2, checkpoint_every=2, keep_checkpoints=9, **COMMON, **trained)
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), one)
    finish(two, timeout=120)
    middle = str(tmp_path / ("two" if launched is FSDP else "one") / "checkpoints/step-00000002")
    again = settings(tmp_path / "again", batch_size=1, **COMMON, **trained)
    finish(start_distributed_training(again, 2, middle, **launched), timeout=120)
    alone, found, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two", "again"))
    assert len(alone) == len(found) == 7 and len(resumed) == 3
    assert launched is not FSDP or resumed == found[-3:]
    for here, there in [*zip(alone, found, strict=True), *zip(alone[-3:], resumed, strict=True)]:
        assert here == pytest.approx(there, rel=1e-4)
    one, two = (load_mhla(tiny_wan(), tmp_path / name / "result").state_dict() for name in ("one", "two"))
    assert all(torch.allclose(two[name], value, atol=1e-4) for name, value in one.items())


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        ("ACCELERATE_USE_FSDP=true", {"optimizer": "adafactor"}, "adafactor.*finetune/accelerate/ddp.yaml"),
        ("ACCELERATE_USE_FSDP=true", {"validation": ValidationConfig(prompts=("a cat",))}, "validation.prompts"),
        ("ACCELERATE_USE_FSDP=true", {}, "no FSDP on CPUs; .*torchrun"),
        ("FSDP_OFFLOAD_PARAMS=true", {}, "without offload.*finetune/accelerate/fsdp.yaml"),
        ("FSDP_ACTIVATION_CHECKPOINTING=true", {}, "gradient_checkpointing: true"),
        ("ACCELERATE_USE_DEEPSPEED=true", {}, "DeepSpeed.*finetune/accelerate/fsdp.yaml"),
        ("WORLD_SIZE=2", {}, "WORLD_SIZE"),  # launched, but not joined
        ("WORLD_SIZE=2", {**LORA, "patch": PATCH, "base_dtype": "int8"}, "base_dtype='int8'.* one process"),
    ],
)
def test_unsupported_processes_are_refused_before_training(
    environment: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment.startswith("FSDP"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(*environment.split("="))
    with pytest.raises(ValueError, match=message):
        train(tiny_wan(), wan_data(), settings(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
