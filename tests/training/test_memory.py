"""Optimizers by name, and frozen weights in 8 bits: they train, resume bit for bit, and are counted."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.estimate import StageEstimate, estimate
from mhla_diffusers.training.finetune import dry_run, finetune

from .. import models
from .models import one_stage, wan_data

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
    ("settings", "library", "close"),
    [
        ({"optimizer": "adamw8bit"}, "torchao", 0.01),
        ({"optimizer": "adafactor"}, "torch", 0.1),
        ({"optimizer": "schedulefree"}, "schedulefree", 0.1),
        ({**LORA, "base_dtype": "int8"}, "torchao", 0.01),
        ({**LORA, "base_dtype": "float8"}, "torchao", 0.05),
    ],
)
def test_each_trains_as_adamw_does_in_float32_and_resumes(
    settings: dict[str, Any], library: str, close: float, tmp_path: Path
) -> None:
    """Validating more often leaves the rest as it is, also where validation averages the weights."""
    pytest.importorskip(library, reason="an extra that make test does not install")
    common = {"steps": 6, "checkpoint_every": 3, "patch": PATCH, "validation": ValidationConfig(samples=2, every=6)}
    common |= {name: value for name, value in settings.items() if name in LORA}
    config = one_stage(tmp_path / "run", **{**common, **settings})
    records, exact = run(config), run(one_stage(tmp_path / "exact", **common))
    losses, expected = ([record["loss"] for record in some if "loss" in record] for some in (records, exact))
    assert losses == pytest.approx(expected, rel=close) and losses != expected
    result = tmp_path / "run/result"
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    again = replace(config, validation=replace(config.validation, every=2))
    assert run(again, str(tmp_path / "run/checkpoints/step-00000003"))[-2:] == records[-2:]
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    loaded = load_mhla(wide_wan(), result)
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())


def test_moments_in_8_bits_are_small(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra that make test does not install")
    for name in ("adamw", "adamw8bit"):
        run(one_stage(tmp_path / name, steps=1, optimizer=name, patch=PATCH))
    files = [tmp_path / name / "checkpoints/step-00000001/optimizer.safetensors" for name in ("adamw", "adamw8bit")]
    assert files[1].stat().st_size < 0.5 * files[0].stat().st_size


@pytest.mark.parametrize(
    ("settings", "module", "extra"),
    [
        ({"optimizer": "adamw8bit"}, "torchao.optim", "quantize"),
        ({"optimizer": "schedulefree"}, "schedulefree", "schedulefree"),
        ({**LORA, "patch": PATCH, "base_dtype": "int8"}, "torchao.quantization", "quantize"),
    ],
)
def test_a_missing_library_is_told_before_anything_is_loaded(
    settings: dict[str, Any], module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = one_stage(tmp_path / "run", model="nowhere", data="nowhere", **settings)
    for begin in (finetune, dry_run):
        with pytest.raises(ImportError, match=rf"\[{extra}\]"):
            begin(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"base_dtype": "int8"}, "base_dtype='int8' .*trainable: lora"),
        ({**LORA, "gradient_checkpointing": False, "base_dtype": "int8"}, "gradient_checkpointing: true"),
        ({"optimizer": "schedulefree", "ema_decay": 0.9}, "ema_decay"),
        ({"optimizer": "schedulefree", "scheduler": "cosine"}, "scheduler: cosine"),
        ({"optimizer": "adam"}, "'adam'.*schedulefree"),
        ({**LORA, "base_dtype": "int8"}, "base_dtype='int8'.* 2 "),
        ({"optimizer": "adafactor", "processes": 2}, "optimizer=adafactor"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, named, tmp_path, monkeypatch):
    """Or several processes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=named):
        counted(**settings) if "processes" in settings else run(one_stage(tmp_path, patch=PATCH, **settings))


def counted(processes: int | None = None, **settings: Any) -> StageEstimate:
    with torch.device("meta"):
        transformer = wide_wan()
    config = one_stage("unused", patch=PATCH, precision="bf16", **settings)
    (stage,) = estimate(apply_mhla(transformer, PATCH), wan_data()[0], config, processes).stages
    return stage


def test_a_dry_run_counts_the_optimizer_and_the_type_of_the_base() -> None:
    full = {name: counted(optimizer=name) for name in ("adamw", "adamw8bit", "adafactor", "schedulefree")}
    count = full["adamw"].trainable_parameters
    assert full["adamw"].training_bytes == full["schedulefree"].training_bytes == 12 * count
    assert 4 * count < full["adafactor"].training_bytes < 4.5 * count
    assert 6 * count < full["adamw8bit"].training_bytes < 7 * count
    linears = [module for module in wide_wan().blocks.modules() if isinstance(module, torch.nn.Linear)]
    weights, rows = (sum(size) for size in ((x.weight.numel() for x in linears), (x.out_features for x in linears)))
    saved = counted(**LORA).weight_bytes - counted(**LORA, base_dtype="int8").weight_bytes
    assert saved == weights - 4 * rows - 2 * weights, "its only block is held in bfloat16 as well"
