"""Runs that go on: resumed they are the run left alone; what may change; a result that another run begins with."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.families import predict
from mhla_diffusers.patching import PATCH_FILE
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.finetune import NamedRun
from mhla_diffusers.training.weights import Original, plain_name, prepare_for_training

from .. import models
from ..refusals import refused
from .models import one_batch, settings, wan_data
from .pipelines import wan_pipeline

PATCH = MHLAConfig(blocks=(2, 2, 2))
LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 4, "lora_layers": "blocks"}
FROZEN: dict[str, Any] = {**LORA, "gradient_checkpointing": True}


def _wide_wan() -> Any:
    """With matrices of more than 4096 values, which alone are kept in 8 bits."""
    wide = {"attention_head_dim": 24, "num_attention_heads": 4, "ffn_dim": 96}
    return models.wan(noise=0, in_channels=4, out_channels=4, text_dim=8, num_layers=1, **wide)


def _config(output: Path, **changes: Any) -> TrainingConfig:
    both = {"diffusion": 1.0, "distillation": 1.0}
    usual = {"steps": 3, "trainable": "attention", "objectives": both, "patch": PATCH, "checkpoint_every": 1}
    return settings(output, **{**usual, "ema_decay": 0.9, "keep_checkpoints": 9, **changes})


def _train(config: TrainingConfig, resume: str | None = None) -> list[dict[str, Any]]:
    # torchao's AdamW compiles an update for ten seconds per shape
    compiles = config.optimizer == "adamw8bit"
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        assert train(apply_mhla(_wide_wan(), PATCH), wan_data(), config, resume=resume).finished
    return [record for record in read_metrics(Path(config.output) / "metrics.jsonl") if "loss" in record]


def _files(result: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(result.glob("*.safetensors"))]


@pytest.mark.parametrize(
    ("changes", "library", "close"),
    [
        ({}, "torch", None),
        ({"objectives": {"transfer": 1.0}}, "torch", None),
        ({"optimizer": "adamw8bit"}, "torchao", 0.01),
        ({"optimizer": "adafactor"}, "torch", 0.1),
        ({"optimizer": "schedule-free", "ema_decay": None}, "schedulefree", 0.1),
        ({**FROZEN, "base_dtype": "int8"}, "torchao", 0.01),
        ({**FROZEN, "base_dtype": "nf4"}, "bitsandbytes", 0.1),
    ],
)
def test_a_resumed_run_is_the_run_left_alone(
    changes: dict[str, Any], library: str, close: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with more updates, and validated more often. Small optimizers and frozen weights train as usual ones do."""
    pytest.importorskip(library, reason="an extra that make test does not install")
    caplog.set_level("INFO")
    changes = {**changes, "validation": ValidationConfig(samples=2)}
    alone = _train(_config(tmp_path / "alone", steps=6, **changes))
    _train(_config(tmp_path / "run", **changes))
    often = {**changes, "validation": ValidationConfig(samples=2, every=1)}
    resumed = _train(_config(tmp_path / "run", steps=6, **often), "latest")
    assert "Changed: steps: 3 → 6. Changed: validation.every: 100 → 1." in caplog.text
    assert len(alone) == 6 and resumed == alone
    assert _files(tmp_path / "run/result") == _files(tmp_path / "alone/result")
    assert all(x.isfinite().all() for x in load_mhla(_wide_wan(), tmp_path / "run/result").parameters())
    if close is not None:
        usual = {name: value for name, value in changes.items() if name not in ("optimizer", "base_dtype")}
        exact = [record["loss"] for record in _train(_config(tmp_path / "exact", steps=6, **usual))]
        losses = [record["loss"] for record in alone]
        assert losses == pytest.approx(exact, rel=close) and losses != exact


def test_another_rate_and_schedule_hold_from_the_checkpoint_on(tmp_path: Path) -> None:
    """In a folder of their own, since the run has gone further than the checkpoint."""
    _train(_config(tmp_path / "run"))
    other: dict[str, Any] = {"steps": 5, "learning_rate": 1e-4, "mixing_learning_rate": 1e-3, "scheduler": "cosine"}
    records = _train(_config(tmp_path / "other", **other), str(tmp_path / "run/checkpoints/step-00000002"))
    rates = [record["learning_rate"] for record in records]
    with pytest.raises(ValueError, match="steps=2.* already at step 3; raise steps"):
        _train(_config(tmp_path / "run", steps=2), "latest")
    assert [record["step"] for record in records] == [3, 4, 5] and 1e-4 > rates[0] > rates[1] > rates[2] > 0


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    _train(_config(folder, steps=1))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 6}, "samples per update=6, which was 2"),
        ({"validation": ValidationConfig(samples=4)}, "training samples=12, which was 16"),
        ({"trainable": "mhla"}, "trainable='mhla', which was 'attention'.* may change: .*steps"),
        ({"patch": MHLAConfig(blocks=(2, 2, 1))}, r"patch\.blocks=\[2, 2, 1\], which was \[2, 2, 2\]"),
    ],
)
def test_what_may_not_change_is_said_with_both_values(changes: dict[str, Any], words: str, begun: Path) -> None:
    checkpoint = begun / "checkpoints" / "step-00000001"
    with pytest.raises(ValueError, match=f"{checkpoint} .*{words}"):
        _train(_config(begun, **{"steps": 2, **changes}), "latest")


# Runs that begin with a result


@pytest.fixture(scope="module", params=[{}, LORA], ids=["attention", "lora"])
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module")
def result(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result with weights of the model, or with a LoRA."""
    folder = tmp_path_factory.mktemp("first")
    wan_pipeline().save_pretrained(folder / "model")
    config = _config(folder, learning_rate=1e-2, model=str(folder / "model"), **changes)
    trained = train(apply_mhla(wan_pipeline().transformer, PATCH), wan_data(), config).result
    assert trained is not None
    return trained


def _begin(result: Path, output: Path, **changes: Any) -> tuple[TrainingConfig, Any]:
    """Settings of a run that begins with a result, and its transformer."""
    named = {"data": str(output / "none"), "model": str(result.parent / "model"), "patch": str(result)}
    config = _config(output, **named, **changes)
    return config, NamedRun(config).transformer(with_weights=True)


def _output(transformer: Any) -> torch.Tensor:
    with torch.no_grad():
        return predict(transformer.eval(), one_batch(transformer, wan_data()))


def test_a_run_begins_with_a_result_and_its_teacher_is_the_original_model(
    result: Path, changes: dict[str, Any], tmp_path: Path
) -> None:
    """By name as by hand; updates that change nothing end with that result."""
    config, transformer = _begin(result, tmp_path / "run", learning_rate=1e-30, **changes)
    began = _output(transformer)
    # not bits: memory is laid out otherwise
    assert_close(began, _output(load_mhla(wan_pipeline().transformer, result)))
    original = wan_pipeline().transformer
    assert not torch.allclose(began, _output(apply_mhla(wan_pipeline().transformer, PATCH)), atol=1e-3)
    again = train(transformer, wan_data(), config).result
    assert again is not None and _files(again) == _files(result)

    # also under a LoRA
    _, transformer = _begin(result, tmp_path / "run", **changes)
    trained = prepare_for_training(transformer, config.replace(**LORA))
    with Original(transformer, trained).at_work():
        assert_close(_output(transformer), _output(original))
        found = {plain_name(name): parameter for name, parameter in transformer.named_parameters()}
        assert all(torch.equal(found[name], parameter) for name, parameter in original.named_parameters())
    assert torch.equal(_output(transformer), began)

    # what was trained stays in float32 in a model in bfloat16
    _, transformer = _begin(result, tmp_path / "run", precision="bf16", **changes)
    parameters, saved = dict(transformer.named_parameters()), load_file(result / PATCH_FILE)
    found = {f"transformer.{plain_name(name)}": parameter for name, parameter in parameters.items()}
    assert all(torch.equal(found[name], x) for name, x in saved.items())
    assert transformer.proj_out.weight.dtype == torch.bfloat16


def test_a_lora_to_begin_with_and_the_run_must_fit(result: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    if changes:
        for wrong in (LORA | {"lora_rank": 2}, LORA | {"lora_layers": "attention"}, {}):
            config, transformer = _begin(result, tmp_path / "run", **wrong)
            with refused("patch='"):
                train(transformer, wan_data(), config)
    else:  # a LoRA over weights that the first run has changed
        config, transformer = _begin(result, tmp_path / "run", **LORA)
        both = train(transformer, wan_data(), config).result
        assert both is not None
        before, after = (load_file(folder / PATCH_FILE) for folder in (result, both))
        kept = [name for name in before if ".mhla." not in name]
        assert all(torch.equal(before[name], after.pop(name)) for name in kept)
        assert all(".mhla." in name or ".lora_" in name for name in after) and any(".lora_A." in name for name in after)
