"""Optimizers by name, and frozen weights in 8 bits: they train and resume bit for bit."""

import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.finetune import finetune

from .. import models
from .models import settings, wan_data

PATCH = MHLAConfig(blocks=(2, 2, 2))
LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 4, "gradient_checkpointing": True}


def wide_wan() -> Any:
    """With matrices of more than 4096 values, which alone are kept in 8 bits."""
    wide = {"attention_head_dim": 24, "num_attention_heads": 4, "ffn_dim": 96}
    return models.wan(noise=0, in_channels=4, out_channels=4, text_dim=8, num_layers=1, **wide)


def run(config: TrainingConfig, resume: str | None = None) -> list[dict[str, Any]]:
    # torchao's AdamW compiles an update for ten seconds per shape
    is_compiled = config.optimizer == "adamw8bit"
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        train(apply_mhla(wide_wan(), PATCH), wan_data(), config, resume=resume)
    return read_metrics(Path(config.output) / "metrics.jsonl")


@pytest.mark.parametrize(
    ("changes", "library", "close"),
    [
        ({"optimizer": "adamw8bit"}, "torchao", 0.01),
        ({"optimizer": "adafactor"}, "torch", 0.1),
        ({"optimizer": "schedulefree"}, "schedulefree", 0.1),
        ({**LORA, "base_dtype": "int8"}, "torchao", 0.01),
        ({**LORA, "base_dtype": "float8"}, "torchao", 0.05),
        ({**LORA, "base_dtype": "nf4"}, "bitsandbytes", 0.1),
    ],
)
def test_each_trains_as_adamw_does_in_float32_and_resumes(
    changes: dict[str, Any], library: str, close: float, tmp_path: Path
) -> None:
    """Validating more often leaves the rest as it is, also where validation averages the weights."""
    pytest.importorskip(library, reason="an extra that make test does not install")
    common = {"steps": 6, "checkpoint_every": 3, "patch": PATCH, "validation": ValidationConfig(samples=2, every=6)}
    common |= {name: value for name, value in changes.items() if name in LORA}
    config = settings(tmp_path / "run", **{**common, **changes})
    records, exact = run(config), run(settings(tmp_path / "exact", **common))
    losses, expected = ([record["loss"] for record in some if "loss" in record] for some in (records, exact))
    assert losses == pytest.approx(expected, rel=close) and losses != expected
    result = tmp_path / "run/result"
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    again = replace(config, validation=replace(config.validation, every=2))
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    assert run(again, "latest")[-2:] == records[-2:]
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    loaded = load_mhla(wide_wan(), result)
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("changes", "module", "extra"),
    [
        ({"optimizer": "adamw8bit"}, "torchao.optim", "quantize"),
        ({"optimizer": "schedulefree"}, "schedulefree", "schedulefree"),
        ({**LORA, "patch": PATCH, "base_dtype": "int8"}, "torchao.quantization", "quantize"),
        ({**LORA, "patch": PATCH, "base_dtype": "nf4"}, "bitsandbytes.nn", "quantize"),
    ],
)
def test_a_missing_library_is_told_before_anything_is_loaded(
    changes: dict[str, Any], module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = settings(tmp_path / "run", model="nowhere", data="nowhere", **changes)
    with pytest.raises(ImportError, match=rf"\[{extra}\]"):
        finetune(config)
    assert not (tmp_path / "run").exists()
